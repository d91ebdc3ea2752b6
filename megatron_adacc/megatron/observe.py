"""Activation memory and step time of a Megatron run, measured the same way for every strategy.

An `Observer` surrounds each training step. It reads and changes nothing: after each forward it counts the
bytes that the autograd graph holds (runtime/held.py), and over the step the peak (runtime/peak.py). At
Megatron's log interval the figures of all ranks are gathered; the last rank, which has the loss and
Megatron's writers, prints one line, writes adacc/... scalars and keeps a row for --adacc-report.
"""

import atexit
import functools
import logging
import statistics
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.atomic import write_text
from megatron_adacc.megatron.adaptation import Adaptation, attach_adaptation
from megatron_adacc.megatron.console import say
from megatron_adacc.megatron.report import Report, Row
from megatron_adacc.megatron.saved_state import SavedState
from megatron_adacc.patches.training_training import Step
from megatron_adacc.runtime.held import HeldMeter
from megatron_adacc.runtime.peak import PeakMeter

logger = logging.getLogger(__name__)

_MIB = 2**20


@dataclass(frozen=True)
class _Figures:
    """One rank's bytes of one step."""

    held_bytes: int
    peak_bytes: int | None
    peak_rss_bytes: int


def _largest(values: Iterable[int | None]) -> int | None:
    """The largest value; None where one is unknown, for then the largest is unknown too."""
    known = list(values)
    return None if None in known else max(value for value in known if value is not None)


def _loss(losses: dict[str, torch.Tensor]) -> float | None:
    return float(losses["lm loss"]) if "lm loss" in losses else None


