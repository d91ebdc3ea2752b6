"""The handle of attached layers that adapt; its step() is called between training steps.

A training step ends with ``handle.step(loss)``, after the optimizer's. Everything that changes, changes there: a step
runs from beginning to end under one plan and with one list of outlier channels for each buffer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_adacc.adaptive.advice import Advice
from megatron_adacc.adaptive.config import Config
from megatron_adacc.adaptive.gradient_check import GradientCheck
from megatron_adacc.adaptive.history import (
    Decision,
    bytes_by_action,
    decision_table,
    plan_changes,
    predicted_effect,
)
from megatron_adacc.adaptive.limits import excess_of, tightened
from megatron_adacc.adaptive.monitor import Monitor, device_of
from megatron_adacc.adaptive.news import News, agreed, changes, reasons
from megatron_adacc.adaptive.retry import Retry
from megatron_adacc.adaptive.schedule import Schedule
from megatron_adacc.adaptive.signals import LossWatch, MemoryWatch, allocator_peak
from megatron_adacc.adaptive.speed import SLOW, SpeedCheck, StepClock
from megatron_adacc.adaptive.staged import Staged
from megatron_adacc.adaptive.state import load_state, state_of
from megatron_adacc.cost.errors import Comparison
from megatron_adacc.cost.limits import Limit, written_bytes
from megatron_adacc.cost.stage_plan import StagePlan
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.planner import Plan
from megatron_adacc.runtime.attach import Handle
from megatron_adacc.runtime.report import stage_report

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AdaptiveHandle:
    """The attached layers, watched. ``attached`` is attach()'s own handle.

    ``groups``: as for enable_memory_optim(). ``plan_groups``: whose ranks share the plan, the groups among them.
    ``preserve``: a context that puts back what a forward changes beside torch's default generators."""

    def __init__(
        self, attached: Handle, config: Config, groups: Sequence[dist.ProcessGroup] = (),
        peak_share: Callable[[], float | None] | None = None,
        plan_groups: Sequence[dist.ProcessGroup] | None = None,
        preserve: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self.attached = attached
        self.config = config
        self.decisions: list[Decision] = []
        self.compared: list[tuple[int, int, Comparison]] = []  # (step, place, what a check of gradients found)
        self.steps = 0  # that have ended
        self.schedule = Schedule.start(config.min_interval, config.max_interval)
        self.monitor = Monitor(attached, config, groups)
        self.loss_watch = LossWatch(config.loss_jump)
        device = device_of(attached)
        self._memory = MemoryWatch(config.memory_share, peak_share or (lambda: allocator_peak(device)))
        self._plan_groups = [g for g in (groups if plan_groups is None else plan_groups) if g.size() > 1]
        self._gradients = GradientCheck(attached, preserve)
        self._speed = SpeedCheck(attached, self._timed_us, preserve)
        self._clock = StepClock()
        self._slow = False
        self._advice = Advice()
        self._first_measured = False
        self._detached = False
        self._look_ahead()

    @property
    def policy(self) -> Staged:
        """What makes the plans."""
        policy = self.attached.policy
        assert isinstance(policy, Staged)
        return policy

    def step(self, loss: float | Tensor | None = None, peak_bytes: int | None = None) -> None:
        """A training step has ended, its backward included.

        Args:
            loss: the step's, one number, the same on all ranks of the groups. A tensor on a GPU is waited for.
            peak_bytes: of the device in this step, where it was measured; the largest of all ranks that share the
                plan. On a GPU the allocator's own is taken.

        Raises UserError where a new plan is needed and ranks have other layers."""
        if self._detached:
            return
        self.steps += 1
        self.monitor.share_lists()
        self._clock.ended()
        self._say_what_is_slower()
        news = News()
        jump = None if loss is None else self.loss_watch.jump(float(loss))
        if jump is not None:
            news.why.append(jump)
            news.again = self.policy.lossy and not self.attached.plan.lossless
        checked = self.schedule.due(self.steps)
        if checked:
            self._check(news)
        self._compare_gradients(news)
        self._correct_memory(peak_bytes, news)
        if checked or self._gradients_due(self.steps):
            own = bool(news.why)
            news = agreed(news, self._plan_groups)
            if checked and news.why and not own:
                self.monitor.references = {}  # another rank's new list changes the mean error here, too
        self._act(news)
        self._enter_lossy_stage(news)
        self.schedule = self.schedule.after(self.steps, bool(news.why))
        if news.why:
            self._decide(news)
        if checked:
            self._advise()
        self._slow = news.slow and not news.why
        self._look_ahead()

    def _timed_us(self, graph: LayerGraph, op: int) -> float | None:
        auto = self.policy.auto
        return None if auto is None else auto.timed_us(graph, op)

    def _say_what_is_slower(self) -> None:
        if not self._slow:
            return
        self._slow = False
        self._speed.disarm()
        slower = (
            "; ".join(self._speed.lines) or "no op of the layers is slower than it was timed, so it is outside them"
        )
        logger.warning("Steps take %.1f times as long as before: %s.", self._clock.times, slower)

    def _check(self, news: News) -> None:
        news.slow = self.policy.auto is not None and self._clock.times > SLOW
        found = self.monitor.judge()
        findings = [finding for finding in found if finding.changed]
        self.monitor.disarm()
        self.monitor.place_lists({f.key: f.listed.channels for f in found if f.listed is not None})
        for finding in findings:
            if finding.error_grew:
                site = finding.key.site
                news.errors[site] = max(news.errors.get(site, 1.0), finding.error / finding.reference)
        beyond = self._beyond_budget(news.errors)
        for finding in findings:
            news.why += reasons(finding, with_error=beyond is not None)
            news.changed += changes(finding)
        if beyond:
            news.why.append(beyond)
            news.resolve = True
        above = self._memory.above()
        if above is not None:
            words, news.over_share = above
            way_out = "" if self.policy.auto else ": use a smaller micro-batch, or the plan 'auto'"
            news.why.append(words + way_out)

    def _beyond_budget(self, growth: Mapping[str, float]) -> str | None:
        """Why errors that have grown by these factors, by site, matter; None where the plan is still within its error
        budget. A plan without one says nothing of errors, so every growth matters: an empty line."""
        auto, stage = self.policy.auto, self.stage
        if auto is None or stage is None or not auto.setting.error_budget:
            return ""
        error, budget = auto.solver.error_of(stage, growth), auto.setting.error_budget
        return f"the plan's error is {error:.3g}, above the budget of {budget:g}" if growth and error > budget else None

    def _gradients_due(self, step: int) -> bool:
        every = self.config.check_gradients_every
        return bool(every) and step % every == 0

    def _compare_gradients(self, news: News) -> None:
        """What a check of gradients found; layers whose error is too large lose their lossy actions."""
        if not self._gradients_due(self.steps):
            return
        self._gradients.disarm()
        found = {place: c for place, c in self._gradients.found.items() if c.error}
        for place, comparison in sorted(found.items()):
            self.compared.append((self.steps, place, comparison))
            logger.info(
                "step %d: gradients of layer %d have relative error %.3g, cosine %.6f.",
                self.steps, place, comparison.error, comparison.cosine,
            )  # fmt: skip
            if comparison.error > self.config.max_gradient_error:
                news.why.append(
                    f"the gradients of layer {place} have a relative error of {comparison.error:.3g}, above "
                    f"max_gradient_error {self.config.max_gradient_error:g}"
                )
                news.exact.add(place)

    def _correct_memory(self, peak_bytes: int | None, news: News) -> None:
        """What the first step under a solved plan measured corrects what the model said of all that is not layers."""
        stage = self.stage
        if peak_bytes is None or stage is None or stage.limit.total_bytes is None or self._first_measured:
            return
        self._first_measured = True
        more = peak_bytes - stage.predicted.peak_bytes
        if peak_bytes > stage.limit_bytes:
            news.why.append(
                f"the peak was {written_bytes(peak_bytes)}, {written_bytes(more)} above its prediction and more than "
                f"the limit of {written_bytes(stage.limit_bytes)}"
            )
            news.more_bytes = more
            news.resolve = True
        elif more > 0:
            logger.warning(
                "The step's peak was %s, %.1f %% above its prediction; it fits into the limit.",
                written_bytes(peak_bytes), 100 * more / stage.predicted.peak_bytes,
            )  # fmt: skip

    def _act(self, news: News) -> None:
        """Change the plan as the news asks, the same on all ranks that share it."""
        auto, stage = self.policy.auto, self.stage
        if news.exact:
            self.policy.withdraw(news.exact)
            news.resolve = True
            if auto is None:
                news.changed.append(f"from now on layers {sorted(news.exact)} are lossless")
        if auto is None or stage is None:
            return
        change = auto.solver.change
        for site, factor in news.errors.items():
            change.errors[site] = change.errors.get(site, 1.0) * factor
        if news.over_share:
            news.resolve |= self._lower(news.over_share)
        change.more_bytes += news.more_bytes
        if news.again:
            self.monitor.disarm()
            auto.forget()
            self.attached.trace_again()
            news.changed.append("the layers are traced again, and the errors of lossy actions measured anew")
        elif news.resolve:
            self._solve_again(news)

    def _lower(self, share: float) -> bool:
        """Lower the limit by what the peak was above its share of the device."""
        auto, stage = self.policy.auto, self.stage
        assert auto is not None
        assert stage is not None
        total = stage.limit.total_bytes
        if total is None:
            return False
        excess = (share - self.config.memory_share) * self._memory.total_bytes(device_of(self.attached))
        auto.solver.change.limit = Limit(total_bytes=max(1, int(total - excess)))
        return True

    def _solve_again(self, news: News) -> None:
        auto, before = self.policy.auto, self.stage
        assert auto is not None
        assert before is not None
        auto.solve_again(least=True)
        after = auto.stage
        assert after is not None
        found = plan_changes(before.plan, after.plan, len(self.attached.forwards))
        news.changed += found or ["the plan is still the best"]
        news.effect = predicted_effect(before.predicted, after.predicted) if found else ""

    def _enter_lossy_stage(self, news: News) -> None:
        policy = self.policy
        if self.steps == self.config.warmup_steps:
            policy.begin_lossy()
        if policy.trace_again:
            policy.trace_again = False
            self.monitor.disarm()
            self.attached.trace_again()
            news.why.append(policy.refusal or f"{self.steps} steps of warm-up have ended")
            news.changed.append(f"from the next step on the plan is {policy.name!r} and may be lossy")

    def _decide(self, news: News) -> None:
        news.changed.append(f"next check after step {self.schedule.next_check}")
        self._clock.begin_again()
        plan = bytes_by_action(self.attached)
        self.decisions.append(Decision(self.steps, tuple(news.why), tuple(news.changed), news.effect, plan))
        logger.info("%s", self.decisions[-1])

    def _advise(self) -> None:
        """Say what a person may want to change; each thing once."""
        for line in self._advice.on(self):
            logger.warning("%s", line)

    def _look_ahead(self) -> None:
        """Get ready for what the next step is looked at for."""
        if self.schedule.due(self.steps + 1):
            self.monitor.arm()
        if self._gradients_due(self.steps + 1):
            self._gradients.arm()
        elif self._slow:
            self._speed.arm()

    def memory_excess(self) -> int:
        """Bytes that are held now beyond the limit of the solved plan; 0 where there is none. On a GPU by its
        allocator; on the CPU by what the layers hold for their backward beyond what the plan says."""
        return 0 if self.stage is None else excess_of(self.stage, self.stored_bytes, device_of(self.attached))

    def run(self, forward_backward: Callable[[], T], undo: Callable[[], None]) -> T:
        """Run the forward and backward of a step, and meet a failed allocation: see adaptive/retry.py.

        Args:
            forward_backward: may be called more than once; without the optimizer's step.
            undo: puts back what it has changed: gradients, the position in the data."""
        return Retry(self).run(forward_backward, undo)

    def tighten(self, why: str, excess_bytes: int) -> bool:
        """A step did not get its memory: make the next plan smaller, by the excess or else by a twentieth of what the
        activations may take; where there is none, the plan of the least memory. All ranks that share the plan call it.
        False where the plan is not one that is solved."""
        auto, stage = self.policy.auto, self.stage
        if auto is None or stage is None:
            return False
        auto.solver.change.limit = tightened(stage, excess_bytes)
        news = News(why=[f"a step did not get its memory: {why}"])
        self._solve_again(news)
        self._decide(news)
        self._look_ahead()
        return True

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.attached.plan

    @property
    def stage(self) -> StagePlan | None:
        """What the solver answered last, under "auto", once it has been asked."""
        return None if self.policy.auto is None else self.policy.auto.stage

    def outlier_lists(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """By layer and site, the channels that its outlier columns hold, as far as layers have settled."""
        return {(key.place, key.site): channels for key, channels in self.monitor.lists().items()}

    def stored_bytes(self) -> int:
        """As attach()'s handle says."""
        return self.attached.stored_bytes()

    def gradient_errors(self, loss: Callable[[], Tensor]) -> dict[str, float]:
        """As attach()'s handle says. What its forwards encode is not counted in a check."""
        self.monitor.disarm()
        self._gradients.disarm()
        self._speed.disarm()
        try:
            return self.attached.gradient_errors(loss)
        finally:
            self._look_ahead()

    def report(self) -> str:
        """The report of attach()'s handle, then one row for each decision."""
        heading = f"decisions in {self.steps} steps; next check after step {self.schedule.next_check}"
        parts = [stage_report(self.stage)] if self.stage is not None else []
        return "\n\n".join([*parts, self.attached.report(), f"{heading}\n{decision_table(self.decisions)}"])

    def state_dict(self) -> dict[str, Any]:
        """Its state as builtins, for a checkpoint (adaptive/state.py)."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(), between steps. Raises UserError when it is no such state."""
        self.monitor.disarm()
        self._gradients.disarm()
        load_state(self, state)
        self._look_ahead()

    def detach(self) -> None:
        """Give the layers their own forward back. A second call does nothing. Raises as attach()'s handle does."""
        self._detached = True
        self.monitor.disarm()
        self.attached.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detached = True
        self.monitor.disarm()
        self.attached.__exit__(kind, error, trace)
