"""inf and NaN in activations come out in the gradients, so that a loss scaler skips the step as it would without us."""

import copy
import math

import pytest
import torch
from drifting import HIDDEN, ROWS, Stack

from megatron_adacc import attach


def found_inf(model: Stack, x: torch.Tensor) -> bool:
    """What a loss scaler asks: whether any gradient is not finite."""
    model.zero_grad()
    torch.manual_seed(3)
    model(x).backward()
    return any(not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def planted(where: str, value: float) -> tuple[Stack, torch.Tensor]:
    model = Stack()
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        if where == "input":
            x[5, 7] = value
        elif where == "norm":
            model.layers[0].norm.weight[3] = value
        elif where == "linear":
            model.layers[1].up.weight[3, 4] = value
    return model, x.requires_grad_()


@pytest.mark.parametrize("plan", ["recompute", "compress", "quantize"])
@pytest.mark.parametrize("where", ["nowhere", "input", "norm", "linear"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_a_loss_scaler_sees_what_it_would_see_without_us(plan, where, value):
    model, x = planted(where, value)
    expected = found_inf(copy.deepcopy(model), x.detach().clone().requires_grad_())
    with attach(model.layers, plan, min_bytes=0):
        assert [found_inf(model, x) for _ in range(3)] == [expected] * 3
