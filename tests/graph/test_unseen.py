"""What a trace cannot see, or must not trust: opaque submodules, constants, host reads, compiled regions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.graph import Origin, trace
from megatron_adacc.runtime.attach import Handle


def train(layer: nn.Module, handle: Handle | None, calls: int = 4) -> list[Tensor]:
    """Input and parameter gradients of some calls."""
    found = []
    for seed in range(calls):
        layer.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        x = torch.randn(8, 16, requires_grad=True)
        layer(x).square().sum().backward()
        found += [x.grad, *(p.grad for p in layer.parameters())]
        assert handle is None or handle.stored_bytes() == 0
    return found


def compare(make: Any) -> Handle:
    """The layer's gradients under "recompute" are those of the plain run; returns the handle."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    layer = make()
    expected = train(plain, None)
    handle = attach(layer, "recompute", min_bytes=0)
    found = train(layer, handle)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return handle


def actions(handle: Handle) -> dict[str, str]:
    return {site: str(action) for layer in handle.plan.layers for site, action in layer.actions}


class HiddenNorm(torch.autograd.Function):
    """As apex's FusedLayerNorm: one kernel that no dispatch mode sees, here numpy; saves its statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        a = x.detach().numpy()
        mean = a.mean(-1, keepdims=True)
        inverse = 1 / (a.var(-1, keepdims=True) + 1e-5) ** 0.5
        ctx.save_for_backward(x, weight, torch.from_numpy(mean), torch.from_numpy(inverse))
        return torch.from_numpy((a - mean) * inverse * weight.detach().numpy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, mean, inverse = ctx.saved_tensors
        normal = (x - mean) * inverse
        gw = g * weight
        gx = inverse * (gw - gw.mean(-1, keepdim=True) - normal * (gw * normal).mean(-1, keepdim=True))
        return gx, (g * normal).sum(0)


class FusedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return HiddenNorm.apply(x, self.weight)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.norm = FusedNorm()
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x).tanh()))


class TestOpaqueSubmodule:
    def test_its_call_is_one_op(self) -> None:
        graph = trace(Opaque(), torch.randn(8, 16, requires_grad=True))
        (call,) = (op for op in graph.ops if op.target == "call norm")
        assert call.barrier is None
        names = {graph.buffers[b].name for b in call.uses}
        assert names == {"norm.weight"}

    def test_what_follows_is_recomputed_through_it(self) -> None:
        handle = compare(Opaque)
        assert actions(handle) == {
            "/tanh.0": "recompute",
            "norm/call.0": "recompute",
        }
        # The norm's mean and deviation, which nothing visible wrote, are small and stay; so does the input.
        assert handle.report().count("  keep") == 3

    def test_a_function_in_the_layer_itself_stays_opaque(self) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(16))
                self.linear = nn.Linear(16, 16)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(HiddenNorm.apply(x * 2, self.weight)).tanh()

        handle = compare(Layer)
        assert "no visible op wrote it" in handle.report()
        assert actions(handle) == {"/mul.0": "recompute", "/tanh.0": "recompute"}


class TestConstants:
    def test_a_shared_table_is_proven_by_the_second_trace(self) -> None:
        table = torch.linspace(-1, 1, 16)

        class Layer(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return (x * table).exp().sin()

        handle = compare(Layer)
        (graph,) = handle.graphs
        assert [b.origin for b in graph.buffers if b.base.size == (16,)] == [Origin.CONSTANT]
        assert set(actions(handle)) == {"/exp.0"}

    def test_a_table_that_changes_is_none(self) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls = [0]

            def forward(self, x: Tensor) -> Tensor:
                self.calls[0] += 1
                table = torch.from_numpy(torch.full((16,), 1.0 / self.calls[0]).numpy() * 0.5)
                return (x + table).exp().sin()

        handle = compare(Layer)
        (graph,) = handle.graphs
        assert Origin.CONSTANT not in {b.origin for b in graph.buffers}
        assert actions(handle) == {}
        assert "made from numbers that differ from call to call" in handle.report()

    def test_a_constant_that_changes_later_is_traced_anew(self) -> None:
        table = torch.ones(16)

        class Layer(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return (x * table).exp().sin()

        layer = Layer()
        handle = attach(layer, "recompute", min_bytes=0)
        train(layer, handle, 3)
        assert handle.traced_forwards == 2
        table.mul_(0.5)
        found = train(layer, handle, 1)
        assert handle.traced_forwards == 3
        handle.detach()
        assert torch.equal(found[0], train(layer, None, 1)[0])

    def test_an_unregistered_tensor_is_found_by_name(self) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.linspace(-1, 1, 16)

            def forward(self, x: Tensor) -> Tensor:
                return (x * self.table).exp().sin()

        graph = trace(Layer(), torch.randn(8, 16, requires_grad=True))
        assert [(b.origin, b.name) for b in graph.buffers if b.base.size == (16,)] == [(Origin.ATTRIBUTE, "table")]
        assert set(actions(compare(Layer))) == {"/exp.0"}


class TestHostReads:
    def test_a_number_read_from_data_bars_what_uses_it(self) -> None:
        class Layer(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return (x.exp() / x.detach().abs().max().item()).sin().exp()

        handle = compare(Layer)
        assert actions(handle) == {"/exp.0": "recompute"}
        assert "takes a number that differs from call to call" in handle.report()

    def test_a_read_that_nothing_depends_on_bars_nothing(self) -> None:
        seen = []

        class Layer(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(x.detach().mean().item())
                return x.exp().sin()

        handle = compare(Layer)
        assert actions(handle) == {"/exp.0": "recompute"}

    def test_a_python_number_that_changes_bars_its_op(self) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.state = {"scale": 1.0}

            def forward(self, x: Tensor) -> Tensor:
                self.state["scale"] *= 0.9
                return (x.exp() * self.state["scale"]).sin().exp()

        handle = compare(Layer)
        # The product is kept, so that what follows it can start from there.
        assert actions(handle) == {"/exp.0": "recompute", "/exp#1.0": "recompute"}
        assert "takes a number that differs from call to call" in handle.report()

    def test_an_attribute_that_changes_is_another_key(self) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = 1.0

            def forward(self, x: Tensor) -> Tensor:
                return (x.exp() * self.scale).sin().exp()

        layer, plain = Layer(), Layer()
        handle = attach(layer, "recompute", min_bytes=0)
        for scale in (1.0, 1.0, 1.0, 0.5, 0.5, 0.5):
            layer.scale = plain.scale = scale
            assert all(torch.equal(a, b) for a, b in zip(train(layer, handle, 1), train(plain, None, 1), strict=True))
        assert handle.traced_forwards == 4


class TestCompiledRegions:
    def test_a_compiled_function_is_one_op(self) -> None:
        @torch.compile
        def fused(x: Tensor, bias: Tensor) -> Tensor:
            return torch.nn.functional.gelu(x + bias)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(16, 32, bias=False)
                self.bias = nn.Parameter(torch.zeros(32))
                self.down = nn.Linear(32, 16)

            def forward(self, x: Tensor) -> Tensor:
                return self.down(fused(self.up(x), self.bias))

        handle = compare(Layer)
        targets = [op.target for graph in handle.graphs for op in graph.ops]
        assert "compiled" in targets
        assert "recompute" in actions(handle).values()


def test_fused_dropout_is_split_into_mask_and_product() -> None:
    """CUDA's native_dropout; the CPU has the same op."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.native_dropout(x.sin(), 0.5, True)[0].exp()

    handle = compare(Layer)
    assert actions(handle) == {"/native_dropout.1": "compress(bitmask)", "/exp.0": "recompute"}


