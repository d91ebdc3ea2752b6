"""A small stack of layers one of whose channels can be made to grow, for tests of adaptation."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN = 128
ROWS = 64


class Mlp(nn.Module):
    """Pre-norm MLP with dropout, [rows, 128] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.up(self.norm(x)).tanh(), 0.1)


class Stack(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Mlp() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def grow(layer: nn.Module, channel: int, factor: float = 20.0) -> None:
    """The channel of the norm's output grows; what the layer computes stays."""
    with torch.no_grad():
        layer.norm.weight[channel] *= factor  # type: ignore[operator, index, union-attr]
        layer.norm.bias[channel] *= factor  # type: ignore[operator, index, union-attr]
        layer.up.weight[:, channel] /= factor  # type: ignore[operator, index, union-attr]


def train(
    model: nn.Module, steps: range, end: Callable[[Tensor], None], before: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Train on random rows; ``before(step)`` and ``end(loss)`` surround each step. The losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        before(step)
        torch.manual_seed(1000 + step)
        loss = model(torch.randn(ROWS, HIDDEN, requires_grad=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        end(loss.detach())
    return losses
