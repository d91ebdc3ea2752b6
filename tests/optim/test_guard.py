"""The guard for gradients."""

import logging
import math

import pytest
import torch
from torch import nn

from megatron_adacc.errors import UserError
from megatron_adacc.optim.guard import GradientGuard


def parameters(*norms: float) -> list[nn.Parameter]:
    """One parameter for each norm, with a gradient of it, and one without a gradient."""
    made = [nn.Parameter(torch.zeros(4)) for _ in norms]
    for parameter, norm in zip(made, norms, strict=True):
        parameter.grad = torch.full((4,), norm / 2)
    return [*made, nn.Parameter(torch.zeros(2))]


def taught(rule: str = "clip", norm: float = 5.0, loss: float | None = 2.0) -> GradientGuard:
    """A guard that has seen 40 steps of one norm, 0.6 and 0.8 of it in two parameters."""
    guard = GradientGuard(rule)
    for _ in range(40):
        assert guard.check(parameters(0.6 * norm, 0.8 * norm), loss) is None
    return guard


def norm_of(params: list[nn.Parameter]) -> float:
    return math.hypot(*(float(p.grad.norm()) for p in params if p.grad is not None))


def test_a_norm_above_the_band_is_clipped_to_its_edge(caplog):
    guard, params = taught(), parameters(60.0, 80.0)
    with caplog.at_level(logging.WARNING):
        event = guard.check(params, 2.0)
    edge = 5.0 * 1.1**3  # the norm never moved, so the band has its least width
    assert event is not None
    assert event.reason == "norm"
    assert event.norm == pytest.approx(100.0)
    assert event.edge == pytest.approx(edge)
    assert norm_of(params) == pytest.approx(edge)
    assert "the norm stands out; gradients scaled by 0.06655 (clip)" in caplog.text


def test_the_recipe_scales_by_32_over_the_largest_norm(caplog):
    params = parameters(60.0, 80.0)
    event = taught("recipe").check(params, 2.0)
    assert event is not None
    assert event.factor == 2**5 / 80.0
    assert float(params[1].grad.norm()) == pytest.approx(32.0)


def test_the_recipe_does_not_enlarge_gradients():
    params = parameters(12.0, 16.0)
    event = taught("recipe").check(params, 2.0)
    assert event is not None
    assert event.factor == 1.0
    assert norm_of(params) == pytest.approx(20.0)


@pytest.mark.parametrize(("loss", "stands_out"), [(2.29, False), (2.31, True)])
def test_a_loss_jump_over_15_percent_triggers_it(loss, stands_out):
    params = parameters(3.6, 4.8)  # norm 6, within the band
    event = taught().check(params, loss)
    assert (event is not None) == stands_out
    assert norm_of(params) == pytest.approx(5.0 if stands_out else 6.0)
    if event is not None:
        assert event.reason == "loss"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_left_to_the_caller(value):
    guard = taught()
    before = guard.state_dict()
    params = parameters(3.0, 4.0)
    params[0].grad[1] = value
    event = guard.check(params, 2.0)
    assert event is not None
    assert (event.reason, event.factor) == ("not finite", 1.0)
    assert float(params[1].grad.norm()) == pytest.approx(4.0)
    assert guard.state_dict() == before


def test_it_learns_before_it_acts_and_accepts_a_lasting_change():
    guard = GradientGuard(warmup_steps=10)
    assert [guard.check(parameters(10.0**step)) for step in range(10)] == [None] * 10
    guard = taught()
    acted = [guard.check(parameters(18.0, 24.0)) is not None for _ in range(60)]
    assert acted[0]
    assert not any(acted[-10:])


def test_steps_without_gradients_say_nothing():
    guard = taught()
    before = guard.state_dict()
    assert guard.check(parameters()) is None
    assert guard.check(parameters(0.0)) is None
    assert guard.state_dict() == before


def test_a_resumed_guard_goes_on():
    guard, other = taught(), GradientGuard()
    other.load_state_dict(guard.state_dict())
    assert guard.check(parameters(60.0), 9.0) == other.check(parameters(60.0), 9.0)


def test_wrong_options_are_refused():
    with pytest.raises(UserError, match="'clip' or 'recipe'"):
        GradientGuard("skip")
    with pytest.raises(UserError, match="width above 0"):
        GradientGuard(width=0.0)