def test_global_buffer_written_whole_is_a_fresh_one_at_replay() -> None:
    """As Megatron's all-gather buffer: one tensor that each call overwrites."""
    workspace = torch.empty(8, 16)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            workspace.copy_(x)
            return workspace * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Gather.apply(x.sin()).exp()

    handle = compare(Layer)
    before = workspace.clone()
    assert actions(handle) == {"/exp.0": "recompute"}
    assert torch.equal(workspace, before)


@pytest.mark.parametrize("dim", [0, 1])
def test_control_flow_by_the_data_is_kept(dim: int) -> None:
    class Layer(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Layer.calls += 1
            for _ in range(Layer.calls % 3):
                x = x.sin()
            return x.sum(dim).exp()

    layer = Layer()
    handle = attach(layer, "recompute", min_bytes=0)
    for _ in range(7):
        x = torch.randn(4, 16, requires_grad=True)
        layer(x).sum().backward()
        assert handle.stored_bytes() == 0
    assert handle.traced_forwards == 4
    assert "kept as autograd would" in handle.report()


def test_an_attached_layer_inside_a_compiled_model() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        return nn.Sequential(inner, nn.Linear(16, 16))

    plain, model = make(), make()
    handle = attach(model[0], "recompute", min_bytes=0)
    compiled = torch.compile(model)
    expected, found = train(plain, None), train(compiled, handle)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert handle.traced_forwards == 2


class ThroughScratch(nn.Module):
    """Two results pass through the same scratch memory, as gathered activations do in Megatron's global buffer."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.scratch = [torch.zeros(8 * 16 + 64)]  # in a list: neither buffer nor attribute of the module
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        return _Pass.apply(_Pass.apply(x, self.weight, self.scratch[0], 0), self.weight, self.scratch[0], self.start)


class _Pass(torch.autograd.Function):
    """(2 x) weight with its first factor in scratch memory, then exp; ``start``: where it lies there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scratch: Tensor, start: int) -> Tensor:
        place = scratch[start : start + x.numel()].view(x.shape)
        torch.mul(x, torch.full_like(x, 0.1), out=place)
        result = (place @ weight).mul_(0.1).exp_()
        ctx.save_for_backward(result, weight)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        result, weight = ctx.saved_tensors
        inner = gradient * result * 0.1
        return inner @ weight.t() * 0.1, torch.zeros_like(weight), None, None


