"""The order of forwards and backwards on paper is the one of Megatron's own schedules."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_adacc.cost.in_flight import Schedule, Step, order
from megatron_adacc.errors import UserError


class Group:
    """A process group that nobody else is in: its size and this rank."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Communicator:
    """Sends nothing and receives a name for what would come."""

    def __init__(self, schedule: Schedule, stage: int, config: Any) -> None:
        self.config = config
        self.pp_group = Group(schedule.stages, stage)
        self.virtual_pipeline_model_parallel_size = schedule.chunks if schedule.chunks > 1 else None
        self.total_stages, self.current_stage = schedule.stages, stage
        self.is_pp_first_stage, self.is_pp_last_stage = stage == 0, stage == schedule.stages - 1

    def recv_forward(self, *_: Any, **__: Any) -> str:
        return "received"

    recv_backward = send_forward_recv_backward = send_backward_recv_forward = recv_forward
    send_forward_recv_forward = send_backward_recv_backward = recv_forward

    def send_forward(self, *_: Any, **__: Any) -> None:
        return None

    send_backward = send_forward

    def send_forward_backward_recv_forward_backward(self, *_: Any, **__: Any) -> tuple[str, str]:
        return "received", "received"


class Torch:
    """torch, whose zeros lie on the host whatever the schedule asks for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, **_: Any) -> torch.Tensor:
        return torch.zeros(*size)


class Output(torch.Tensor):
    """A chunk's output, which knows its forward."""

    step: Step


def run_schedule(schedule: Schedule, stage: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Step, ...]:
    """What Megatron's schedule calls on this stage, in order."""
    from megatron.core.pipeline_parallel import schedules

    recorded: list[Step] = []

    def forward_step(*_: Any, **arguments: Any) -> tuple[torch.Tensor, int]:
        output = torch.zeros(1).as_subclass(Output)
        output.step = Step(True, arguments.get("vp_stage") or 0, arguments["current_microbatch"])
        recorded.append(output.step)
        return output, 0

    def backward_step(_: Any, output: Output, *__: Any) -> str:
        recorded.append(Step(False, output.step.chunk, output.step.micro_batch))
        return "gradient"

    config = SimpleNamespace(
        timers=None,
        overlap_p2p_comm=False,
        batch_p2p_comm=True,
        overlap_p2p_comm_warmup_flush=False,
        finalize_model_grads_func=None,
        no_sync_func=None,
        grad_sync_func=None,
        param_sync_func=None,
        hidden_size=1,
        sequence_parallel=False,
        variable_seq_lengths=False,
        microbatch_group_size_per_vp_stage=schedule.group,
        virtual_pipeline_model_parallel_size=schedule.chunks if schedule.chunks > 1 else None,
        overlap_moe_expert_parallel_comm=False,
        hybrid_context_parallel=False,
        num_microbatches_with_partial_activation_checkpoints=None,
        deallocate_pipeline_outputs=False,
    )
    models = []
    for _ in range(schedule.chunks):
        models.append(nn.Module())
        models[-1].config = config
    groups = schedules.ProcessGroupCollection()
    groups.tp = groups.cp = Group(1, 0)
    shared = {
        "forward_step_func": None,
        "num_microbatches": schedule.micro_batches,
        "seq_length": 1,
        "micro_batch_size": 1,
        "p2p_communicator": Communicator(schedule, stage, config),
        "pg_collection": groups,
    }
    with monkeypatch.context() as patch:
        patch.setattr(schedules, "torch", Torch())
        patch.setattr(schedules, "forward_step", forward_step)
        patch.setattr(schedules, "backward_step", backward_step)
        patch.setattr(schedules, "get_model_type", lambda model: None)
        if schedule.stages == 1:
            schedules.forward_backward_no_pipelining(data_iterator=None, model=models[0], **shared)
        elif schedule.chunks == 1:
            schedules.forward_backward_pipelining_without_interleaving(data_iterator=None, model=models[0], **shared)
        else:
            schedules.forward_backward_pipelining_with_interleaving(
                data_iterator=[None] * schedule.chunks, model=models, **shared
            )
    return tuple(recorded)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_one_chunk_a_stage(stages, monkeypatch):
    for micro_batches in (1, 2, 3, 5, 8, 13):
        schedule = Schedule(stages, micro_batches)
        for stage in range(stages):
            assert order(schedule, stage) == run_schedule(schedule, stage, monkeypatch)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_interleaved(stages, monkeypatch):
    compared = refused = 0
    for micro_batches, chunks, group in itertools.product((2, 4, 5, 8, 11), (2, 3, 4), (None, 3, 4, 5, 8)):
        try:
            schedule = Schedule(stages, micro_batches, chunks, group)
        except UserError:
            # What we refuse, Megatron refuses.
            allowed = SimpleNamespace(
                stages=stages, micro_batches=micro_batches, chunks=chunks, group=stages if group is None else group
            )
            with pytest.raises((ValueError, RuntimeError)):
                run_schedule(allowed, 0, monkeypatch)
            refused += 1
            continue
        for stage in range(stages):
            assert order(schedule, stage) == run_schedule(schedule, stage, monkeypatch)
            compared += 1
    assert compared > 50
    assert refused > 10
