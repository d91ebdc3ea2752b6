"""What `--adacc-plan auto` plans for: this rank's share of the job, in the words of runtime/auto.py."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch.distributed import ProcessGroup

from megatron_adacc.adaptive.config import Config
from megatron_adacc.cost.in_flight import Schedule, heaviest, moments
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import Room
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.read_job import job_of_args, schedule_of_args
from megatron_adacc.runtime.setting import Setting
from megatron_adacc.runtime.state_offer import StateOffer


def setting_of(
    args: Namespace,
    config: Config,
    chunk_of: list[int],
    preserve: Callable[[], AbstractContextManager[None]],
    states: Callable[[Sequence[ProcessGroup]], StateOffer] | None = None,
) -> Setting:
    """The setting of this rank. ``chunk_of``: by place of an attached layer, the model chunk that it lies in.
    ``preserve``: as for Setting. ``states``: the offer of --adacc-state-plan, given the setting's groups.

    Raises UserError where a limit in bytes needs the memory model and that does not know the job's kind of model, and
    for a limit that cannot be read."""
    from megatron.core import parallel_state

    limit = None if config.limit is None else Limit.parse(config.limit)
    schedule = schedule_of_args(args)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    alive = heaviest(schedule, stage, [chunk_of.count(c) for c in range(schedule.chunks)])
    try:
        job = job_of_args(args, adapters=True)
        rank = parallel_state.get_data_parallel_rank(with_context_parallel=True) % job.training.data_parallel
        found = room_of(job, stage, rank)
    except UserError as error:
        if limit is None or limit.share is None:
            raise UserError(
                f"{error} Or give --adacc-limit as a share of activations, such as 25%: that needs no memory model."
            ) from error
        found = Room(moments=_moments(schedule, stage))
    groups = [parallel_state.get_tensor_model_parallel_group()]
    if not getattr(args, "variable_seq_lengths", False):
        # Where lengths differ, data-parallel ranks do not come to a new one at the same moment; each plans for itself.
        groups.insert(0, parallel_state.get_data_parallel_group(with_context_parallel=True))

    def room(device: torch.device) -> Room:
        return found

    return Setting(
        limit=limit,
        room=room,
        in_flight=alive,
        chunk_of=chunk_of,
        groups=tuple(groups),
        main_gradients=True,
        preserve=preserve,
        error_budget=config.error_budget,
        states=None if states is None else states(groups),
    )


def room_of(job: Job, stage: int, rank: int | None = None) -> Room:
    """What a rank of `stage` needs beside its layers; `rank` among its data-parallel ranks, None for the fullest."""
    needed = job.room(stage, rank)
    # The layers' own account has the attention mask, which is an input that they share.
    fixed_bytes = needed.fixed_bytes - job.outer.mask_bytes
    return Room(
        fixed_bytes,
        needed.transient_bytes,
        floor_bytes=max(fixed_bytes + needed.end_bytes, needed.step_bytes),
        moments=_moments(job.schedule, stage),
    )


def _moments(schedule: Schedule, stage: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((moment.chunk, moment.alive) for moment in moments(schedule, stage))
