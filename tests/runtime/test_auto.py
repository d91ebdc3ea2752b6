"""attach(plan="auto"): not a bit of the training changes, bytes are as predicted and within the limit."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from auto_training import HIDDEN, Mlp, Stack, compare, data, loss_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_layer import ROWS, WIDTH, RandomLayer, Recipe, recipes
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.cost import measured
from megatron_adacc.cost.live_bytes import LiveBytes
from megatron_adacc.cost.prices import CodecPrice
from megatron_adacc.errors import UserError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prices on disk; those of codecs made up, because to time one takes 64 MiB."""
    monkeypatch.setenv("ADACC_CACHE_DIR", "off")
    monkeypatch.setattr(measured, "time_codec", lambda *_: CodecPrice(1.0, 1.0))
    torch.manual_seed(0)


@settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(recipe=recipes, percent=st.integers(0, 100))
def test_random_layers(recipe: Recipe, percent: int) -> None:
    """At a limit that has no plan, the least one that the error names has, and one below it has none."""
    torch.manual_seed(0)
    model = Stack(*(RandomLayer(recipe) for _ in range(3)))

    def call(model: nn.Module, seed: int) -> Tensor:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        results = []
        for layer in model.layers:  # type: ignore[union-attr]
            results.append(layer(x))
            x = results[-1][0] * 1.0
        model.results = results  # type: ignore[assignment]
        return sum((t.float().sin().sum() for r in results for t in r if t is not None), x.sum() * 0)

    refusal = ""
    try:
        compare(model, call, f"{percent}%")
    except UserError as error:
        refusal = str(error)
    if refusal:
        found = re.search(r"works is ([0-9.]+)% \(([0-9,]+) bytes\)", refusal)
        assert found is not None, refusal
        least = float(found[1])
        assert percent < least <= 100
        compare(model, call, f"{least}%")
        if least >= 0.02:
            with pytest.raises(UserError, match="the least limit that works"):
                compare(model, call, f"{least - 0.01:.2f}%")


def test_a_first_layer_without_an_input_gradient_is_planned_by_its_own_graph() -> None:
    handle = compare(Stack(Mlp(), Mlp(), Mlp()))
    assert handle.stage is not None
    assert [fact.places for fact in handle.stage.facts] == [(0,), (1, 2)]


def test_layers_of_two_kinds_in_turn() -> None:
    others = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(2)]
    handle = compare(Stack(Mlp(), others[0], Mlp(), others[1]))
    assert handle.stage is not None
    assert [fact.places for fact in handle.stage.facts] == [(0,), (1, 3), (2,)]


def test_frozen_layers() -> None:
    model = Stack(Mlp(), Mlp(), Mlp())
    model.layers[0].requires_grad_(False)
    compare(model)


def test_longer_and_shorter_calls() -> None:
    """A longer one is solved for, a shorter one fits into the plan."""
    limits = []
    for rows in ([16] * 3, [16] * 3 + [32] * 3, [32] * 3 + [8] * 3):
        handle = compare(
            Stack(Mlp(), Mlp()), lambda m, s, rows=rows: m(data(s, rows[s])).square().mean(), steps=len(rows),
            exact=rows[-1] != 8,
        )  # fmt: skip
        assert handle.stage is not None
        limits.append(handle.stage.limit_bytes)
    assert limits == [limits[0], 2 * limits[0], 2 * limits[0]]
    short = handle._forwards[1].cache.traces()[-1]
    assert short.graph is not None
    assert short.graph.inputs[0].size[0] == 8
    assert "recompute" in {str(action) for _, action in short.by_layer[1].plan.actions}


def test_a_layer_that_never_runs_and_one_that_never_does_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Restless(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.calls = [0]

        def forward(self, x: Tensor) -> Tensor:
            self.calls[0] += 1
            for _ in range(self.calls[0] % 5):
                x = x.sin()
            return super().forward(x)

    class Idle(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.shape[0] else super().forward(x)

    class Passed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Mlp(), Restless(), Idle()])

        def forward(self, x: Tensor) -> Tensor:
            result = self.layers[1](self.layers[0](x))
            assert isinstance(result, Tensor)
            return result

    handle = compare(Passed(), steps=7, exact=False)
    assert handle.stage is not None
    assert [fact.places for fact in handle.stage.facts] == [(0,)]
    assert "made without layers [1, 2]" in caplog.text


