"""What each kind of node holds, against figures by hand and against a count made with saved-tensor hooks."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_adacc.runtime.held import HeldMeter


class Exponential(torch.autograd.Function):
    """Holds one tensor by save_for_backward, and others in every kind of container on ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        ctx.plain = torch.ones(10)
        ctx.nested = [(torch.ones(20), 3), {"key": torch.ones(30)}, {"not a tensor"}]
        captured = torch.ones(40)
        ctx.function = lambda y: y + captured
        ctx.partial = functools.partial(torch.add, torch.ones(50), other=torch.ones(60))
        ctx.again = ctx.plain[:5]
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return grad * result


class TestNodes:
    def test_custom_function(self, held: Callable, hooked_bytes: Callable) -> None:
        x = torch.randn(7, requires_grad=True)
        result = held(lambda: Exponential.apply(x), nn.Identity())
        assert result.total_bytes == 4 * (7 + 10 + 20 + 30 + 40 + 50 + 60)
        assert hooked_bytes(lambda: Exponential.apply(x), nn.Identity()) == 4 * 7

    def test_views_of_one_storage_count_once(self, held: Callable, hooked_bytes: Callable) -> None:
        base = torch.randn(3, 4, 5, requires_grad=True).clone()
        forward = lambda: base[0].exp() + (base[1] * base[2].t().t()).sin()  # noqa: E731
        result = held(forward, nn.Identity())
        # exp keeps its result; mul its two views of the 60 elements; sin its argument.
        assert result.total_bytes == hooked_bytes(forward, nn.Identity()) == 4 * (20 + 60 + 20)

    def test_a_small_view_keeps_its_whole_storage(self, held: Callable) -> None:
        x = torch.randn(1000)[:2].requires_grad_()
        assert held(lambda: x.sin(), nn.Identity()).total_bytes == 4000

    def test_in_place(self, held: Callable, hooked_bytes: Callable) -> None:
        x = torch.randn(6, 5, requires_grad=True)

        def forward() -> torch.Tensor:
            hidden = x.neg()
            hidden.sigmoid_()
            return F.dropout(hidden, 0.5, training=True, inplace=True)

        result = held(forward, nn.Identity())
        assert result.total_bytes == hooked_bytes(forward, nn.Identity()) > 0

    def test_a_python_number_is_eight_bytes_that_no_hook_sees(self, held: Callable, hooked_bytes: Callable) -> None:
        x = torch.randn(6, requires_grad=True)
        assert held(lambda: x * 2, nn.Identity()).total_bytes == 8
        assert hooked_bytes(lambda: x * 2, nn.Identity()) == 0

    def test_in_place_on_a_view(self, held: Callable, hooked_bytes: Callable, node_kinds: Callable) -> None:
        x, scale = torch.randn(6, 5, requires_grad=True), torch.randn(5, requires_grad=True)
        mask = torch.ones(6, 5, dtype=torch.bool)

        def forward() -> torch.Tensor:
            hidden = x.neg()
            hidden.view(30)[:5].mul_(scale)
            hidden.view(6, 5).masked_fill_(mask, 0.0)
            return hidden

        # The op's own node hangs on CopySlices: mul_ keeps the scale and, for the scale's gradient, what
        # it overwrote, masked_fill_ the mask.
        result = held(forward, nn.Identity())
        assert node_kinds(forward()) >= {"CopySlices"}
        assert result.total_bytes == hooked_bytes(forward, nn.Identity()) > 0
        assert result.unread_nodes == ()

    def test_list_fields_and_sparse_tensors(self, held: Callable) -> None:
        x = torch.randn(5, 4, requires_grad=True)
        rows, columns = torch.tensor([0, 1]), torch.tensor([1, 2])
        assert held(lambda: x[rows, columns], nn.Identity()).total_bytes == 32
        sparse = torch.eye(5).to_sparse()  # 2 x 5 indices of 8 bytes, 5 values of 4
        dense = torch.randn(5, 2, requires_grad=True)
        assert held(lambda: torch.sparse.mm(sparse, dense), nn.Identity()).total_bytes == 80 + 20
        by_row = torch.sparse_csr_tensor(torch.arange(6), torch.arange(5), torch.ones(5))  # 6 x 8, 5 x 8, 5 x 4
        assert held(lambda: torch.sparse.mm(by_row, dense), nn.Identity()).total_bytes == 48 + 40 + 20


