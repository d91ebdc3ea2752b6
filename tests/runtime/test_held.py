"""Bytes held for backward, against figures by hand and against a count made with saved-tensor hooks."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_adacc.errors import UserError
from megatron_adacc.runtime.held import HeldMeter

RNG_STATE_BYTES = 5056  # torch.get_rng_state() of the CPU generator


class Stack(nn.Module):
    """Layers one after the other, each run through `run(layer, hidden)`."""

    def __init__(self, layers: list[nn.Module], run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.run = run

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = self.run(layer, hidden)
        return hidden


def plainly(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden)


def named(stack: Stack) -> dict[str, nn.Module]:
    return {f"layer{index}": layer for index, layer in enumerate(stack.layers)}


class Doubled(torch.autograd.Function):
    """Keeps its result, and a hundred floats."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x + x
        ctx.save_for_backward(result)
        ctx.floats = torch.ones(100)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + grad


class TestAgainstHandAndHooks:
    def test_mlp(self, held: Callable, hooked_bytes: Callable) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        x = torch.randn(3, 8)
        result = held(lambda: model(x).sum(), model, first=model[0], gelu=model[1], second=model[2])
        # Linear keeps its input, GELU its input: 3*8, 3*16 and 3*16 floats of four bytes.
        assert result.layer_bytes == {"first": 96, "gelu": 192, "second": 192}
        assert (result.outside_bytes, result.other_device_bytes, result.unread_nodes) == (0, 0, ())
        assert result.total_bytes == hooked_bytes(lambda: model(x).sum(), model) == 480

    def test_a_storage_of_two_layers_is_counted_for_the_first(self, held: Callable) -> None:
        model = nn.Sequential(nn.ReLU(), nn.Linear(16, 4))
        x = torch.randn(3, 16, requires_grad=True)
        result = held(lambda: model(x), model, relu=model[0], linear=model[1])
        assert result.layer_bytes == {"relu": 192, "linear": 0}

    @pytest.mark.parametrize("attention", ["math", "fused"])
    def test_transformer_layer_with_dropout(
        self, held: Callable, hooked_bytes: Callable, node_kinds: Callable, attention: str
    ) -> None:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True).train()
        x = torch.randn(2, 16, 32)
        if attention == "fused":
            layer.self_attn.dropout = 0.0
        result = held(lambda: layer(x), layer, layer=layer)
        kinds = node_kinds(layer(x))
        assert ("ScaledDotProductFlashAttentionForCpuBackward0" in kinds) is (attention == "fused")
        assert result.total_bytes == hooked_bytes(lambda: layer(x), layer) > 0
        assert result.outside_bytes == 0

    def test_parameters_buffers_and_gradients_are_not_counted(self, held: Callable, hooked_bytes: Callable) -> None:
        model = nn.BatchNorm1d(4)
        x = torch.randn(3, 4)
        result = held(lambda: model(x), model, norm=model)
        # The input, and mean and inverse deviation of the batch; weight and running statistics are not.
        assert result.total_bytes == hooked_bytes(lambda: model(x), model) == 4 * (12 + 4 + 4)

        class KeepsMainGrad(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
                ctx.main_grad, ctx.grad = weight.main_grad, weight.grad
                return weight * 1

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad

        linear = nn.Linear(4, 4, bias=False)
        linear.weight.main_grad = torch.zeros(100)[:16].view(4, 4)
        linear.weight.grad = torch.zeros(4, 4)
        assert held(lambda: KeepsMainGrad.apply(linear.weight), linear).total_bytes == 0

    def test_all_parameters_in_one_storage(self, held: Callable) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        flat = torch.randn(144)
        start = 0
        for parameter in model.parameters():
            parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        x = torch.randn(2, 8)
        assert held(lambda: model(x), model, a=model[0], b=model[1]).layer_bytes == {"a": 64, "b": 64}


class TestCheckpoint:
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_full_recompute_holds_the_layer_inputs(
        self, held: Callable, hooked_bytes: Callable, use_reentrant: bool
    ) -> None:
        run = functools.partial(_checkpointed, use_reentrant=use_reentrant, preserve_rng_state=False)
        stack = Stack([nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)], run)
        x = torch.randn(5, 8, requires_grad=True)
        result = held(lambda: stack(x), stack, **named(stack))
        assert result.layer_bytes == {"layer0": 160, "layer1": 160, "layer2": 160}
        assert result.total_bytes == hooked_bytes(lambda: stack(x), stack) == 480

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_the_stored_rng_state_is_counted(self, held: Callable, hooked_bytes: Callable, use_reentrant: bool) -> None:
        run = functools.partial(_checkpointed, use_reentrant=use_reentrant, preserve_rng_state=True)
        stack = Stack([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))], run)
        x = torch.randn(5, 8, requires_grad=True)
        result = held(lambda: stack(x), stack, **named(stack))
        assert result.layer_bytes == {"layer0": 160 + RNG_STATE_BYTES}
        assert result.total_bytes == hooked_bytes(lambda: stack(x), stack) + RNG_STATE_BYTES

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_several_layers_in_one_checkpoint_count_for_the_first(self, held: Callable, use_reentrant: bool) -> None:
        layers = [nn.Linear(8, 8) for _ in range(5)]
        embedding, norm = nn.Linear(8, 8), nn.LayerNorm(8)

        class Grouped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList([embedding, *layers, norm])

            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                hidden = Doubled.apply(embedding(hidden))  # a Python node right before the group
                for group in (layers[:2], layers[2:4]):
                    sequence = nn.Sequential(*group)
                    hidden = checkpoint(sequence, hidden, use_reentrant=use_reentrant, preserve_rng_state=False)
                return norm(layers[4](hidden))

        model = Grouped()
        x = torch.randn(5, 8)
        result = held(lambda: model(x), model, **{f"layer{i}": layer for i, layer in enumerate(layers)})
        assert result.layer_bytes == {"layer0": 0, "layer1": 0, "layer2": 160, "layer3": 0, "layer4": 160}
        # Outside: the embedding's input, what Doubled keeps (its result is the first group's input too),
        # and LayerNorm's input, mean and deviation.
        assert result.outside_bytes == 160 + 400 + 160 + 160 + 20 + 20

    def test_keyword_and_captured_tensors_of_a_checkpoint(self, held: Callable) -> None:
        linear = nn.Linear(8, 8)
        x, shift, scale = torch.randn(5, 8, requires_grad=True), torch.randn(8), torch.randn(5, 1)
        forward = lambda: checkpoint(  # noqa: E731
            lambda y, shift: linear(y) * scale + shift,
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            shift=shift,
        )
        assert held(forward, linear).total_bytes == 160 + 32 + 20

    def test_no_recompute_is_triggered(self) -> None:
        runs: list[int] = []

        def function(y: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return y.exp()

        x = torch.randn(4, requires_grad=True)
        output = checkpoint(function, x.neg(), use_reentrant=False, preserve_rng_state=False)
        with HeldMeter({}, nn.Identity()) as meter:
            assert meter.measure(output).total_bytes == 16
        assert len(runs) == 1
        output.sum().backward()
        assert len(runs) == 2


def _checkpointed(layer: nn.Module, hidden: torch.Tensor, **options: bool) -> torch.Tensor:
    return checkpoint(layer, hidden, **options)


class TestReadOnly:
    def test_training_is_bit_identical(self) -> None:
        def train(measured: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, 0.1) for _ in range(2)])
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            meter = HeldMeter({"0": model[0], "1": model[1]}, model) if measured else None
            losses = []
            for _ in range(3):
                loss = model(torch.randn(4, 3, 16)).square().mean()
                if meter is not None:
                    assert meter.measure(loss).total_bytes > 0
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return [*losses, *model.parameters()]

        assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))

    def test_nothing_is_kept_alive(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        meter = HeldMeter({"linear": model[0]}, model)
        x = torch.randn(3, 8)
        output = model(x)
        assert meter.measure(output).total_bytes == 96 + 96
        weak = StorageWeakRef(x.untyped_storage())
        gc.disable()
        try:
            del output, x
            assert weak.expired()
        finally:
            gc.enable()

    def test_hooks_are_removed(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        meter = HeldMeter({"linear": model[0]}, model)
        assert len(model[0]._forward_pre_hooks) == len(model[0]._forward_hooks) == 1
        meter.close()
        meter.close()
        hooks = [model._forward_pre_hooks, model[0]._forward_pre_hooks, model[0]._forward_hooks]
        assert [len(registered) for registered in hooks] == [0, 0, 0]


class TestForwards:
    def test_evaluation_gives_zero_and_disturbs_nothing(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        x = torch.randn(3, 8)
        with HeldMeter({"linear": model[0], "gelu": model[1]}, model) as meter:
            with torch.no_grad():
                zero = meter.measure(model(x))
                assert (zero.total_bytes, zero.layer_bytes) == (0, {"linear": 0, "gelu": 0})
                for _ in range(3):
                    model(x)
            assert meter.measure(model(x)).layer_bytes == {"linear": 96, "gelu": 96}

    def test_each_micro_batch_by_itself(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        with HeldMeter({"linear": model[0], "gelu": model[1]}, model) as meter:
            in_flight = []
            for rows in (3, 5):
                in_flight.append(model(torch.randn(rows, 8)))
                bytes_each = rows * 8 * 4
                assert meter.measure(in_flight[-1]).layer_bytes == {"linear": bytes_each, "gelu": bytes_each}
            in_flight[0].sum().backward()
            in_flight.append(model(torch.randn(2, 8)))
            assert meter.measure(in_flight[-1]).layer_bytes == {"linear": 64, "gelu": 64}

    def test_pipeline_chunks_in_flight(self) -> None:
        chunks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
        meters = [HeldMeter({"linear": chunk[0], "gelu": chunk[1]}, chunk) for chunk in chunks]
        for rows in (3, 5):  # two micro-batches, none of which has run its backward
            hidden = torch.randn(rows, 8)
            for chunk, meter in zip(chunks, meters, strict=True):
                output = chunk(hidden)
                expected = {"linear": rows * 32, "gelu": rows * 32}
                assert meter.measure(output).layer_bytes == expected
                hidden = output.detach().requires_grad_()  # what the next stage receives

    def test_recompute_in_a_backward_between_forwards(self) -> None:
        run = functools.partial(_checkpointed, use_reentrant=True, preserve_rng_state=False)
        stack = Stack([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)], run)
        with HeldMeter(named(stack), stack) as meter:
            for rows in (3, 5):
                output = stack(torch.randn(rows, 8, requires_grad=True))
                assert meter.measure(output).layer_bytes == {"layer0": rows * 32, "layer1": rows * 32}
                output.sum().backward()

    def test_a_layer_that_runs_twice(self, held: Callable) -> None:
        layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        model = Stack([layer], lambda module, hidden: module(module(hidden)))
        result = held(lambda: model(torch.randn(3, 8)), model, shared=layer)
        assert (result.layer_bytes, result.outside_bytes) == ({"shared": 3 * 96}, 0)

    def test_a_forward_that_raised(self) -> None:
        class Refuses(nn.Module):
            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                if hidden.shape[0] == 7:
                    raise ValueError("seven")
                return hidden.tanh()

        layer = nn.Sequential(nn.Linear(8, 8), Refuses())
        with HeldMeter({"layer": layer}, layer) as meter:
            with pytest.raises(ValueError, match="seven"):
                layer(torch.randn(7, 8))
            assert meter.measure(layer(torch.randn(3, 8))).layer_bytes == {"layer": 192}

    def test_nested_outputs(self) -> None:
        model = nn.Linear(8, 8)
        output = {"loss": (model(torch.randn(3, 8)), None), "other": [model(torch.randn(2, 8)).detach()]}
        with HeldMeter({}, model) as meter:
            assert meter.measure(output).total_bytes == 96


class TestLayersRefused:
    def test_same_module_twice(self) -> None:
        layer = nn.Linear(2, 2)
        with pytest.raises(UserError, match="'a' and 'b' are the same module"):
            HeldMeter({"a": layer, "b": layer}, layer)

    def test_not_in_the_model(self) -> None:
        with pytest.raises(UserError, match="'a' is not part of the model"):
            HeldMeter({"a": nn.Linear(2, 2)}, nn.Linear(2, 2))

    def test_one_inside_another(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        with pytest.raises(UserError, match="'outer' contains the layer 'inner'"):
            HeldMeter({"inner": model[0], "outer": model}, model)


class TestCompiled:
    def test_a_compiled_model_stays_whole(self) -> None:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        x = torch.randn(3, 8)
        with HeldMeter({"linear": model[0]}, model) as meter:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            result = meter.measure(compiled(x))
        assert (result.layer_bytes, result.outside_bytes) == ({"linear": 0}, 96 + 96)

    def test_a_compiled_layer_keeps_its_name(self, held: Callable) -> None:
        torch._dynamo.reset()
        layers = [torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="aot_eager") for _ in range(2)]
        stack = Stack(layers, plainly)
        result = held(lambda: stack(torch.randn(3, 8)), stack, **named(stack))
        assert result.layer_bytes == {"layer0": 192, "layer1": 192}
