"""A failed allocation in a step is met: its work is dropped, the plan tightened, and the same micro-batches run again.

    for each try:  run the step's forward and backward
                   all ranks say whether one of theirs failed, or held more than its limit
                   if none did: done;  else undo, put random states back, tighten, try again

A rank that holds more than its limit, but was given the memory, ends the step first, so that the ranks it exchanges
tensors with do not wait for it. An allocation that was refused ends a rank's step at once. With one rank the step is
run again; with more, the others may wait for what will never come, so the job ends, with a table of what held the
memory and the limit to start again with.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import format_table

if TYPE_CHECKING:
    from megatron_adacc.adaptive.controller import AdaptiveHandle

logger = logging.getLogger(__name__)

TRIES = 3  # of the same step under tighter plans

T = TypeVar("T")


class RandomStates:
    """The random states of torch, Python and NumPy as they are now, to be put back."""

    def __init__(self) -> None:
        numpy: Any = sys.modules.get("numpy")
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._python = random.getstate()
        self._numpy = None if numpy is None else numpy.random.get_state()

    def put_back(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Retry:
    """Runs the forward and backward of steps. ``handle``: None on a rank without layers. ``group``: all ranks of the
    job, None for a job of one. ``votes``: whether the ranks ask each other after each attempt; only needed for plans
    that can be made smaller."""

    def __init__(
        self, handle: AdaptiveHandle | None, group: dist.ProcessGroup | None = None, votes: bool = True
    ) -> None:
        self._handle = handle
        self._group = group if group is not None and group.size() > 1 else None
        self._votes = votes
        self._excess = 0

    def note(self) -> None:
        """A forward has ended: note what is held beyond the limit. For the forwards of a step that run() runs."""
        if self._handle is not None:
            self._excess = max(self._excess, self._handle.memory_excess())

    def run(self, attempt: Callable[[], T], undo: Callable[[], None]) -> T:
        """What ``attempt`` gives: the forward and backward of one step, without the optimizer's.

        Args:
            undo: puts back what an attempt has changed: gradients, and the position in the data. torch's, Python's
                and NumPy's default random states are put back here.

        Raises:
            UserError: the step failed under the tightest plan that was tried, or one rank of several was refused
                memory. It says what held the memory.
        """
        before = RandomStates()
        for tried in range(TRIES + 1):
            self._excess = 0
            refused: str | None = None
            result: T | None = None
            try:
                result = attempt()
            except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
                if not is_refused_memory(error):
                    raise
                refused = str(error).strip().splitlines()[0]
                _let_go(error)
            if refused is not None and self._group is not None:
                raise UserError(self._sentence(refused, tried))
            self.note()
            excess = max(self._excess, int(refused is not None))
            excess = self._largest(excess) if self._votes else excess
            if not excess:
                return result  # type: ignore[return-value]
            result = None
            undo()
            before.put_back()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            why = refused or f"{written_bytes(excess)} more than the limit were held"
            if tried == TRIES or not self._tighten(why, excess if refused is None else 0):
                raise UserError(self._sentence(why, tried))
        raise AssertionError

    def _tighten(self, why: str, excess: int) -> bool:
        """Whether every rank's plan could be made smaller."""
        done = self._handle is None or self._handle.tighten(why, excess)
        return self._largest(int(not done)) == 0

    def _largest(self, excess: int) -> int:
        if self._group is None:
            return excess
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        value = torch.tensor([excess], dtype=torch.int64, device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return int(value.item())

    def _sentence(self, why: str, tried: int) -> str:
        times = f" in {tried + 1} tries, each under a tighter plan," if tried else ""
        steps = 0 if self._handle is None else self._handle.steps
        stage = None if self._handle is None else self._handle.stage
        advice = "use a smaller micro-batch, or share the model by more ranks"
        if stage is not None and stage.limit.total_bytes is not None and not tried:
            lower = int(0.9 * stage.limit_bytes)
            advice = f"start again with --adacc-limit {written_bytes(lower).replace(' ', '')}, {advice}"
        return f"Step {steps + 1} did not get its memory{times} ({why}); {advice}.\n{self.table()}"

    def table(self) -> str:
        """What holds memory on this rank, as far as it is known."""
        stage = None if self._handle is None else self._handle.stage
        rows: list[tuple[str, str]] = [("what", "held")]
        if stage is not None:
            room = stage.problem
            rows.append(
                ("parameters, gradients, optimizer state and all else outside the layers", _of(room.fixed_bytes))
            )
            rows.append(("loss head and its like", _of(room.transient_bytes)))
            for index, fact in enumerate(stage.facts):
                held = [answer.outcome.held_bytes for answer in stage.solution.layers_of(index)]
                name = f"{len(held)} x {fact.layer_class.name}, {fact.layer_class.in_flight} micro-batches in flight"
                rows.append((name, _of(sum(held) * fact.layer_class.in_flight)))
                extra = max((answer.extra_bytes for answer in stage.solution.layers_of(index)), default=0)
                rows.append((f"working memory of one {fact.layer_class.name}", _of(extra)))
            rows.append(("predicted peak", _of(stage.predicted.peak_bytes)))
            rows.append(("limit", str(stage.limit)))
        if self._handle is not None:
            rows.append(("activations of the layers now", _of(self._handle.stored_bytes())))
        if torch.cuda.is_available():
            rows.append(("allocated on the device now", _of(torch.cuda.memory_allocated())))
            rows.append(("memory of the device", _of(torch.cuda.get_device_properties(None).total_memory)))
        return format_table(rows)


def is_refused_memory(error: BaseException) -> bool:
    """Whether this is an allocation that a device or the system refused."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return "DefaultCPUAllocator" in text and ("memory" in text)


def _let_go(error: BaseException) -> None:
    """The frames that the error went through hold the step's tensors."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def _of(nbytes: int) -> str:
    return written_bytes(nbytes)
