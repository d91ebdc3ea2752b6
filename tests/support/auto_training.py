"""Small stacks of layers, trained under attach(plan="auto") and beside it without a plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_adacc import attach
from megatron_adacc.runtime.attach import Handle

HIDDEN, TOKENS = 32, 16


class Mlp(nn.Module):
    """[..., HIDDEN] -> the same: norm, linear, GELU, linear, dropout, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Runs its layers one after another. All results stay alive until the next forward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.results: list[Any] = []

    def forward(self, x: Any, *arguments: Any) -> Any:
        self.results = []
        for layer in self.layers:
            x = layer(x, *arguments)
            self.results.append(x)
        return x


def data(seed: int, rows: int = TOKENS) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    loss = model(data(seed)).square().mean()
    assert isinstance(loss, Tensor)
    return loss


def step(
    model: nn.Module, call: Callable[[nn.Module, int], Tensor], seed: int, handle: Handle | None
) -> tuple[list[Tensor | None], int]:
    """Everything that a step leaves behind, and the bytes that are stored when its forward is done."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loss = call(model, seed)
    held = handle.stored_bytes() if handle is not None else 0
    loss.backward()
    numbers = torch.tensor([random.random(), np.random.rand()])
    parameters = [p.grad for p in model.parameters()]
    return [loss.detach(), *parameters, *model.buffers(), torch.get_rng_state(), numbers], held


def compare(
    model: nn.Module, call: Callable[[nn.Module, int], Tensor] = loss_of, limit: str = "40%", steps: int = 4,
    layers: Callable[[Any], Any] = lambda m: m.layers, exact: bool = True,
) -> Handle:  # fmt: skip
    """Train a copy under the plan beside the model: each bit is the same, and the last step's bytes are as planned."""
    for stack in model.modules():
        stack.__dict__.pop("results", None)  # of an earlier comparison; graphs cannot be copied
    attached = copy.deepcopy(model)
    handle = attach(layers(attached), "auto", limit=limit, min_bytes=0)
    held = 0
    for seed in range(steps):
        expected, _ = step(model, call, seed, None)
        found, held = step(attached, call, seed, handle)
        for a, b in zip(expected, found, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)
    for stack in attached.modules():
        stack.__dict__.pop("results", None)  # what no gradient came to is held until then
    assert handle.stored_bytes() == 0
    if exact:
        assert handle.stage is not None
        assert held == handle.stage.predicted.held_bytes <= handle.stage.limit_bytes
    handle.detach()
    assert all("forward" not in layer.__dict__ for layer in layers(attached))
    return handle
