"""Runs strategies in turn, each in a process of its own, and collects what `adacc bench` shows.

A group of processes lives at a time, "plain" and "full" among them: in every round each makes one step, in the opposite
order every other round, so that a slower minute of the machine slows all of them and ratios within a round hold.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_adacc.cost.cache import VARIABLE
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.bench_progress import Told
from megatron_adacc.megatron.bench_strategies import LEARN

REFERENCES = ("plain", "full")  # in every group: what the ratios are to


class Failed(Exception):
    """A strategy could not do what it was asked."""


@dataclass
class Row:
    """One strategy on one case. ``held``, ``peak``: bytes. ``times``: (CPU, wall) seconds by round, ``beside`` them
    those of the references in the same round. ``promised``: what the plan promised, None for others. ``same_as``: the
    strategy whose plan this one has, too. ``note``: why there is no figure."""

    name: str
    held: int = 0
    peak: int = 0
    error: float = 0.0
    loss: float = 0.0
    first: float = 0.0
    times: list[tuple[float, float]] = field(default_factory=list)
    beside: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    promised: dict[str, Any] | None = None
    same_as: str = ""
    note: str = ""

    def seconds(self, clock: int) -> float:
        """Median over the rounds, of the CPU's (0) or the wall's (1)."""
        return statistics.median(time[clock] for time in self.times)

    def ratio(self, reference: str, clock: int) -> tuple[float, float, float]:
        """Median, least and largest of the rounds' ratios to the reference."""
        ratios = [a[clock] / b[clock] for a, b in zip(self.times, self.beside[reference], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)

    def to_data(self, clock: int) -> dict[str, Any]:
        """As builtins, for JSON."""
        if self.note or self.same_as:
            return {"strategy": self.name, "same_as": self.same_as, "note": self.note}
        ratios = {name: self.ratio(name, clock) for name in self.beside}
        return {
            "strategy": self.name, "held_bytes": self.held, "peak_bytes": self.peak, "largest_error": self.error,
            "loss": self.loss, "first_seconds": self.first, "times": self.times, "promised": self.promised,
            **{f"to_{name}": {"median": m, "least": low, "largest": high} for name, (m, low, high) in ratios.items()},
        }  # fmt: skip


class Process:
    """One worker (bench_worker.py)."""

    def __init__(
        self, name: str, flags: Sequence[str], threads: int, plan: Path | None, cache: Path, log: Path
    ) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), VARIABLE: str(cache)}
        self._log = log.open("w")
        self._path = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_adacc.megatron.bench_worker"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
        )  # fmt: skip
        try:
            path = None if plan is None else str(plan)
            self.ask("start", strategy=name, flags=list(flags), threads=threads, plan=path)
        except Failed:
            self.end()
            raise

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """The worker's answer. Raises Failed where it has none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **details}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.end()
            lines = [text for text in self._path.read_text(errors="replace").splitlines() if text.strip()]
            raise Failed(f"its process ended: {lines[-1] if lines else 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def end(self) -> None:
        """The process is gone afterwards."""
        self._process.kill()
        self._process.wait()
        self._log.close()


class Case:
    """All strategies on one model. ``at_once``: processes that live at a time. ``told``: of what is done.
    ``expected``: how many strategies there will be, as far as is known; only shown."""

    def __init__(self, flags: Sequence[str], rounds: int, threads: int, at_once: int, told: Told) -> None:
        self.rows: dict[str, Row] = {}
        self.expected = 0
        self._flags, self._rounds, self._threads = list(flags), rounds, threads
        self._at_once, self._told = max(len(REFERENCES) + 1, at_once), told
        self._numbers: dict[str, int] = {}  # of a strategy, from 1, in the order of their first steps
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        self._gradients = self._path / "gradients.pt"
        self._references: dict[str, Process] = {}
        self._learner: Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self._references.values(), self._learner):
            if process is not None:
                process.end()
        self._folder.cleanup()

    def compare(self, names: Sequence[str], plans: Mapping[str, dict[str, Any]] | None = None) -> None:
        """Measure these strategies beside the references; ``plans``: by name, as bench_plans.py answers."""
        plans = plans or {}
        left = [name for name in self._once(names, plans) if name not in REFERENCES]
        of_a_group = self._at_once - len(REFERENCES)
        for start in range(0, max(1, len(left)), of_a_group):
            self._group([*REFERENCES, *left[start : start + of_a_group]], plans)

    def _once(self, names: Sequence[str], plans: Mapping[str, dict[str, Any]]) -> list[str]:
        """The names without those that have another's plan, or none."""
        first: dict[str, str] = {}
        left = []
        for name in names:
            answer = plans.get(name, {})
            if "failed" in answer:
                self.rows[name] = Row(name, note=answer["failed"])
                self._told.done(f"{name}: no plan ({self._place(name)})")
                continue
            content = {**json.loads(answer["plan"]), "name": ""} if "plan" in answer else name
            other = first.setdefault(json.dumps(content, sort_keys=True), name)
            if other != name:
                self.rows[name] = Row(name, same_as=other, promised=answer)
                self._told.done(f"{name}: the plan of {other} ({self._place(name)})")
            else:
                left.append(name)
        return left

    def _place(self, name: str) -> str:
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        return f"{number} of {max(self.expected, len(self._numbers))}"

    def _start(self, name: str, plans: Mapping[str, dict[str, Any]]) -> Process:
        path = None
        if name in plans:
            path = self._path / f"{len(self.rows)}-{abs(hash(name))}.json"
            path.write_text(plans[name]["plan"])
        log = self._path / f"{name.replace(' ', '-').replace('=', '')}.log"
        return Process(name, self._flags, self._threads, path, self._path / "prices", log)

    def _group(self, names: Sequence[str], plans: Mapping[str, dict[str, Any]]) -> None:
        """References live as long as the case, the others for this group."""
        alive = dict(self._references)
        try:
            for name in names:
                if name in alive:
                    continue
                self._told.doing(f"{name}: first steps", f"strategy {self._place(name)}")
                details = {key: value for key, value in plans.get(name, {}).items() if key != "plan"}
                row = self.rows[name] = Row(name, promised=details or None)
                process = None
                try:
                    process = self._start(name, plans)
                    self._first(process, row)
                    alive[name] = process
                    self._told.done(f"{name}: first steps done ({self._place(name)})")
                except Failed as error:
                    row.note = str(error)
                    self._told.done(f"{name}: failed ({self._place(name)})")
                    if process is not None:
                        process.end()
                    if name == REFERENCES[0]:
                        raise UserError(f"The model itself did not run: {row.note}.") from None
                    continue
                if name in REFERENCES:
                    self._references[name] = process
            self._rounds_of(alive)
        finally:
            for name, process in alive.items():
                if name not in REFERENCES:
                    process.end()

    def _first(self, process: Process, row: Row) -> None:
        row.first = process.ask("warm_up")["first"]
        memory = process.ask("memory")
        row.held, row.peak = memory["held"], memory["peak"]
        if process.name == "plain":
            process.ask("save_gradients", path=str(self._gradients))
        else:
            row.error = process.ask("compare_gradients", path=str(self._gradients))["error"]

    def _rounds_of(self, alive: Mapping[str, Process]) -> None:
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in alive}
        names = ", ".join(name for name in alive if name not in REFERENCES) or ", ".join(alive)
        for number in range(self._rounds):
            self._told.doing(names, f"round {number + 1} of {self._rounds}")
            for name in alive if number % 2 == 0 else reversed(list(alive)):
                row = self.rows[name]
                if row.note:
                    continue
                try:
                    answer = alive[name].ask("step")
                except Failed as error:
                    row.note = f"round {number + 1}: {error}"
                    if name in REFERENCES:  # there is nothing to compare with any more
                        raise UserError(f"The strategy {name} failed in {row.note}.") from None
                    continue
                taken[name].append((answer["cpu"], answer["wall"]))
                row.loss = answer["loss"]
            self._told.done(f"{names}: round {number + 1} of {self._rounds} done")
        for name in alive:
            row = self.rows[name]
            if row.note:
                continue
            row.times += taken[name]
            for reference in REFERENCES:
                if reference in taken:
                    row.beside.setdefault(reference, []).extend(taken[reference])

    def learn(self, limits: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Plans for these limits, from costs that are measured once."""
        self._told.doing("costs of ops and codecs, and plans")
        if self._learner is None:
            log = self._path / "learn.log"
            self._learner = Process(LEARN, self._flags, self._threads, None, self._path / "prices", log)
            self._learner.ask("warm_up")
        answers = self._learner.ask("plans", limits=dict(limits))
        self._told.done("costs of ops and codecs, and plans done")
        return answers