class Observer:
    """Measures the steps of one run on this rank."""

    def __init__(self, args: Namespace, saved: SavedState) -> None:
        self._args = args
        self._saved = saved
        self._held: list[HeldMeter] = []
        self._peak: PeakMeter | None = None
        self._layers_of_chunks: dict[int, dict[str, int]] = {}
        self._held_bytes = 0
        self._step_ms: list[float] = []
        self._skipped = 0
        self._steps = 0
        self._figures: list[_Figures] = []
        self._layers: list[dict[str, int]] = []
        self._plan_due = 3  # logs for which the layers' bytes and plan are looked at, after the start and each decision
        self._predictions_known = False
        self._handle: AdaptiveHandle | None = None
        self._adaptation: Adaptation | None = None
        self._report = Report.start(args)
        self._written_at = 0.0
        self._last_losses: dict[str, torch.Tensor] = {}
        self._last_iteration = 0
        atexit.register(self._finish)

    def around_step(self, step: Step) -> tuple:
        """Run one step with its forwards measured; logs at the log interval, and lets the plan adapt at its end."""
        model, iteration = step.model, step.iteration
        held, peak = self._start(model)
        self._held_bytes = 0
        adaptation = self._adaptation

        @functools.wraps(step.forward_step)
        def measured(*args: Any, **kwargs: Any) -> Any:
            result = step.forward_step(*args, **kwargs)
            if adaptation is not None:
                adaptation.after_forward()
            chunk = next(index for index, candidate in enumerate(model) if candidate is args[1])
            if isinstance(result[0], torch.Tensor) and result[0].grad_fn is not None:
                forward = held[chunk].measure(result[0])
                self._layers_of_chunks[chunk] = dict(forward.layer_bytes)
                self._held_bytes = max(self._held_bytes, forward.total_bytes)
            return result

        forward_backward = step.forward_backward
        if adaptation is not None:
            forward_backward = adaptation.forward_backward(forward_backward, model, step.optimizer)
        peak.start_step()
        start = time.perf_counter()
        try:
            result = step.run(measured, forward_backward)
        finally:
            milliseconds = (time.perf_counter() - start) * 1e3
            figures = peak.end_step()
        self._step_ms.append(milliseconds)
        self._skipped += int(result[1])
        self._last_iteration, self._last_losses = iteration, result[0]
        self._figures.append(_Figures(self._held_bytes, figures.peak_bytes, figures.rss_peak_bytes))
        if adaptation is not None:
            adaptation.after_step(_loss(result[0]), figures.peak_bytes)
        last = iteration >= (self._args.train_iters or 0)
        self._describe(last)
        if iteration % self._args.log_interval == 0 or last:
            self._log(iteration, result[0], last)
        return result

    def _start(self, model: list) -> tuple[list[HeldMeter], PeakMeter]:
        """One meter a model chunk, and the peak's; made at the first step, when model and optimizer exist.

        A plan of our own is attached before, so that its first forward is measured too.
        """
        if self._peak is None:
            from megatron.core.transformer.transformer_layer import BaseTransformerLayer

            self._adaptation = attach_adaptation(model, self._args, self._saved)
            self._handle = None if self._adaptation is None else self._adaptation.handle
            self._saved.resume(self._args, say)
            for chunk in model:
                layers = {
                    f"layer.{module.layer_number}": module
                    for module in chunk.modules()
                    if isinstance(module, BaseTransformerLayer)
                }
                self._held.append(HeldMeter(layers, chunk))
            self._peak = PeakMeter(self._device())
        return self._held, self._peak

    def _describe(self, last: bool) -> None:
        """The plan's table, once: after the second step every layer has had the two forwards that settle its trace."""
        self._steps += 1
        if self._handle is not None and (self._steps == 2 or (last and self._steps == 1)):
            say(f"the layers of rank 0 under --adacc-plan {self._args.adacc_plan}\n{self._handle.report()}")

    @staticmethod
    def _device() -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _log(self, iteration: int, losses: dict[str, torch.Tensor], last: bool) -> None:
        """Gather the largest figures since the last log from all ranks; the last rank writes them down."""
        mine = _Figures(
            held_bytes=max(figure.held_bytes for figure in self._figures),
            peak_bytes=_largest(figure.peak_bytes for figure in self._figures),
            peak_rss_bytes=max(figure.peak_rss_bytes for figure in self._figures),
        )
        milliseconds = statistics.median(self._step_ms)
        self._figures.clear()
        self._step_ms.clear()
        ranks = self._gather(mine)
        self._gather_predictions(len(ranks))
        self._gather_decisions(len(ranks))
        if self._plan_due or last:
            self._plan_due = max(0, self._plan_due - 1)
            self._gather_plan(len(ranks), last)
        if torch.distributed.get_rank() != len(ranks) - 1:
            return
        row = Row(
            iteration=iteration,
            lm_loss=_loss(losses),
            skipped_iterations=self._skipped,
            step_ms=milliseconds,
            held_bytes=max(figure.held_bytes for figure in ranks),
            peak_bytes=_largest(figure.peak_bytes for figure in ranks),
            peak_rss_bytes=max(figure.peak_rss_bytes for figure in ranks),
        )
        self._skipped = 0
        self._report.rows.append(row)
        self._report.ranks = [{"rank": rank, **asdict(figure)} for rank, figure in enumerate(ranks)]
        for layers in self._layers:
            self._report.layer_held_bytes.update(layers)
        self._say(row)
        if last or time.monotonic() - self._written_at > 10:
            self._write()

    def _gather_predictions(self, ranks: int) -> None:
        """What a solved plan promised on each rank that has layers, once all of these have one. All ranks come here,
        also those of a stage without layers."""
        if self._args.adacc_plan != "auto" or self._predictions_known:
            return
        own: dict[str, Any] | None = {} if self._handle is None else None
        if self._handle is not None and (stage := self._handle.stage) is not None:
            own = {"limit_bytes": stage.limit_bytes, **asdict(stage.predicted)}
        found: list[dict[str, Any] | None] = [None] * ranks
        torch.distributed.all_gather_object(found, own)
        if None not in found:
            self._predictions_known = True
            self._report.predicted = [{"rank": rank, **one} for rank, one in enumerate(found) if one]

    def _gather_decisions(self, ranks: int) -> None:
        """What the first data-parallel rank of each stage decided since the last log."""
        if self._adaptation is None or not self._adaptation.watched:
            return
        own = (self._adaptation.new_decisions(), self._adaptation.new_gradient_errors())
        everyone: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [own] * ranks
        torch.distributed.all_gather_object(everyone, own)
        for decisions, errors in everyone:
            self._report.decisions += decisions
            self._report.gradient_errors += errors
        if any(decisions for decisions, _ in everyone):
            self._plan_due = 3  # layers may be traced again, which takes two steps

    def _gather_plan(self, ranks: int, last: bool) -> None:
        """What each layer holds, and what becomes of its tensors; at the end also what other limits would cost, where
        that is written down. A plan that is found in the first step holds from the second."""
        self._layers = [{} for _ in range(ranks)]
        held = {name: size for layers in self._layers_of_chunks.values() for name, size in layers.items()}
        torch.distributed.all_gather_object(self._layers, held)
        if self._adaptation is None or self._args.adacc_report is None:
            return
        own = (self._adaptation.plan(), self._adaptation.frontiers() if last else [])
        everyone: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [own] * ranks
        torch.distributed.all_gather_object(everyone, own)
        self._report.plan = [layer for plan, _ in everyone for layer in plan]
        self._report.frontiers = [one for _, frontiers in everyone for one in frontiers]

    def _gather(self, mine: _Figures) -> list[_Figures]:
        # Sizes are not negative: -1 carries "unknown" through the collective.
        sent = [-1 if value is None else value for value in asdict(mine).values()]
        values = torch.tensor(sent, dtype=torch.int64, device=self._device())
        everyone = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(everyone, values)
        received = (tuple(rank.tolist()) for rank in everyone)
        return [_Figures(held, None if peak < 0 else peak, rss) for held, peak, rss in received]

    def _say(self, row: Row) -> None:
        """One line on the console and one scalar a figure, as Megatron logs its own."""
        from megatron.training import get_tensorboard_writer, get_wandb_writer, print_rank_last

        peak = "unknown" if row.peak_bytes is None else f"{row.peak_bytes / _MIB:.1f}"
        print_rank_last(
            f" adacc iteration {row.iteration:8d} | plan: {self._args.adacc_plan} | held for backward (MiB): "
            f"{row.held_bytes / _MIB:.1f} | step peak (MiB): {peak} | "
            f"peak RSS (MiB): {row.peak_rss_bytes / _MIB:.1f} | step (ms): {row.step_ms:.1f} |"
        )
        scalars = {
            "adacc/held-bytes": row.held_bytes,
            "adacc/peak-bytes": row.peak_bytes,
            "adacc/peak-rss-bytes": row.peak_rss_bytes,
            "adacc/step-ms": row.step_ms,
            **{f"adacc/held-bytes/{name}": size for name, size in self._report.layer_held_bytes.items()},
        }
        known = {name: value for name, value in scalars.items() if value is not None}
        if (writer := get_tensorboard_writer()) is not None:
            for name, value in known.items():
                writer.add_scalar(name, value, row.iteration)
        if (wandb := get_wandb_writer()) is not None:
            wandb.log(known, row.iteration)

    def _finish(self) -> None:
        """At the process's end: steps that no log interval has reached (--exit-interval) get a row of this rank's."""
        world = int(self._args.world_size)
        if self._figures and int(self._args.rank) == world - 1:
            self._report.rows.append(
                Row(
                    iteration=self._last_iteration,
                    lm_loss=_loss(self._last_losses),
                    skipped_iterations=self._skipped,
                    step_ms=statistics.median(self._step_ms),
                    held_bytes=max(figure.held_bytes for figure in self._figures),
                    peak_bytes=_largest(figure.peak_bytes for figure in self._figures),
                    peak_rss_bytes=max(figure.peak_rss_bytes for figure in self._figures),
                )
            )
        self._write()

    def _write(self) -> None:
        if self._args.adacc_report is None or not self._report.rows:
            return
        try:
            write_text(self._args.adacc_report, self._report.json())
        except OSError as error:
            # A full disk must not end the training.
            logger.warning("The report %s could not be written: %s.", self._args.adacc_report, error)
        self._written_at = time.monotonic()
