"""The backward pass in Python, against torch's engine on the CPU."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megatron_adacc.cost.live_bytes import LiveBytes
from megatron_adacc.devices.backward import python_engine


class Split(torch.autograd.Function):
    """(2 x + y, x) with arguments that are no tensors; the second result is not used by everyone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(z)
        return 2 * x + y, x.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        return 2 * first + second + 0 * z, None, first, None


class Layer(nn.Module):
    """Broadcast parameters, a residual, views, two uses of one tensor, a Function, a cast: [128, 64] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.scale = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(x)))) + x
        y = (y * self.scale).double().float()
        first, _ = Split.apply(y, "name", y.sin(), torch.ones(64))
        left, right = first.chunk(2, dim=-1)
        return torch.cat([right, left], dim=-1) + x


def engine(python: bool) -> Any:
    return python_engine() if python else contextlib.nullcontext()


def trained(python: bool) -> tuple[list[Tensor], list[int]]:
    """Gradients of two backward passes that accumulate, and the peak bytes of the first."""
    torch.manual_seed(1)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(128, 64, requires_grad=True)
    live = LiveBytes([x, *model.parameters()])
    with engine(python), live:
        loss = model(x).square().sum()
        live.mark()
        loss.backward()
        peak = live.mark().peak
        model(x).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], [peak]


def test_gradients_are_those_of_the_engine() -> None:
    expected, (expected_peak,) = trained(python=False)
    found, (peak,) = trained(python=True)
    assert len(found) == 15
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert peak == pytest.approx(expected_peak, rel=0.01)


def order_of_events(python: bool) -> list[tuple[str, int]]:
    """In which order saved tensors are asked for and let go of."""
    events: list[tuple[str, int]] = []

    class Handle:
        def __init__(self, index: int, tensor: Tensor) -> None:
            self.index, self.tensor = index, tensor.detach()

        def __del__(self) -> None:
            events.append(("release", self.index))

    def pack(tensor: Tensor) -> Handle:
        pack.count += 1  # type: ignore[attr-defined]
        return Handle(pack.count, tensor)  # type: ignore[attr-defined]

    def unpack(handle: Handle) -> Tensor:
        events.append(("unpack", handle.index))
        return handle.tensor

    pack.count = -1  # type: ignore[attr-defined]
    torch.manual_seed(1)
    model = Layer()
    with engine(python), saved_tensors_hooks(pack, unpack):
        model(torch.randn(128, 64, requires_grad=True)).square().sum().backward()
    return events


def test_saved_tensors_are_freed_as_the_engine_frees_them() -> None:
    expected = order_of_events(python=False)
    assert len(expected) > 20
    unpacked = [index for event, index in expected if event == "unpack"]
    found = order_of_events(python=True)
    assert [index for event, index in found if event == "unpack"] == unpacked
    assert sorted(found) == sorted(expected)
    # Each is let go of before the next node runs: at no time more are held than by the engine.
    for events in (expected, found):
        held = [index for event, index in events if event == "release"]
        assert len(held) == len(set(held))
    assert _most_held(found) <= _most_held(expected)


def _most_held(events: list[tuple[str, int]]) -> list[int]:
    """After each unpack, how many were not yet released."""
    total, counts = sum(event == "release" for event, _ in events), []
    for event, _ in events:
        total -= event == "release"
        if event == "unpack":
            counts.append(total)
    return counts


def test_keep_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    with python_engine():
        y = (x * x).sum()
        y.backward(retain_graph=True)
        y.backward()
        assert y.grad_fn is None
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0, 4.0]


def test_several_outputs_with_gradients_and_a_leaf_among_them() -> None:
    x, leaf = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with python_engine():
        a, b = x.exp(), (x * leaf).sum()
        torch.autograd.backward([a, b, leaf], [torch.tensor([1.0, 2.0]), None, torch.ones(2)])
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([1.0, 2.0]) * x.detach().exp() + 1)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0]


def test_one_output_that_another_depends_on() -> None:
    x = torch.ones(2, requires_grad=True)
    with python_engine():
        y = x * 3
        z = y * 5
        torch.autograd.backward([y.sum(), z.sum(), y], [None, None, torch.ones(2)])
    assert x.grad is not None
    assert x.grad.tolist() == [21.0, 21.0]


def test_a_gradient_that_becomes_the_leafs_is_not_copied() -> None:
    weight = torch.ones(1 << 20, requires_grad=True)
    live = LiveBytes([weight])
    with python_engine(), live:
        loss = (weight * 2).sum()
        live.mark()
        loss.backward()
        mark = live.mark()
    assert weight.grad is not None
    assert mark.now == weight.grad.nbytes + loss.nbytes
    assert mark.peak < 2 * weight.grad.nbytes


def test_hook_of_an_accumulated_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    seen = []

    def hook(leaf: Tensor) -> None:
        assert leaf.grad is not None
        seen.append(leaf.grad.tolist())
        leaf.grad = None

    x.register_post_accumulate_grad_hook(hook)
    with python_engine():
        (x * 2).sum().backward()
    assert seen == [[2.0, 2.0]]
    assert x.grad is None


def test_fake_cuda_tensors() -> None:
    """Torch's own engine stops here where torch is built for CUDA and there is no GPU."""
    with FakeTensorMode(), torch.device("cuda"), python_engine():
        model = Layer()
        x = torch.randn(128, 64, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        assert (x.grad.device.type, tuple(x.grad.shape)) == ("cuda", (128, 64))
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_what_it_does_not_do() -> None:
    x = torch.ones(2, requires_grad=True)
    with python_engine():
        with pytest.raises(NotImplementedError, match=r"call backward\(\) without inputs= and create_graph="):
            torch.autograd.grad((x * x).sum(), x)
        with pytest.raises(NotImplementedError, match=r"is not itself differentiated"):
            (x * x).sum().backward(create_graph=True)
    (gradient,) = torch.autograd.grad((x * x).sum(), x)
    assert gradient.tolist() == [2.0, 2.0]
