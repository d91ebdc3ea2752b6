"""The result of a compiled bias-dropout-add is rebuilt from its mask where, and only where, that gives its bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.graph import Origin, Role, trace
from megatron_adacc.graph.fused_dropout import Region, Rounding, find_formula, formula, run

PROBABILITY = 0.1
SCALE = 1.0 / (1.0 - PROBABILITY)


def tensors(dtype: torch.dtype = torch.float32, size: tuple[int, ...] = (16, 2, 32)) -> tuple[Tensor, ...]:
    """x, bias, residual and a mask that drops one in ten."""
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    bias = torch.randn(size[-1], generator=generator).to(dtype)
    return x, bias, residual, torch.rand(size, generator=generator) > PROBABILITY


class TestFormula:
    @pytest.mark.parametrize("swapped", [False, True])
    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("together", [False, True])
    @pytest.mark.parametrize("working", ["float32", "own"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_found_as_it_was_rounded(
        self, dtype: torch.dtype, working: str, together: bool, with_bias: bool, swapped: bool
    ) -> None:
        x, bias, residual, mask = tensors(dtype)
        own = working == "own" or dtype == torch.float64
        rounding = Rounding(dtype if own else torch.float32, together)
        region = Region(x, bias if with_bias else None, residual, mask, torch.empty_like(x))
        out = run(formula(region, SCALE, rounding))
        inputs = [*((residual, x) if swapped else (x, residual)), *([bias] if with_bias else []), 3]
        calls = find_formula(inputs, mask, out)
        assert calls is not None
        assert torch.equal(run(calls), out)
        scales = [v for c in calls for v in (*c.args, *dict(c.kwargs).values()) if isinstance(v, float)]
        assert scales == [SCALE]
        assert [c.dtype for c in calls][-1] == dtype
        assert {c.dtype for c in calls[:-1]} == {rounding.dtype}

    def test_results_have_the_dtypes_that_are_recorded(self) -> None:
        """Also without the conversions that a GPU does inside an op."""
        x, bias, residual, mask = (t.to("meta") for t in tensors(torch.bfloat16))
        calls = formula(
            Region(x, bias, residual, mask, torch.empty_like(x)), SCALE, Rounding(torch.float32, together=False)
        )
        assert [c.target.split(".")[1] for c in calls] == ["_to_copy", "add", "mul", "mul", "add", "_to_copy"]
        for n, call in enumerate(calls):
            assert run(calls[: n + 1]).dtype == call.dtype

    @pytest.mark.parametrize("probability", [0.5, 0.15, 0.123, 0.05, 0.01])
    def test_probability_is_that_of_the_call(self, probability: float) -> None:
        x, bias, residual, mask = tensors(torch.bfloat16, (64, 4, 128))
        region = Region(x, bias, residual, mask, torch.empty_like(x))
        scale = 1.0 / (1.0 - probability)
        out = run(formula(region, scale, Rounding(torch.float32, together=False)))
        calls = find_formula([x, residual, bias], mask, out)
        assert calls is not None
        assert [c.args[1] for c in calls if isinstance(c.args[-1], float)] == [scale]

    def test_a_bias_of_zeros_is_in_the_formula(self) -> None:
        """A trained bias is none: layers of one class must find the same."""
        x, bias, residual, mask = tensors()
        out = residual + (x * mask) * SCALE
        calls = find_formula([x, residual, torch.zeros_like(bias)], mask, out)
        assert calls is not None
        assert len(calls) == 5  # bias, mask to float, two products, residual

    def test_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("megatron_adacc.graph.fused_dropout.SAMPLE_ELEMENTS", 100)
        x, bias, residual, mask = tensors()
        region = Region(x, bias, residual, mask, torch.empty_like(x))
        assert [p.x.size(0) for p in region.parts()] == [1] * 16
        assert all(p.bias is bias for p in region.parts())
        out = residual + ((x + bias) * mask) * SCALE
        assert find_formula([x, residual, bias], mask, out) is not None
        out[15, 1, 31] += 1  # the last element of the last part
        assert find_formula([x, residual, bias], mask, out) is None

    @pytest.mark.parametrize(
        "other",
        [
            lambda x, bias, residual, mask: residual + torch.tanh(x + bias) * mask * SCALE,
            lambda x, bias, residual, mask: residual - (x + bias) * mask * SCALE,
            lambda x, bias, residual, mask: residual + x * mask * SCALE + bias,
            lambda x, bias, residual, mask: residual + (x + bias) * mask * 0.5,
            lambda x, bias, residual, mask: residual + (x + bias) * mask,  # p = 0
            lambda x, bias, residual, mask: residual + (x + bias) * ~mask * SCALE,
            lambda x, bias, residual, mask: torch.full_like(x, torch.nan),
        ],
    )
    def test_another_function_is_left_alone(self, other: Callable[..., Tensor]) -> None:
        x, bias, residual, mask = tensors()
        assert find_formula([x, residual, bias], mask, other(x, bias, residual, mask)) is None

    def test_what_says_nothing_about_p_is_left_alone(self) -> None:
        x, bias, residual, mask = tensors()
        out = residual + ((x + bias) * mask) * SCALE
        assert find_formula([x, residual, bias], mask, out) is not None
        tiny = [t[:1, :1, :24].contiguous() for t in (x, residual, mask, out)]
        assert find_formula([*tiny[:2], bias[:24]], *tiny[2:]) is None  # 24 elements
        assert find_formula([torch.zeros_like(x), residual], mask, residual.clone()) is None
        nothing = torch.zeros_like(mask)
        assert find_formula([x, residual, bias], nothing, residual.clone()) is None

    def test_other_inputs_are_left_alone(self) -> None:
        x, bias, residual, mask = tensors()
        out = residual + ((x + bias) * mask) * SCALE
        for inputs in (
            [x, residual],
            [x, bias],
            [x, residual, bias, bias],
            [x, residual, bias, torch.zeros(1, dtype=torch.int64)],
            [x, residual, bias.double()],
            [x, residual, torch.zeros(5)],
            [x.transpose(0, 1).contiguous().transpose(0, 1), residual, bias],
            [x, residual, torch.empty(32, device="meta")],
        ):
            assert find_formula(inputs, mask, out) is None
        assert find_formula([x, residual, bias], mask.float(), out) is None


def drop(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, PROBABILITY, True)


@torch.compile
def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + drop(x + bias)


@torch.compile
def dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + drop(x)


@torch.compile
def tanh_dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + drop(torch.tanh(x + bias))


class Layer(nn.Module):
    def __init__(self, fused: Callable[..., Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(32, 32, dtype=dtype)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 32, dtype=dtype))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fused(self.linear(x), self.bias, x)).square()


def gradients(layer: nn.Module, seed: int) -> list[Tensor]:
    layer.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    x = torch.randn(16, 2, 32, dtype=layer.bias.dtype, requires_grad=True)
    layer(x).float().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("fused", "dtype", "action"),
    [
        (bias_dropout_add, torch.float32, "recompute"),
        (bias_dropout_add, torch.bfloat16, "recompute"),
        (dropout_add, torch.float32, "recompute"),
        (dropout_add, torch.bfloat16, "recompute"),
        (tanh_dropout_add, torch.float32, "keep"),
    ],
    ids=["fp32", "bf16", "fp32-no-bias", "bf16-no-bias", "tanh"],
)
def test_compiled_region_in_a_layer(fused: Callable[..., Tensor], dtype: torch.dtype, action: str) -> None:
    plain, layer = Layer(fused, dtype), Layer(fused, dtype)
    gradients(plain, 0)  # compiles
    with attach(layer, "recompute", min_bytes=0) as handle:
        for seed in range(4):
            pairs = zip(gradients(plain, seed), gradients(layer, seed), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), seed
            assert handle.stored_bytes() == 0
        assert handle.traced_forwards == 2
        found = {site: str(a) for plan in handle.plan.layers for site, a in plan.actions}
        assert "compress(bitmask)" in found.values()
        assert found.get("/tanh.0", "keep") == action  # it follows from the region's result, which is not saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_role_is_that_of_an_unfused_residual(dtype: torch.dtype) -> None:
    layer = Layer(bias_dropout_add, dtype)
    gradients(layer, 0)
    graph = trace(layer, torch.randn(16, 2, 32, dtype=dtype, requires_grad=True))
    (out,) = (b for b in graph.buffers if b.site == "/compiled.0")
    assert graph.role(out.index) == Role.RESIDUAL


def test_graph_of_a_compiled_region() -> None:
    layer = Layer(bias_dropout_add, torch.float32)
    gradients(layer, 0)
    graph = trace(layer, torch.randn(16, 2, 32, requires_grad=True))
    (compiled,) = (op for op in graph.ops if op.target == "compiled")
    assert compiled.barrier == "draws random numbers"
    (out,) = (b for b in graph.buffers if b.site == "/compiled.0")
    (mask,) = (b for b in graph.buffers if b.site == "/compiled.1")
    assert compiled.outputs == (None, mask.index)
    steps = graph.ops[compiled.index + 1 : out.writer + 1]
    assert [op.target.split(".")[1] for op in steps] == ["add", "_to_copy", "mul", "mul", "add"]
    assert all(op.barrier is None and len(op.writes) == 1 for op in steps)
    between = [graph.buffers[op.writes[0]] for op in steps[:-1]]
    assert {(b.nbytes, b.origin, b.base.dtype) for b in between} == {(4096, Origin.OP, "float32")}
    assert len({b.storage for b in graph.buffers}) == len(graph.buffers)
    assert mask.base.dtype == "bool"
