"""enable_memory_optim(): attach with adaptation, and the handle whose step() is called between training steps.

A training step ends with ``handle.step(loss)``, after the optimizer's. Everything that changes, changes there: a step
runs from beginning to end under one plan and with one list of outlier channels for each buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn

from megatron_adacc.adaptive.config import Config
from megatron_adacc.adaptive.monitor import Finding, Key, Monitor, device_of
from megatron_adacc.adaptive.schedule import Schedule
from megatron_adacc.adaptive.signals import LossWatch, MemoryWatch, allocator_peak
from megatron_adacc.adaptive.staged import Staged, codec_of_role
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import StagePlan
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import format_table
from megatron_adacc.planner import Plan
from megatron_adacc.runtime.attach import MIN_BYTES, Handle, attach, room_on
from megatron_adacc.runtime.auto import Auto, Setting
from megatron_adacc.runtime.key import class_key
from megatron_adacc.runtime.policy import CompressAll, FromPlan, KeepAll, Policy, RecomputeAll, policy_for
from megatron_adacc.runtime.report import stage_report

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What was changed at the end of a step, and why; one line each."""

    step: int
    why: tuple[str, ...]
    changed: tuple[str, ...]

    def __str__(self) -> str:
        return f"step {self.step}: {'; '.join(self.why).rstrip('.')}. {'; '.join(self.changed)}."


