"""handle.gradient_errors(): what a plan costs in gradients, by parameter."""

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.errors import UserError


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    """benchmarks/engine.py, whose stack the figures are about."""
    path = Path(__file__).parents[2] / "benchmarks" / "engine.py"
    spec = importlib.util.spec_from_file_location("engine_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def gpt(engine: ModuleType, hidden: int = 64, heads: int = 4, sequence: int = 64) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(engine.GptLayer(hidden, heads, sequence, 0.1) for _ in range(2))


def loss_of(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().mean()


class TestGradientErrors:
    def test_a_lossless_plan_has_none(self, engine: ModuleType) -> None:
        layers, x = gpt(engine), torch.randn(2, 64, 64)
        with attach(layers, "recompute") as handle:
            for _ in range(2):
                errors = handle.gradient_errors(lambda: loss_of(layers, x))
        assert list(errors) == [f"{i}.{name}" for i in (0, 1) for name, _ in layers[i].named_parameters()]
        assert set(errors.values()) == {0.0}

    def test_they_are_what_two_runs_differ_by(self, engine: ModuleType) -> None:
        layers, x = gpt(engine), torch.randn(2, 64, 64)
        plain = copy.deepcopy(layers)
        handle = attach(layers, "compress")
        for _ in range(2):
            loss_of(layers, x).backward()
        torch.manual_seed(5)
        measured = handle.gradient_errors(lambda: loss_of(layers, x))
        for stack in (layers, plain):
            stack.zero_grad()
            torch.manual_seed(5)
            loss_of(stack, x).backward()
        expected = {}
        for place in (0, 1):
            for (name, p), q in zip(layers[place].named_parameters(), plain[place].parameters(), strict=True):
                difference = (p.grad.double() - q.grad.double()).norm()
                expected[f"{place}.{name}"] = float(difference / q.grad.double().norm())
        assert measured == expected
        # The last bias is reached without any activation; before it all but that are inexact.
        assert measured["1.down.bias"] == 0.0
        assert 0.001 < measured["0.qkv.weight"] < 0.5
        assert 0.001 < max(measured.values()) < 0.5

    def test_training_is_not_disturbed(self, engine: ModuleType) -> None:
        layers, x = gpt(engine), torch.randn(2, 64, 64)
        handle = attach(layers, "compress")
        loss_of(layers, x).backward()
        before = [p.grad.clone() for p in layers.parameters()]
        torch.manual_seed(3)
        state = torch.get_rng_state()
        handle.gradient_errors(lambda: loss_of(layers, x))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(p.grad, g) for p, g in zip(layers.parameters(), before, strict=True))
        assert handle.stored_bytes() == 0
        assert "forward" in layers[0].__dict__

    def test_the_report_shows_them_once_measured(self, engine: ModuleType) -> None:
        layers, x = gpt(engine), torch.randn(2, 64, 64)
        handle = attach(layers, "compress")
        loss_of(layers, x).backward()
        assert "gradient errors" not in handle.report()
        errors = handle.gradient_errors(lambda: loss_of(layers, x))
        table = handle.report().split("\n\n")[-1].splitlines()
        worst = max(errors, key=lambda name: errors[name])
        assert table[0].endswith(f"largest {errors[worst]:.3g} ({worst})")
        assert table[1].split() == ["parameter", "error"]
        assert [row.split()[0] for row in table[3:]] == list(errors)
        assert [float(row.split()[1]) for row in table[3:]] == pytest.approx(list(errors.values()), rel=0.01)

    def test_it_stays_attached_when_the_loss_raises(self, engine: ModuleType) -> None:
        layers, x = gpt(engine), torch.randn(2, 64, 64)
        handle = attach(layers, "compress")
        calls = []

        def loss() -> Tensor:
            calls.append(0)
            if len(calls) == 2:
                raise KeyError("mine")
            return loss_of(layers, x)

        with pytest.raises(KeyError, match="mine"):
            handle.gradient_errors(loss)
        assert all("forward" in layer.__dict__ for layer in layers)

    def test_after_detach_there_is_nothing_to_differ(self, engine: ModuleType) -> None:
        layers, x = gpt(engine), torch.randn(2, 64, 64)
        handle = attach(layers, "compress")
        loss_of(layers, x).backward()
        handle.detach()
        assert set(handle.gradient_errors(lambda: loss_of(layers, x)).values()) == {0.0}
        assert all("forward" not in layer.__dict__ for layer in layers)

    @pytest.mark.parametrize(
        ("loss", "sentence"),
        [
            (lambda layers, x: None, "it returned a NoneType"),
            (lambda layers, x: layers[0](x), r"it returned a tensor of shape \(2, 64, 64\), requires_grad=True"),
            (lambda layers, x: loss_of(layers, x).detach(), r"shape \(\), requires_grad=False"),
            (lambda layers, x: x.clone().requires_grad_().sum(), "does not depend on any parameter"),
        ],
    )
    def test_what_is_no_loss_is_refused(self, engine: ModuleType, loss: object, sentence: str) -> None:
        layers, x = gpt(engine), torch.randn(2, 64, 64)
        handle = attach(layers, "compress")
        with pytest.raises(UserError, match=sentence):
            handle.gradient_errors(lambda: loss(layers, x))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("plan", "most_held", "most_error"),
    [("recompute", 0.032, 0.0), ("compress", 0.107, 0.12), ("quantize", 0.11, 0.17)],
)
def test_held_bytes_and_errors_of_the_two_layer_stack(
    engine: ModuleType, plan: str, most_held: float, most_error: float
) -> None:
    """Hidden 512, 8 heads, sequence 512, fp32, dropout 0.1. With batch 1: every buffer scales with the batch."""
    layers, x = gpt(engine, 512, 8, 512), torch.randn(1, 512, 512, requires_grad=True)
    with attach(layers, plan) as handle:
        for _ in range(2):
            errors = handle.gradient_errors(lambda: loss_of(layers, x))
        loss = loss_of(layers, x)
        (graph,) = handle.graphs
        assert handle.stored_bytes() <= most_held * 2 * graph.activation_bytes
        del loss
    assert max(errors.values()) <= most_error
    if plan != "recompute":
        assert max(errors.values()) > 0.001
