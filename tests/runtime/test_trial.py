"""Trials: what a plan adds to a step is found beside the training, which they leave as it was."""

import pytest
import torch
from torch import nn

from megatron_adacc import attach
from megatron_adacc.runtime import auto, trial
from megatron_adacc.runtime.attach import Handle
from megatron_adacc.runtime.traces import LookedAt


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))


def step(model: nn.ModuleList, seed: int = 0) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(2, 16, 32, requires_grad=True)
    for layer in model:
        hidden = layer(hidden)
    hidden.square().mean().backward()


def looked_at(model: nn.ModuleList, handle: Handle) -> LookedAt:
    calls: list[LookedAt] = []
    for cache in handle.caches:
        cache.look = calls.append
    step(model)
    for cache in handle.caches:
        cache.look = None
    return calls[0]


@pytest.mark.parametrize("plan", ["recompute", "compress"])
def test_a_trial_leaves_the_training_as_it_was(plan: str) -> None:
    model = layers()
    handle = attach(model, plan, min_bytes=0)
    for seed in range(3):
        step(model, seed)
    call = looked_at(model, handle)
    program = call.program.apart()
    gradients = [p.grad.clone() for p in model.parameters()]
    state, observed = torch.get_rng_state(), handle.states.observed
    found = trial.tried(program, call.module, call.rehearsal, seconds=0.0)
    assert found.rounds == trial.LEAST_ROUNDS
    assert found.plain_us > 0
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert program.plan == call.program.plan
    assert handle.states.observed == observed
    assert program.states.observed > 0
    assert handle.stored_bytes() == 0


def test_auto_says_what_its_plan_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth more, says the trial of each layer; so does the report of the step."""
    asked = []

    def pretended(program: object, *arguments: object) -> trial.Trial:
        asked.append(program)
        return trial.Trial(plain_us=1000.0, added_us=100.0, rounds=3)

    monkeypatch.setattr(auto, "tried", pretended)
    model = layers()
    handle = attach(model, "auto", limit="30%", min_bytes=0)
    for seed in range(2):
        step(model, seed)
    stage = handle.stage
    assert stage is not None
    assert asked
    assert stage.tried_us == pytest.approx(1.1 * stage.predictions[0].step_us)
    assert f"auto, tried                        {stage.tried_us / 1e3:.1f}".split() == next(
        line.split()[:3] for line in handle.report().splitlines() if line.startswith("auto, tried")
    )
    assert "1.100" in handle.report()