class TestPackedByHooks:
    def test_unpack_is_not_called(self) -> None:
        class Packed:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.codes = tensor.to(torch.int8)

            def stored_storages(self) -> Iterator[torch.UntypedStorage]:
                yield self.codes.untyped_storage()

        def unpack(packed: Packed) -> torch.Tensor:
            raise AssertionError("an unpack hook ran")

        x = torch.randn(12, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(Packed, unpack):
            output = x.exp().sin()
        with HeldMeter({}, nn.Identity()) as meter:
            assert meter.measure(output).total_bytes == 12 + 12

    def test_tensors_in_containers_and_opaque_keys(self) -> None:
        x = torch.randn(12, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            output = x.exp()
        store: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (store.append(tensor), len(store) - 1)[1], lambda key: store[key]
        ):
            keyed = x.exp()
        with HeldMeter({}, nn.Identity()) as meter:
            assert meter.measure(output).total_bytes == 48
            assert meter.measure(keyed).total_bytes == 0  # the key is a number: the store is not looked for

    def test_other_devices_are_apart(self) -> None:
        x = torch.randn(12, requires_grad=True, device="meta")
        model = nn.Linear(12, 12)
        with HeldMeter({}, model) as meter:
            result = meter.measure([x.exp(), model(torch.ones(12))])
        assert (result.total_bytes, result.other_device_bytes) == (48, 48)


class TestGraphs:
    def test_a_modified_tensor_raises_in_backward_and_not_here(self) -> None:
        x = torch.randn(4, requires_grad=True)
        y = x.exp()
        z = y.sin()
        y.detach().add_(1)
        with HeldMeter({}, nn.Identity()) as meter:
            assert meter.measure(z).total_bytes == 16
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    def test_freed_graphs(self) -> None:
        x = torch.randn(4, requires_grad=True)
        shared = Exponential.apply(x)
        indexed = shared[[0, 1]].sin()
        other = shared.cos()
        with HeldMeter({}, nn.Identity()) as meter:
            before = meter.measure([indexed, other]).total_bytes
            # exp's result, which cos keeps too, and its ctx; the index (two of 8 bytes); sin's argument.
            assert before == 16 + 840 + 16 + 8
            indexed.sum().backward()
            # Of the freed part only what forward() put on ctx is left, and cos keeps its argument.
            assert meter.measure([indexed, other]).total_bytes == 840 + 16


class TestCompiledFunction:
    def test_compiled_function(self, held: Callable, hooked_bytes: Callable) -> None:
        torch._dynamo.reset()

        def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.gelu(x @ weight).sin()

        compiled = torch.compile(function, backend="inductor", fullgraph=True)
        weight = nn.Parameter(torch.randn(8, 16))
        holder = nn.ParameterList([weight])
        x = torch.randn(3, 8)
        result = held(lambda: compiled(x, weight), holder)
        # x and its product with the weight; gelu and sin are recomputed in the compiled backward.
        assert result.total_bytes == hooked_bytes(lambda: compiled(x, weight), holder) == 96 + 192

    def test_dynamic_shapes(self, held: Callable, hooked_bytes: Callable) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: (x.exp() * x.shape[0]).sin(), backend="aot_eager", dynamic=True)
        for rows in (3, 5):
            x = torch.randn(rows, 8, requires_grad=True)
            result = held(functools.partial(compiled, x), nn.Identity())
            assert result.total_bytes == hooked_bytes(functools.partial(compiled, x), nn.Identity()) > 0


class TestUnread:
    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_a_cpp_function_is_named(self, held: Callable) -> None:
        @torch.jit.script
        def function(x: torch.Tensor) -> torch.Tensor:
            return (x.exp() * x).sin()

        x = torch.randn(4, requires_grad=True)
        for _ in range(3):  # TorchScript differentiates by itself only what it has profiled
            output = function(x)
        assert type(output.grad_fn).__name__ == "CppFunction"
        result = held(lambda: output.cos(), nn.Identity())
        assert result.total_bytes == 16
        assert result.unread_nodes == (output.grad_fn.name(),)
