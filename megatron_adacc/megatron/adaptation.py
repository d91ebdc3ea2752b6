"""Adaptation in Megatron's loop, on one rank: its settings, the retry of a step, and what ranks tell each other.

All ranks of the job take part, also those of a stage without layers: once a step they exchange one vector with the
loss, which only the last stage knows, and the peak of their memory.
"""

import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_adacc.adaptive.config import Config
from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.adaptive.policies import staged_policy
from megatron_adacc.adaptive.retry import Retry
from megatron_adacc.megatron.auto_setting import setting_of
from megatron_adacc.megatron.flags import config_of
from megatron_adacc.megatron.layer import marked_layers
from megatron_adacc.megatron.plan_notes import check_plan
from megatron_adacc.megatron.redo import retried
from megatron_adacc.megatron.rehearsing import beside_training
from megatron_adacc.megatron.report_facts import frontier, plan_of_layers
from megatron_adacc.megatron.saved_state import SavedState
from megatron_adacc.planner import Plan
from megatron_adacc.runtime.agree import check_equal
from megatron_adacc.runtime.attach import attach


class Adaptation:
    """``handle``: None on a rank without layers. ``watched``: whether anything of the plan may change. ``numbers``:
    Megatron's numbers of the layers, by place."""

    def __init__(
        self, handle: AdaptiveHandle | None, args: Namespace, config: Config, numbers: Sequence[int] = ()
    ) -> None:
        self.handle = handle
        self._numbers = tuple(numbers)
        self.watched = config.plan not in ("keep", "recompute")
        world = torch.distributed.group.WORLD
        assert world is not None
        self._world = world if world.size() > 1 else None
        self._told = self._told_errors = 0
        self._retry = Retry(handle, world, votes=config.plan == "auto")

    def new_decisions(self) -> list[dict[str, Any]]:
        """Those since the last call, for the report; none on ranks that decide the same as another."""
        if self.handle is None or _repeats_another():
            return []
        new, self._told = self.handle.decisions[self._told :], len(self.handle.decisions)
        return [{**_where(), **asdict(decision)} for decision in new]

    def new_gradient_errors(self) -> list[dict[str, Any]]:
        """What comparisons with exact gradients have found since the last call, likewise."""
        if self.handle is None or _repeats_another():
            return []
        new, self._told_errors = self.handle.compared[self._told_errors :], len(self.handle.compared)
        return [
            {**_where(), "step": step, "layer": self._numbers[place], **asdict(found)} for step, place, found in new
        ]

    def plan(self) -> list[dict[str, Any]]:
        """What becomes of each saved tensor of each layer, for the report, likewise."""
        if self.handle is None or _repeats_another():
            return []
        return [{**_where(), **one} for one in plan_of_layers(self.handle, self._numbers)]

    def frontiers(self) -> list[dict[str, Any]]:
        """What other limits would cost, for the report, likewise."""
        if self.handle is None or _repeats_another():
            return []
        found = frontier(self.handle)
        return [] if found is None else [{**_where(), **found}]

    def forward_backward(self, original: Callable, model: list, optimizer: Any) -> Callable:
        """Megatron's, run again where it does not get its memory."""
        return retried(original, self._retry, model, optimizer)

    def after_forward(self) -> None:
        """A micro-batch has run forward."""
        self._retry.note()

    def after_step(self, loss: float | None, peak_bytes: int | None) -> None:
        """The step has ended. ``loss``: of this rank's stage, None where it is not the last."""
        if not self.watched:
            return
        # The peak is unknown where one rank's is.
        mine = [-math.inf if loss is None else loss, math.inf if peak_bytes is None else float(peak_bytes)]
        if self._world is not None:
            device = "cuda" if torch.distributed.get_backend(self._world) == "nccl" else "cpu"
            values = torch.tensor(mine, dtype=torch.float64, device=device)
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self._world)
            mine = values.tolist()
        if self.handle is not None:
            known = None if math.isinf(mine[0]) or math.isnan(mine[0]) else mine[0]
            own_peak = None if math.isinf(mine[1]) else peak_bytes
            self.handle.step(known, own_peak)


def _repeats_another() -> bool:
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def _where() -> dict[str, int]:
    return {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
    }


def attach_adaptation(model: list[torch.nn.Module], args: Namespace, saved: SavedState) -> Adaptation | None:
    """Attach the job's plan to the marked layers of this rank's model chunks; None where it has none.

    Raises UserError, on all ranks, where ranks were given different plan files or settings."""
    config = config_of(args)
    if config is None:
        return None
    groups = [parallel_state.get_tensor_model_parallel_group()]
    same_channels = []
    if not getattr(args, "variable_seq_lengths", False):
        # Where lengths differ, data-parallel ranks do not come to a new one at the same moment; each plans for itself.
        same_channels.append(parallel_state.get_data_parallel_group(with_context_parallel=True))
    plan_groups = [*same_channels, *groups]
    _check_settings(config)
    found = marked_layers(model)
    saved.attached = True
    if not found:
        if saved.states is not None:
            saved.states.alone()
        return Adaptation(None, args, config)
    layers = [module for _, module in found]
    preserve = beside_training(layers)
    if os.path.isfile(config.plan):
        policy = staged_policy(config, layers, groups=plan_groups, plan=plan_of_file(config.plan, args))
    else:
        states = None if saved.states is None else saved.states.offer
        chunk_of = [i for i, _ in found]
        setting = setting_of(args, config, chunk_of, preserve, states) if config.plan == "auto" else None
        policy = staged_policy(config, layers, setting, plan_groups)
    attached = attach(layers, policy)
    handle = AdaptiveHandle(attached, config, same_channels, plan_groups=plan_groups, preserve=preserve)
    saved.handle = handle
    return Adaptation(handle, args, config, [layer.layer_number for layer in layers])  # type: ignore[misc]


def plan_of_file(path: str, args: Namespace) -> Plan:
    """This rank's part of a plan file. Raises UserError where it was made for another job."""
    plan = Plan.load(path)
    check_plan(plan, path, args)
    return plan.of_stage(parallel_state.get_pipeline_model_parallel_rank())


def _check_settings(config: Config) -> None:
    """Ranks may read different files under one name. Compared before anything depends on it."""
    lines = [f"{name} {value!r}" for name, value in sorted(vars(config).items())]
    if os.path.isfile(config.plan):
        lines += str(Plan.load(config.plan)).splitlines()
    world = torch.distributed.group.WORLD
    assert world is not None
    check_equal(lines, [world], "another plan or other settings than rank {other}")
