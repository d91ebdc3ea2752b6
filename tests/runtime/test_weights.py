"""Fused weight gradients under the stash: backward must find the working parameter's attributes.

The stand-in does what Megatron's LinearWithGradAccumulationAndAsyncCommunication does with apex's kernel:
it adds the gradient into ``weight.main_grad``, says so in ``weight.grad_added_to_main_grad``, and returns a
dummy gradient, without which the parameter's hooks would not fire.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.runtime.weights import WorkingWeight


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """apex's fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32: main_grad += grad_output^T total_input."""
    main_grad.add_(grad_output.t() @ total_input)


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_input = grad_output @ weight
        assert type(grad_input) is Tensor
        wgrad_gemm_accum_fp32(x, grad_output, weight.main_grad)
        grad_weight = None
        if hasattr(weight, "grad_added_to_main_grad"):
            grad_weight = torch.empty(weight.main_grad.shape, dtype=x.dtype, requires_grad=False)
            weight.grad_added_to_main_grad = True
        return grad_input, grad_weight


class Recorded(torch.autograd.Function):
    """Adds a parameter, and shows what its backward finds of it."""

    found: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (Recorded.found,) = ctx.saved_tensors
        return grad_output, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return FusedLinear.apply(self.norm(x), self.weight).tanh()


def train(layer: Layer, steps: int) -> tuple[Tensor, int, list[Tensor]]:
    """main_grad after some steps, how often the post-accumulate hook fired, input gradients."""
    weight = layer.weight
    weight.main_grad = torch.zeros(8, 8)
    weight.grad_added_to_main_grad = False
    fired = []
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad is not None))
    gradients = []
    for step in range(steps):
        weight.grad_added_to_main_grad = False
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        layer(x).sum().backward()
        assert weight.grad is not None
        assert weight.grad_added_to_main_grad is True
        weight.grad = None
        gradients.append(x.grad)
    assert all(fired)
    return weight.main_grad, len(fired), gradients


@pytest.mark.parametrize("plan", ["keep", "recompute"])
def test_fused_weight_gradient(plan: str) -> None:
    expected_main_grad, expected_fired, expected = train(Layer(), 4)
    layer = Layer()
    with attach(layer, plan, min_bytes=0) as handle:
        main_grad, fired, gradients = train(layer, 4)
        assert handle.traced_forwards == 2
    assert torch.equal(main_grad, expected_main_grad)
    assert main_grad.abs().sum() > 0
    assert fired == expected_fired == 4
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_parameters_in_one_shared_storage() -> None:
    """As in Megatron's DDP and distributed optimizer: every parameter is a view of one buffer."""
    plain, layer = Layer(), Layer()
    parameters = list(layer.parameters())
    shared = torch.cat([p.detach().flatten() for p in parameters])
    offset = 0
    for p in parameters:
        p.data = shared[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    _, _, expected = train(plain, 4)
    with attach(layer, "recompute", min_bytes=0) as handle:
        main_grad, _, gradients = train(layer, 4)
        (graph,) = handle.graphs
    assert {b.name for b in graph.buffers if b.origin == "parameter"} == {"norm.weight", "norm.bias", "weight"}
    assert torch.equal(main_grad, plain.weight.main_grad)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert torch.equal(layer.norm.weight.grad, plain.norm.weight.grad)


def test_parameters_may_move_between_forwards() -> None:
    """FSDP and the distributed optimizer put a parameter's data elsewhere; it is found again by name."""
    plain, layer = Layer(), Layer()
    with attach(layer, "recompute", min_bytes=0):
        for step in range(4):
            for p in layer.parameters():
                p.data = p.data.clone()
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    *(_gradients(module, step) for module in (plain, layer)), strict=True
                )
            )  # fmt: skip


def _gradients(layer: Layer, seed: int) -> list[Tensor]:
    layer.zero_grad()
    layer.weight.main_grad = torch.zeros(8, 8)
    layer(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()).sum().backward()
    return [layer.weight.main_grad, layer.norm.weight.grad, layer.norm.bias.grad]


def test_attributes_are_the_parameters_own() -> None:
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            (weight,) = ctx.saved_tensors
            seen.append(weight)
            weight.noted = "here"
            del weight.flag
            return g, g

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.weight.flag = 3

        def forward(self, x: Tensor) -> Tensor:
            return Probe.apply(x, self.weight)

    layer = Scale()
    with attach(layer, "keep", min_bytes=0):
        layer(torch.randn(8, requires_grad=True)).sum().backward()
    (weight,) = seen
    assert type(weight) is WorkingWeight
    assert isinstance(weight, nn.Parameter)
    assert weight.data_ptr() == layer.weight.data_ptr()
    assert layer.weight.noted == "here"
    assert not hasattr(layer.weight, "flag")
    assert type(weight + 1) is Tensor


def test_a_frozen_parameter_is_one_in_backward_too() -> None:
    """torch.compile makes other code, with other rounding, of a function of a tensor that is none of its own kinds."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(8), requires_grad=False)
            self.bias.allreduce = True  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            return Recorded.apply(x, self.bias)

    layer = Frozen()
    with attach(layer, "recompute", min_bytes=0):
        for _ in range(3):
            layer(torch.ones(4, 8, requires_grad=True)).sum().backward()
            assert type(Recorded.found) is WorkingWeight
            assert isinstance(Recorded.found, nn.Parameter)
            assert Recorded.found.data_ptr() == layer.bias.data_ptr()
            assert Recorded.found.allreduce
