"""The rules of the stash: errors as autograd's, nothing leaks, any order of reading."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.runtime.errors import ModifiedTensorError


class Block(nn.Module):
    """norm, linear, GELU, linear, dropout, residual."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def settled(layer: nn.Module, plan: object = "recompute", shape: tuple[int, ...] = (4, 16)):
    """The layer attached, its key traced twice, so that the next call runs without the tracer."""
    handle = attach(layer, plan, min_bytes=0)
    for _ in range(2):
        y = layer(torch.randn(shape, requires_grad=True))
        torch.autograd.grad((y[0] if isinstance(y, tuple) else y).sum(), list(layer.parameters()), allow_unused=True)
    assert handle.traced_forwards == 2
    return handle


class Function(nn.Module):
    """A layer that is one Python function, with a parameter so that there is something to attach to."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + self.weight


@pytest.mark.parametrize("plan", ["keep", "recompute"])
@pytest.mark.parametrize("calls_before", [0, 1, 2])
class TestInPlace:
    """y = exp(x) saves y. A write to y after that must raise, a write to a copy must not."""

    def attached(self, plan: str, calls_before: int, function: Callable[[Tensor], Tensor]) -> nn.Module:
        layer = Function(function)
        attach(layer, plan, min_bytes=0)
        for _ in range(calls_before):
            layer(torch.ones(3, requires_grad=True))
        return layer

    def test_write_inside_the_layer_raises(self, plan: str, calls_before: int) -> None:
        layer = self.attached(plan, calls_before, lambda x: x.exp().add_(1))
        y = layer(torch.ones(3, requires_grad=True))
        with pytest.raises(ModifiedTensorError, match=r"modified by an inplace operation.*exp.*expected version 0"):
            y.sum().backward()

    def test_write_outside_the_layer_raises(self, plan: str, calls_before: int) -> None:
        class Exp(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.exp()

        layer = Exp()
        attach(layer, plan, min_bytes=0)
        for _ in range(calls_before):
            layer(torch.ones(3, requires_grad=True))
        y = layer(torch.ones(3, requires_grad=True))
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_write_to_a_copy_is_right(self, plan: str, calls_before: int) -> None:
        layer = self.attached(plan, calls_before, lambda x: x.exp().clone().add_(1))
        x = torch.ones(3, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx([2.71828] * 3, abs=1e-5)


class TestLifetime:
    def test_dropped_graph_frees_everything(self) -> None:
        layer = Block()
        handle = settled(layer)
        x = torch.randn(4, 16, requires_grad=True)
        y = layer(x)
        # The input (4 x 16 floats) and the mask: 64 elements in 8 bytes and two float values.
        assert handle.stored_bytes() == 4 * 16 * 4 + 8 + 8
        watched = weakref.ref(x)
        del x, y
        assert watched() is None
        assert handle.stored_bytes() == 0

    @pytest.mark.parametrize("plan", ["keep", "recompute"])
    def test_traced_calls_free_everything_too(self, plan: str) -> None:
        layer = Block()
        handle = attach(layer, plan, min_bytes=0)
        for _ in range(3):
            y = layer(torch.randn(4, 16, requires_grad=True))
            assert handle.stored_bytes() > 0
            del y
            assert handle.stored_bytes() == 0

    def test_no_reference_cycle(self) -> None:
        gc.collect()
        gc.disable()
        try:
            layer = Block()
            handle = settled(layer)
            for _ in range(3):
                layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
                assert handle.stored_bytes() == 0
            # Also not while tracing, when the arguments carry a graph of their own.
            layers = [Block(), Block()]
            with attach(layers, "recompute", min_bytes=0) as traced:
                for _ in range(3):
                    y = layers[1](layers[0](torch.randn(4, 16, requires_grad=True)))
                    assert traced.stored_bytes() > 0
                    del y
                    assert traced.stored_bytes() == 0
        finally:
            gc.enable()

    def test_exception_in_the_forward_leaves_nothing(self) -> None:
        class Failing(Block):
            fails = False

            def forward(self, x: Tensor) -> Tensor:
                y = super().forward(x)
                if self.fails:
                    raise ValueError("planned")
                return y

        layer = Failing()
        handle = settled(layer)
        Failing.fails = True
        with pytest.raises(ValueError, match="planned"):
            layer(torch.randn(4, 16, requires_grad=True))
        assert handle.stored_bytes() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        Failing.fails = False
        layer(torch.randn(4, 16, requires_grad=True)).sum().backward()

    def test_nothing_is_stored_without_gradients(self) -> None:
        layer = Block()
        handle = settled(layer)
        with torch.no_grad():
            layer(torch.randn(4, 16))
        assert handle.stored_bytes() == 0
        assert handle.traced_forwards == 2

    def test_output_data_may_be_replaced(self) -> None:
        """Pipeline schedules put an empty tensor in the place of an output that was sent on."""
        plain, layer = Block(0.0), Block(0.0)
        layer.load_state_dict(plain.state_dict())
        settled(layer)
        x = torch.randn(4, 16)
        gradients = []
        for module in (plain, layer):
            a = x.clone().requires_grad_()
            y = module(a)
            y.data = torch.empty(1)
            # As the schedules do: Python's backward() would complain about the shape.
            torch.autograd.Variable._execution_engine.run_backward(
                (y,), (torch.ones(4, 16),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            gradients.append(a.grad)
        assert torch.equal(*gradients)

    def test_many_micro_batches_in_flight(self) -> None:
        plain, layer = Block(0.0), Block(0.0)
        layer.load_state_dict(plain.state_dict())
        handle = settled(layer)
        inputs = [torch.randn(4, 16, requires_grad=True) for _ in range(8)]
        outputs = [layer(x) for x in inputs]
        assert handle.stored_bytes() == 8 * 4 * 16 * 4
        for y in (outputs[i] for i in (3, 0, 7, 1, 2, 6, 5, 4)):
            y.sum().backward()
        for x in inputs:
            expected = x.detach().clone().requires_grad_()
            plain(expected).sum().backward()
            assert torch.equal(x.grad, expected.grad)


class TestReading:
    def both(self, dropout: float = 0.1) -> tuple[Block, Block]:
        plain = Block(dropout)
        layer = copy.deepcopy(plain)
        settled(layer)
        return plain, layer

    def gradients(self, module: nn.Module, use: Callable[[Tensor, Tensor], None]) -> list[Tensor]:
        module.zero_grad()
        torch.manual_seed(5)
        x = torch.randn(4, 16, requires_grad=True)
        use(x, module(x))
        return [x.grad, *(p.grad for p in module.parameters())]

    def same(self, use: Callable[[Tensor, Tensor], None]) -> None:
        plain, layer = self.both()
        for a, b in zip(self.gradients(plain, use), self.gradients(layer, use), strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)

    def test_retain_graph(self) -> None:
        def use(x: Tensor, y: Tensor) -> None:
            y.sum().backward(retain_graph=True)
            y.square().sum().backward(retain_graph=True)
            y.sin().sum().backward()

        self.same(use)

    def test_grad_on_part_of_the_graph(self) -> None:
        def use(x: Tensor, y: Tensor) -> None:
            (x.grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            y.cos().sum().backward()

        self.same(use)

    def test_backward_in_another_thread(self) -> None:
        def use(x: Tensor, y: Tensor) -> None:
            thread = threading.Thread(target=lambda: y.sum().backward())
            thread.start()
            thread.join()

        self.same(use)

    def test_double_backward_is_exact_without_loss(self) -> None:
        def use(x: Tensor, y: Tensor) -> None:
            (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            g.square().sum().backward()

        self.same(use)

    def test_backward_under_autocast_is_not_cast(self) -> None:
        """Recipes were traced without autocast; a caller's autocast around backward must not reach them."""

        def use(x: Tensor, y: Tensor) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y.sum().backward()

        self.same(use)

    def test_saved_tensors_read_twice_by_one_node(self) -> None:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x.square()

            @staticmethod
            def backward(ctx, g: Tensor) -> Tensor:
                first, second = ctx.saved_tensors[0], ctx.saved_tensors[0]
                return g * (first + second)

        class Layer(Block):
            def forward(self, x: Tensor) -> Tensor:
                return self.down(Twice.apply(self.up(self.norm(x))))

        plain = Layer()
        layer = copy.deepcopy(plain)
        handle = settled(layer)
        use: Callable[[Tensor, Tensor], None] = lambda x, y: y.sum().backward()  # noqa: E731
        for a, b in zip(self.gradients(plain, use), self.gradients(layer, use), strict=True):
            assert torch.equal(a, b)
        assert handle.stored_bytes() == 0

    def test_hooks_on_tensors_and_modules(self) -> None:
        plain, layer = self.both(0.0)
        calls: dict[nn.Module, list[str]] = {plain: [], layer: []}
        for module, seen in calls.items():
            module.register_forward_hook(lambda m, a, y, seen=seen: seen.append("forward"))
            module.up.register_forward_pre_hook(lambda m, a, seen=seen: seen.append("pre"))
            module.down.register_full_backward_hook(lambda m, gi, go, seen=seen: seen.append("backward"))
            module.up.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("grad"))

        def use(x: Tensor, y: Tensor) -> None:
            y.register_hook(lambda g: g * 2)
            y.sum().backward()

        # Hooks on submodules change the program, so the layer is traced again, twice; then it is settled.
        for _ in range(3):
            for seen in calls.values():
                seen.clear()
            a, b = self.gradients(plain, use), self.gradients(layer, use)
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
            assert calls[plain] == calls[layer] == ["pre", "forward", "backward", "grad"]

    def test_checkpoint_inside_the_layer(self) -> None:
        class Layer(Block):
            def forward(self, x: Tensor) -> Tensor:
                inner = torch.utils.checkpoint.checkpoint(
                    lambda h: self.up(self.norm(h)).tanh(), x, use_reentrant=False
                )
                return x + self.dropout(self.down(inner))

        plain = Layer()
        layer = copy.deepcopy(plain)
        settled(layer)
        use: Callable[[Tensor, Tensor], None] = lambda x, y: y.sum().backward()  # noqa: E731
        for a, b in zip(self.gradients(plain, use), self.gradients(layer, use), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint_around_the_layer(self, reentrant: bool) -> None:
        plain, layer = self.both()
        found = []
        for module in (plain, layer):
            module.zero_grad()
            torch.manual_seed(5)
            x = torch.randn(4, 16, requires_grad=True)
            y = torch.utils.checkpoint.checkpoint(lambda h, m=module: m(h.sin()), x, use_reentrant=reentrant)
            y.sum().backward()
            found.append([x.grad, *(p.grad for p in module.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
