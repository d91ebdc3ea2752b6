"""Lossless first, lossy after the warm-up: under auto too, and at once where no lossless plan fits."""

import copy
import json

import pytest
import torch
from drifting import Mlp, Stack, train
from torch import Tensor, nn

from megatron_adacc import enable_memory_optim
from megatron_adacc.adaptive.staged import Staged, codec_of_role
from megatron_adacc.errors import UserError
from megatron_adacc.graph import Role
from megatron_adacc.runtime.policy import CODEC_OF_ROLE, KeepAll, RecomputeAll


class Noisy(Mlp):
    """Saves random numbers, which nothing recomputes: without loss they can only be kept."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + hidden * torch.randn_like(hidden)


def noisy() -> Stack:
    model = Stack()
    model.layers = nn.ModuleList([Noisy(), Noisy()])
    return model


def test_auto_is_lossless_until_the_warm_up_ends():
    budgets: list[float] = []
    settings = {"plan": "auto", "limit": "80%", "error_budget": 0.3, "warmup_steps": 2}
    model = noisy()
    with enable_memory_optim(model, settings) as handle:

        def end(loss: Tensor) -> None:
            policy = handle.attached.policy
            assert isinstance(policy, Staged)
            budgets.append(policy.current.setting.error_budget)  # type: ignore[attr-defined]
            assert handle.stage is not None
            assert policy.lossy or handle.plan.lossless
            handle.step(loss)

        train(model, range(1, 5), end)
        assert handle.attached.traced_forwards == 4
    assert budgets == [0.0, 0.0, 0.3, 0.3]
    assert [decision.step for decision in handle.decisions] == [2]


def test_where_no_lossless_plan_fits_a_lossy_one_comes_at_once():
    model = noisy()
    settings = {"plan": "auto", "limit": "60%", "error_budget": 0.3, "warmup_steps": 100}
    with enable_memory_optim(model, settings) as handle:
        train(model, range(1, 4), handle.step)
        assert handle.stage is not None
        assert not handle.plan.lossless
        assert 0 < handle.stage.error <= 0.3
        assert "lossy: root mean square of the layers' relative gradient errors" in handle.report()
    (decision,) = handle.decisions
    assert str(decision).startswith("step 1: No plan fits into 60 % of the plain activations: the least limit that")
    assert "allow lossy actions. from the next step on the plan is 'auto' and may be lossy; next" in str(decision)


def test_a_lossy_plan_of_auto_goes_on_after_a_restart():
    """With the same plan and lists from the first forward on, whatever the clock says now."""
    settings = {"plan": "auto", "limit": "60%", "error_budget": 0.3, "warmup_steps": 2, "max_interval": 4}
    model = noisy()
    with enable_memory_optim(model, settings) as handle:
        train(model, range(1, 6), handle.step)
        state, weights = handle.state_dict(), copy.deepcopy(model.state_dict())
        whole = train(model, range(6, 11), handle.step)
        plan = handle.plan
    assert not plan.lossless
    other = noisy()
    other.load_state_dict(weights)
    with enable_memory_optim(other, settings) as handle:
        handle.load_state_dict(json.loads(json.dumps(state)))
        assert train(other, range(6, 11), handle.step) == whole
        assert [layer.actions for layer in handle.plan.layers] == [layer.actions for layer in plan.layers]


def test_levels_are_codecs_of_roles():
    assert dict(codec_of_role({"Linear": "outlier_separated", "Attention": "channel_wise"})) == dict(CODEC_OF_ROLE)
    direct = codec_of_role({"Linear": "direct"})
    assert {direct[role] for role in (Role.LINEAR_INPUT, Role.NORM_OUTPUT, Role.RESIDUAL)} == {"group_int4"}
    assert direct[Role.QUERY_KEY_VALUE] == "channel_int4"
    kept = codec_of_role({"Attention": "none"})
    assert set(CODEC_OF_ROLE) - set(kept) == {Role.QUERY_KEY_VALUE, Role.ATTENTION_PROBABILITIES}


class Refusing(KeepAll):
    def begin(self, places: tuple[int, ...]) -> None:
        raise UserError("There is no plan.")


def test_a_refusal_ends_the_first_stage_only():
    staged = Staged(Refusing(), RecomputeAll(1))
    assert (staged.name, staged.generation, staged.lossy, staged.trace_again) == ("keep", 0, False, False)
    staged.begin((0,))
    assert (staged.name, staged.generation, staged.lossy, staged.trace_again) == ("recompute", 1, True, True)
    assert staged.refusal == "There is no plan."
    staged = Staged(RecomputeAll(1), Refusing())
    staged.begin_lossy()
    with pytest.raises(UserError, match="There is no plan"):
        staged.begin((0,))


def test_errors_that_grow_matter_once_they_exceed_the_budget():
    settings = {"plan": "auto", "limit": "60%", "error_budget": 0.9, "warmup_steps": 0, "max_interval": 1}
    model = noisy()
    with enable_memory_optim(model, settings) as handle:
        train(model, range(1, 5), handle.step)
        stage, before = handle.stage, len(handle.decisions)
        assert stage is not None
        auto = handle.policy.auto
        assert auto is not None
        error, site = stage.error, next(iter(handle.monitor.references)).site
        assert auto.solver.error_of(stage, {}) == pytest.approx(error)
        assert error * 1.8 < 0.9

        def grow(factor: float, step: int) -> None:
            """As if all references had been measured when errors were that much smaller."""
            handle.monitor.references = {key: e / factor for key, e in handle.monitor.references.items()}
            train(model, range(step, step + 1), handle.step)

        grow(1.8, 5)
        assert len(handle.decisions) == before
        assert auto.solver.change.errors[site] == pytest.approx(1.8, rel=0.2)
        assert handle.stage is stage
        grow(1.8 * 0.9 / error, 6)
        assert len(handle.decisions) == before + 1
        assert "the plan's error is" in handle.decisions[-1].why[-1]
        assert "above the budget of 0.9" in handle.decisions[-1].why[-1]
        assert handle.stage is not stage
        # The solver was told what the errors have become, and counts them as the check does.
        assert handle.stage.error <= 0.9
        assert auto.solver.error_of(handle.stage, {}) == pytest.approx(handle.stage.error)