@pytest.mark.parametrize("start", [0, 8, 64])
def test_scratch_memory_that_is_written_whole_is_no_obstacle(start: int) -> None:
    """At the same place, and overlapping: what the second write covers of the first is not read again."""
    handle = compare(lambda: ThroughScratch(start))
    found = actions(handle)
    assert len(found) == 2
    assert set(found.values()) == {"recompute"}


class ReadsWhatWasThere(nn.Module):
    """Writes a part of its scratch memory and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))
        self.scratch = [torch.ones(8, 32)]

    def forward(self, x: Tensor) -> Tensor:
        scratch = self.scratch[0]
        with torch.no_grad():
            torch.mul(x, 2.0, out=scratch.view(-1)[: x.numel()].view(x.shape))
            scratch[7] += 1  # differs from call to call
        return (x * scratch[:, :16].clone() * self.scale).exp()


def test_what_lay_in_scratch_memory_before_is_not_rebuilt() -> None:
    handle = compare(ReadsWhatWasThere)
    assert "recompute" not in [a for s, a in actions(handle).items() if "clone" in s]


class ScoresInPlaceOfScratch(nn.Module):
    """As Megatron's unfused attention: the product's input is scratch memory, times 0, which is written in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.scratch = [torch.full((8, 16), float("nan"))]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scratch[0].add_(1.0)
        scores = torch.addmm(self.scratch[0], x, self.weight, beta=0.0, alpha=0.25)
        return torch.softmax(scores, -1)


def test_an_input_times_zero_is_not_read() -> None:
    handle = compare(ScoresInPlaceOfScratch)
    assert actions(handle) == {"/_softmax.0": "recompute"}
