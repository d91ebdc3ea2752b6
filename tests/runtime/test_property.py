"""For any layer and any plan of keep and recompute, gradients are those of the plain run, bit for bit."""

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_layer import ROWS, WIDTH, RandomLayer, Recipe, recipes
from torch import Tensor

from megatron_adacc import attach
from megatron_adacc.planner import Compress, Keep, LayerPlan, Plan, Recompute


def run(layer: RandomLayer, seed: int) -> list[Tensor]:
    """Outputs, input gradient, parameter gradients and the state of the random generator."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    torch.manual_seed(seed)
    outputs = [y for y in layer(x) if y is not None]
    loss = sum((y * y).sum() if i == 0 else y.sin().sum() for i, y in enumerate(outputs))
    loss.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros(0) for p in layer.parameters()]
    found = [*(y.detach().clone() for y in outputs), x.grad, *gradients, torch.get_rng_state()]
    layer.zero_grad(set_to_none=True)
    return found


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True)
    )


@settings(
    max_examples=320, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(recipe=recipes, data=st.data())
def test_any_plan_gives_the_gradients_of_the_plain_run(recipe: Recipe, data: st.DataObject) -> None:
    torch.manual_seed(0)
    plain = RandomLayer(recipe)
    layer = copy.deepcopy(plain)
    expected = [run(plain, seed) for seed in range(4)]
    with attach(layer, "recompute", min_bytes=0) as handle:
        for seed in range(3):  # two traced calls, then one without the tracer
            assert equal(run(layer, seed), expected[seed])
            assert handle.stored_bytes() == 0
        full = handle.plan.layers
    if not full:
        return
    actions = [(site, data.draw(st.sampled_from([action, Keep()]), label=site)) for site, action in full[0].actions]
    with attach(layer, Plan((LayerPlan(full[0].fingerprint, tuple(actions)),)), min_bytes=0) as handle:
        for seed in range(4):
            assert equal(run(layer, seed), expected[seed])
            assert handle.stored_bytes() == 0
    assert all(isinstance(action, (Keep, Recompute, Compress)) for _, action in actions)
