"""Layers with collectives, on two ranks over gloo: recipes issue them again, in the same order on both ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch import Tensor, nn

from megatron_adacc import attach

WIDTH = 8


class Reduce(torch.autograd.Function):
    """Sum over ranks in the forward, identity in the backward: the end of a row-parallel linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Copy(torch.autograd.Function):
    """Identity in the forward, sum over ranks in the backward: the start of a column-parallel linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class Gather(torch.autograd.Function):
    """Parts of all ranks, one after the other, into a workspace that every call overwrites."""

    workspace: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shape = (2 * x.shape[0], *x.shape[1:])
        if shape not in Gather.workspace:
            Gather.workspace[shape] = torch.empty(shape)
        work = dist.all_gather_into_tensor(Gather.workspace[shape], x.contiguous(), async_op=True)
        assert work is not None
        work.wait()
        return Gather.workspace[shape] * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(2)[dist.get_rank()]


class TensorParallel(nn.Module):
    """Column- then row-parallel MLP with a norm after the sum: what follows a collective is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(Copy.apply(self.norm(x)))))
        return self.last(x + Reduce.apply(y)).sigmoid()


class SequenceParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(Gather.apply(x.tanh())).exp().sin()


class Functional(nn.Module):
    """Functional collectives, whose results must be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).tanh()
        total = functional.all_reduce(y.detach(), "sum", dist.group.WORLD)
        return (y * total).exp().sin()


class Unproven(nn.Module):
    """A result that rank 1 cannot prove: then rank 0 must not use its recipe either."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Unproven.calls += dist.get_rank()
        y = x * (1.0 + Unproven.calls)
        return Reduce.apply(y).exp().sin()


def gradients(layer: nn.Module, seed: int) -> list[Tensor]:
    layer.zero_grad()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed + dist.get_rank())).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def compare(kind: type[nn.Module]) -> set[str]:
    torch.manual_seed(dist.get_rank())
    plain, layer = kind(), kind()
    layer.load_state_dict(plain.state_dict())
    with attach(layer, "recompute", min_bytes=0) as handle:
        for seed in range(5):
            expected, found = gradients(plain, seed), gradients(layer, seed)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (kind, seed)
            assert handle.stored_bytes() == 0
        assert any(op.collective for op in handle.graphs[0].ops)
        return {site for p in handle.plan.layers for site, action in p.actions if str(action) == "recompute"}


def check_exact(rank: int) -> None:
    assert {"up/addmm.0", "/gelu.0", "/add.0", "/sigmoid.0"} <= compare(TensorParallel)
    assert "/exp.0" in compare(SequenceParallel)
    assert "/exp.0" in compare(Functional)


def check_agreement(rank: int) -> None:
    torch.manual_seed(0)
    layer = Unproven()
    with attach(layer, "recompute", min_bytes=0) as handle:
        for seed in range(4):
            gradients(layer, seed)
        report = handle.report()
    reason = "takes a number that differs" if rank else "another rank of its process group could not prove it"
    assert reason in report


def worker(rank: int, path: str, check: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    try:
        check(rank)
        dist.barrier()  # neither rank takes the connection down while the other still uses it
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check_exact, check_agreement])
def test_two_ranks(check: Callable[[int], None], tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path / "store"), check), nprocs=2)