def enable_memory_optim(
    model: nn.Module | Sequence[nn.Module],
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> AdaptiveHandle:
    """Attach with adaptation, for any training loop.

        handle = enable_memory_optim(model, {"max_interval": 32})
        for batch in batches:
            loss = train_step(model, batch)          # forward, backward, optimizer
            handle.step(loss)

    Args:
        model: the layers, as for attach(); or a model that contains them in a ModuleList (each outermost ModuleList is
            a stack of layers; a model without one is one layer).
        config: settings as a Config, a dict, or the path of a YAML file; None for the defaults.
        groups: process groups whose ranks hold the same layers and channels, such as data-parallel ones (not
            tensor-parallel: their ranks hold different channels). All ranks of a group call step() equally often.

    Returns:
        a handle; ``handle.detach()`` leaves the layers as they were. It is a context manager. Where step() is never
        called the first plan stays as it is.

    Raises:
        UserError: settings or layers that are not right, as Config and attach() say.
    """
    if config is None or isinstance(config, Mapping):
        config = Config.from_mapping(config or {})
    elif not isinstance(config, Config):
        config = Config.load(config)
    return AdaptiveHandle(_attached(layers_of(model), config, groups), config, groups)


def layers_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The layers in a model; what is given as a list or ModuleList is taken as it is."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        return list(model)
    stacks: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and not inside:
            stacks[path] = module
    return [layer for stack in stacks.values() for layer in stack] or [model]


class AdaptiveHandle:
    """The attached layers, watched. ``attached`` is attach()'s own handle."""

    def __init__(
        self, attached: Handle, config: Config, groups: Sequence[dist.ProcessGroup] = (),
        peak_share: Callable[[], float | None] | None = None,
    ) -> None:  # fmt: skip
        self.attached = attached
        self.config = config
        self.decisions: list[Decision] = []
        self.steps = 0  # that have ended
        self.schedule = Schedule.start(config.min_interval, config.max_interval)
        self._monitor = Monitor(attached, config, groups)
        self._loss = LossWatch(config.loss_jump)
        device = device_of(attached)
        self._memory = MemoryWatch(config.memory_share, peak_share or (lambda: allocator_peak(device)))
        self._lists_to_come: dict[Key, tuple[int, ...]] = {}
        self._detached = False

    def step(self, loss: float | Tensor | None = None) -> None:
        """A training step has ended, its backward included.

        Args:
            loss: the step's, one number, the same on all ranks of the groups. A tensor on a GPU is waited for.
        """
        if self._detached:
            return
        self.steps += 1
        why: list[str] = []
        changed: list[str] = []
        if self._lists_to_come:
            self._place_lists_to_come()
        if self.schedule.due(self.steps):
            self._check(why, changed)
        jump = None if loss is None else self._loss.jump(float(loss))
        why += [] if jump is None else [jump]
        self._enter_lossy_stage(why, changed)
        self.schedule = self.schedule.after(self.steps, bool(why))
        if why:
            self._decide(why, changed)
        if self.schedule.due(self.steps + 1):
            self._monitor.arm()

    def _check(self, why: list[str], changed: list[str]) -> None:
        findings = [finding for finding in self._monitor.judge() if finding.changed]
        self._monitor.disarm()
        self._monitor.place_lists({f.key: f.listed.channels for f in findings if f.listed is not None})
        for finding in findings:
            why += _reasons(finding)
            changed += _changes(finding)
        peak = self._memory.above()
        why += [] if peak is None else [peak]
        if self._monitor.agreed(bool(why)) and not why:
            why.append("another rank found a change")
            self._monitor.references = {}  # its new list changes the mean error here, too

    def _enter_lossy_stage(self, why: list[str], changed: list[str]) -> None:
        policy = self.attached.policy
        if not isinstance(policy, Staged):
            return
        if self.steps == self.config.warmup_steps:
            policy.begin_lossy()
        if policy.trace_again:
            policy.trace_again = False
            self._monitor.disarm()
            self.attached.trace_again()
            why.append(policy.refusal or f"{self.steps} steps of warm-up have ended")
            changed.append(f"from the next step on the plan is {policy.name!r} and may be lossy")

    def _decide(self, why: list[str], changed: list[str]) -> None:
        changed.append(f"next check after step {self.schedule.next_check}")
        self.decisions.append(Decision(self.steps, tuple(why), tuple(changed)))
        logger.info("%s", self.decisions[-1])

    def _place_lists_to_come(self) -> None:
        if any(forward.cache.traces() for forward in self.attached.forwards):
            self._monitor.place_lists(self._lists_to_come)
            self._lists_to_come = {}

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.attached.plan

    @property
    def stage(self) -> StagePlan | None:
        """What the solver answered last, under "auto", once it has been asked."""
        policy = self.attached.policy
        current = policy.current if isinstance(policy, Staged) else policy
        return current.stage if isinstance(current, Auto) else None

    def outlier_lists(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """By layer and site, the channels that its outlier columns hold, as far as layers have settled."""
        return {(key.place, key.site): channels for key, channels in self._monitor.lists().items()}

    def stored_bytes(self) -> int:
        """As attach()'s handle says."""
        return self.attached.stored_bytes()

    def gradient_errors(self, loss: Callable[[], Tensor]) -> dict[str, float]:
        """As attach()'s handle says. What its forwards encode is not counted in a check."""
        armed = self.schedule.due(self.steps + 1)
        self._monitor.disarm()
        try:
            return self.attached.gradient_errors(loss)
        finally:
            if armed:
                self._monitor.arm()

    def report(self) -> str:
        """The report of attach()'s handle, then one row for each decision."""
        heading = f"decisions in {self.steps} steps; next check after step {self.schedule.next_check}"
        rows = [(str(d.step), "; ".join(d.why), "; ".join(d.changed)) for d in self.decisions]
        table = format_table([("step", "why", "what changed"), *rows]) if rows else "none"
        staged = self.stage is not None and self.attached.stage is None
        parts = [stage_report(self.stage)] if staged and self.stage is not None else []
        return "\n\n".join([*parts, self.attached.report(), f"{heading}\n{table}"])

    def state_dict(self) -> dict[str, Any]:
        """Its state as builtins, for a checkpoint: steps, schedule, stage, running mean of the loss, error references,
        outlier lists and decisions. The plan is not in it: it is made anew."""
        policy = self.attached.policy
        return {
            "steps": self.steps,
            "schedule": self.schedule.to_data(),
            "lossy": isinstance(policy, Staged) and policy.lossy,
            "loss_mean": self._loss.mean,
            "references": [[*_of(key), error] for key, error in self._monitor.references.items()],
            "lists": [
                [*_of(key), list(channels)] for key, channels in (self._monitor.lists() | self._lists_to_come).items()
            ],
            "decisions": [[d.step, list(d.why), list(d.changed)] for d in self.decisions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(). Outlier lists are put in where a layer has settled, else at the end of the first
        step: until then layers fill their columns with the channels of their own first forward.

        Raises UserError when it is no such state."""
        try:
            steps, lossy, mean = int(state["steps"]), bool(state["lossy"]), state["loss_mean"]
            mean = None if mean is None else float(mean)
            references = {Key(p, s, c): float(error) for p, s, c, error in state["references"]}
            lists = {Key(p, s, c): tuple(map(int, channels)) for p, s, c, channels in state["lists"]}
            decisions = [Decision(step, tuple(why), tuple(changed)) for step, why, changed in state["decisions"]]
            schedule = self.schedule.from_data(state["schedule"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"This is no state of an adaptive handle: {error!s}.") from error
        self._monitor.disarm()
        policy = self.attached.policy
        if isinstance(policy, Staged) and lossy:
            policy.begin_lossy()
            policy.trace_again = False
            self.attached.trace_again()
        self.steps, self.schedule, self.decisions = steps, schedule, decisions
        self._loss.mean = mean
        self._monitor.references = references
        taken = self._monitor.place_lists(lists)
        self._lists_to_come = {key: channels for key, channels in lists.items() if key not in taken}
        if self.schedule.due(self.steps + 1):
            self._monitor.arm()

    def detach(self) -> None:
        """Give the layers their own forward back. A second call does nothing. Raises as attach()'s handle does."""
        self._detached = True
        self._monitor.disarm()
        self.attached.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detached = True
        self._monitor.disarm()
        self.attached.__exit__(kind, error, trace)


def _attached(layers: list[nn.Module], config: Config, groups: Sequence[dist.ProcessGroup]) -> Handle:
    if config.plan == "auto":
        return _attached_to_auto(layers, config, groups)
    policy: Policy
    if config.plan == "compress":
        policy = CompressAll(MIN_BYTES, codec_of_role=codec_of_role(config.compression_levels))
    else:
        policy = policy_for(config.plan, MIN_BYTES)
    lossless = isinstance(policy, KeepAll | RecomputeAll) or (isinstance(policy, FromPlan) and policy.plan.lossless)
    if config.warmup_steps and not lossless:
        policy = Staged(RecomputeAll(MIN_BYTES), policy)
    return attach(layers, policy)


def _attached_to_auto(layers: list[nn.Module], config: Config, groups: Sequence[dist.ProcessGroup]) -> Handle:
    limit = None if config.limit is None else Limit.parse(config.limit)
    lossy = Setting(limit, room_on, groups=groups, error_budget=config.error_budget, min_bytes=MIN_BYTES)
    if not config.error_budget or not config.warmup_steps:
        return attach(layers, "auto", setting=lossy)
    places: dict[Hashable, list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault(class_key(layer), []).append(place)
    classes = tuple(map(tuple, places.values()))
    return attach(layers, Staged(Auto(replace(lossy, error_budget=0.0), classes), Auto(lossy, classes)))


def _of(key: Key) -> tuple[int, str, int]:
    return key.place, key.site, key.channels


def _reasons(finding: Finding) -> list[str]:
    where = f"layer {finding.key.place} {finding.key.site}"
    found = []
    if finding.listed is not None:
        found.append(f"{where}: {finding.overlap:.0%} of its outliers were in the outlier columns")
    if finding.error_grew:
        found.append(f"{where}: its error grew from {finding.reference:.3g} to {finding.error:.3g}")
    return found


def _changes(finding: Finding) -> list[str]:
    if finding.listed is None or finding.before is None:
        return []
    new, old = set(finding.listed.channels), set(finding.before.channels)
    more = f", no column for {finding.without_column} more" if finding.without_column else ""
    where = f"layer {finding.key.place} {finding.key.site}"
    return [f"{where}: channels in {sorted(new - old)}, out {sorted(old - new)}{more}"]