def test_running_statistics() -> None:
    """Batch norm writes its statistics in place; they are saved beside its results."""
    make = lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.GELU())  # noqa: E731
    compare(Stack(make(), make()), limit="95%")


def test_hooks_and_main_gradients_are_left_alone() -> None:
    model, calls = Stack(Mlp(), Mlp()), []
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.register_hook(lambda gradient: calls.append(1))
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(2))
    with attach(model.layers, "auto", limit="40%", min_bytes=0):
        for seed in range(3):
            before = [(id(p), p.data_ptr(), p._version) for p in model.parameters()]
            loss = loss_of(model, seed)
            assert not calls
            assert all(p.grad is None for p in model.parameters())
            loss.backward()
            assert len(calls) == 2 * len(before)
            assert before == [(id(p), p.data_ptr(), p._version) for p in model.parameters()]
            assert all(not p.main_grad.any() for p in model.parameters())
            calls.clear()
            model.zero_grad(set_to_none=True)


def test_exceptions_in_the_first_forwards() -> None:
    class Fails(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.broken = [False]

        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            if self.broken[0]:
                raise ArithmeticError
            return result

    def call(model: nn.Module, seed: int) -> Tensor:
        last = model.layers[1]  # type: ignore[index]
        last.broken[0] = True
        with pytest.raises(ArithmeticError):
            model(data(seed))
        last.broken[0] = False
        gc.collect()  # the exception's frames hold what was saved
        torch.manual_seed(seed)
        return loss_of(model, seed)

    compare(Stack(Fails(), Fails()), call, exact=False)


def test_a_limit_that_nothing_fits_is_an_error_each_time() -> None:
    model = Stack(Mlp(), Mlp())
    handle = attach(model.layers, "auto", limit="0%", min_bytes=0)
    loss_of(model, 0)
    for _ in range(2):
        with pytest.raises(UserError, match="No plan fits into 0 % of the plain activations: the least limit"):
            loss_of(model, 0)
    assert handle.stage is None
    handle.detach()
    loss_of(model, 0).backward()


def test_the_least_limit_in_bytes() -> None:
    def solved(limit: str) -> int:
        model = Stack(Mlp(), Mlp())
        with attach(model.layers, "auto", limit=limit, min_bytes=0) as handle:
            for seed in range(2):
                loss_of(model, seed).backward()
            assert handle.stage is not None
            return handle.stage.predicted.peak_bytes

    with pytest.raises(UserError, match="least limit") as raised:
        solved("1B")
    found = re.search(r"works is ([0-9.]+KiB) \(([0-9,]+) bytes\)", str(raised.value))
    assert found is not None
    least = int(found[2].replace(",", ""))
    assert least <= solved(found[1]) <= 1024 * float(found[1].removesuffix("KiB"))
    assert solved(f"{least}B") == least
    with pytest.raises(UserError, match="least limit"):
        solved(f"{least - 1}B")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"plan": "recompute", "limit": "10%"}, "A limit is for the plan 'auto'"),
        ({"plan": "recompute", "error_budget": 0.1}, "An error budget is for the plan 'auto'"),
        ({"plan": "auto", "error_budget": -1.0}, "an error is a number from 0 up"),
        ({"plan": "auto", "error_budget": float("nan")}, "an error is a number from 0 up"),
        ({"plan": "auto", "limit": "25"}, "a unit is missing"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    model = Stack(Mlp())
    with pytest.raises(UserError, match=sentence):
        attach(model.layers, **arguments)
    assert "forward" not in model.layers[0].__dict__


def test_the_first_step_needs_no_more_than_the_plan_and_a_plain_layer() -> None:
    model = Stack(*(Mlp() for _ in range(6)))

    def peak(seed: int) -> int:
        x = data(seed, 512).requires_grad_()
        with LiveBytes([x, *model.parameters()]) as live:
            for layer in model.layers:
                x = layer(x)
            x.square().mean().backward()
        model.zero_grad(set_to_none=True)
        return live.mark().peak

    plain = peak(0)
    with attach(model.layers, "auto", limit="30%", min_bytes=0) as handle:
        first, _, third = (peak(seed) for seed in range(3))
        assert handle.stage is not None
        of_a_layer = handle.stage.facts[0].kept
    assert third < plain
    assert first <= third + max(of_a_layer.forward, of_a_layer.backward)
