"""The optimizer's state of a job that is planned for a device that is not there (docs/states.md).

    adacc plan ... --adacc-state-plan 16|8|4
    adacc plan ... --adacc-state-plan auto [--adacc-state-limit 60%]        without it: the joint plan
    adacc plan ... --adacc-dgr-group-size N [--adacc-dgr-offload]

What the job's optimizer offers the activations' plan at start-up (joint_states.py), counted from the job's flags. The
update in blocks takes no longer than AdamW's here: it was not timed on CUDA.
"""

from __future__ import annotations

import argparse
import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron_adacc.cost.gpt_parameters import Tensor
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.cost.static_memory import Buckets, StaticBytes, pieces
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import state_flags
from megatron_adacc.megatron.delayed_bytes import device_moments, groups_of, waiting_bytes
from megatron_adacc.megatron.flags import AdaccFlags
from megatron_adacc.megatron.joint_states import chosen_jointly, forms_of, layout_bytes, workspace_of
from megatron_adacc.megatron.read_job import micro_batches
from megatron_adacc.megatron.state_bytes import bits_of, moment_bytes
from megatron_adacc.megatron.trace_flags import parse_known
from megatron_adacc.optim.formats import STATE_BITS
from megatron_adacc.planner.joint import StateForm
from megatron_adacc.runtime.state_offer import StateOffer

_FLAGS = ("adacc_state_", "adacc_dgr_", "adacc_gradient_guard")
_REST = {"adacc_plan": "auto", "adacc_limit": None, "adacc_lora_rank": None, "adacc_precision_policy": None}


@dataclass(frozen=True)
class StageState:
    """m and v of a rank of one stage. ``offer``: to the plan of activations, with sums of delayed gradients; None for
    Megatron's own optimizer. ``static``: without a state plan. ``waiting_bytes``: of these sums. ``away_bytes``:
    elsewhere than on the device. ``moments``: by bits, m and v where all that may have these bits have them."""

    static: StaticBytes
    offer: StateOffer | None
    waiting_bytes: int
    away_bytes: int
    moments: Mapping[int, int]

    def bits_in(self, state_bytes: int) -> int:
        """The most bits that all can have at first, in so many bytes with the sums; 4 where none fit."""
        fitting = (b for b in STATE_BITS if self.moments[b] + self.waiting_bytes <= state_bytes)
        return next(fitting, STATE_BITS[-1])


def complete(args: Namespace, flags: Sequence[str]) -> None:
    """Write what `flags` say of the state into Megatron's validated arguments. Raises UserError for what the job would
    refuse, too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in dataclasses.fields(AdaccFlags):
        if flag.name.startswith(_FLAGS):
            how: dict[str, Any] = {"action": "store_true"} if flag.default is False else {}
            if isinstance(flag.default, (int, float)) and flag.default is not False:
                how = {"type": type(flag.default)}
            parser.add_argument(f"--{flag.name.replace('_', '-')}", default=flag.default, **how)
    own, _ = parse_known(parser, flags)
    vars(args).update({**_REST, **vars(own)})
    state_flags.check(args)


def state_of(args: Namespace, job: Job, stage: int) -> StageState:
    """The state of the fullest rank of a stage; under the distributed optimizer each form's bytes are those of the rank
    that needs most for it."""
    static = job.static_bytes(stage)
    if not state_flags.own_optimizer(args):
        return StageState(static, None, 0, 0, {})
    groups = [] if args.adacc_dgr_group_size == 1 else groups_of(job, stage, args.adacc_dgr_group_size)
    waiting = waiting_bytes(groups) if groups else 0
    ranks = [_given(job, stage, rank) for rank in (range(job.training.data_parallel) if job.training.zero else (None,))]
    moments = {bits: max(_bytes(given[bits]) for given in ranks) for bits in STATE_BITS}
    sizes = [[elements for elements, _ in given[STATE_BITS[0]]] for given in ranks]
    away = 0
    if chosen_jointly(args):
        by_rank = zip(*(forms_of(given, waiting, on_cpu=False) for given in ranks), strict=True)
        forms = [StateForm(max(form.bytes for form in same), same[0].error, same[0].us) for same in by_rank]
    else:
        bits = state_flags.UNIFORM.get(args.adacc_state_plan, 32)
        settled = moments[bits]
        limit = None if args.adacc_state_limit is None else _limit_of_moments(args, static, moments)
        if limit is not None:
            settled = limit
        if args.adacc_dgr_offload:
            away = settled
            settled = device_moments(job, groups, bits)
            settled = settled if limit is None else min(limit, settled + layout_bytes(sizes[0]))
        forms = [StateForm(settled + waiting, 0.0)]
    offer = StateOffer(
        static.moments, forms, args.adacc_state_price if chosen_jointly(args) else 0.0, micro_batches(args),
        max(map(workspace_of, sizes)), lambda allowed: None,
    )  # fmt: skip
    return StageState(static, offer, waiting, away, moments)


def assumed(args: Namespace) -> tuple[str, ...]:
    """What is said of it."""
    if not chosen_jointly(args):
        return ()
    return ("The state's bits are chosen with auto's plan; the other strategies are counted with 32 bits.",)


def _given(job: Job, stage: int, rank: int | None) -> dict[int, list[tuple[int, int]]]:
    """By bits, the elements of each piece of a rank, and its bits."""
    own: list[tuple[Tensor, int]] = []
    for index, chunk in enumerate(job.tensors(stage)):
        buckets = job.buckets if (stage, index) == (0, 0) else Buckets(None, job.buckets.for_bandwidth)
        own += pieces(chunk, job.training, rank, buckets)
    parallel = job.tensor_parallel
    return {bits: [(n, bits_of(tensor, n, bits, parallel)) for tensor, n in own] for bits in STATE_BITS}


def _bytes(given: Sequence[tuple[int, int]]) -> int:
    return sum(moment_bytes(elements, bits) for elements, bits in given)


def _limit_of_moments(args: Namespace, static: StaticBytes, moments: Mapping[int, int]) -> int:
    """What --adacc-state-limit leaves to m and v."""
    limit = state_flags.state_limit(args.adacc_state_limit)
    total = limit.total_bytes if limit.share is None else int(Fraction(limit.share) * static.total)
    assert total is not None
    least = static.total - static.moments + min(moments.values())
    if total < least:
        raise UserError(
            f"--adacc-state-limit {args.adacc_state_limit} is too little: with 4 bits everywhere the static bytes are "
            f"{written_bytes(least)}, {100 * least / static.total:.1f} % of those without a state plan."
        )
    return total - (static.total - static.moments)
