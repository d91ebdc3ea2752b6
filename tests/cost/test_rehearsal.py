"""A rehearsal leaves the parameters' own gradients alone, however Megatron's kernels find them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megatron_adacc.cost.rehearsal import Rehearsal


class Fused(torch.autograd.Function):
    """x * w, whose backward adds to the weight's main gradient as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        main_grad = weight.get_main_grad() if hasattr(weight, "get_main_grad") else weight.main_grad
        main_grad.add_((gradient * x).sum(0))
        return gradient * weight, None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return Fused.apply(x, self.weight)


class View(nn.Module):
    """Its weight is a view of a parameter that it does not know, as FSDP1 arranges it."""

    def __init__(self, flat: nn.Parameter) -> None:
        super().__init__()
        self.weight = flat[:8]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def rehearse(layer: nn.Module) -> None:
    with Rehearsal(layer, layer.forward, (torch.randn(4, 8, requires_grad=True),), {}).begin() as call:
        call.forward(lambda t: t, lambda t: t).backward()


@pytest.mark.parametrize("by_method", [False, True])
def test_main_gradients_are_as_before(by_method: bool) -> None:
    layer, main_grad = Scale(), torch.zeros(8)
    if by_method:
        layer.weight.get_main_grad = lambda: main_grad
    else:
        layer.weight.main_grad = main_grad
    rehearse(layer)
    assert torch.equal(main_grad, torch.zeros(8))
    layer(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert torch.equal(main_grad, torch.full((8,), 4.0))


def test_a_view_of_an_unknown_parameter_is_the_end_of_the_graph() -> None:
    flat = nn.Parameter(torch.ones(16))
    layer = View(flat)
    weight = layer.weight
    rehearse(layer)
    assert flat.grad is None
    assert layer.weight is weight
    layer(torch.ones(4, 8)).sum().backward()  # the graph behind the view has not been used up
    assert flat.grad is not None


def test_a_distributed_parameter_gets_no_gradient(tmp_path: Path) -> None:
    """As torch's tensor parallelism has them: DTensors."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        layer = nn.Sequential(nn.Linear(8, 8))
        parallelize_module(layer, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
        rehearse(layer)
        assert [p.grad for p in layer.parameters()] == [None, None]
        layer(torch.ones(4, 8)).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
    finally:
        dist.destroy_process_group()
