"""A small layer whose ops are timed, and what one traced forward of it leaves behind."""

import torch
from torch import nn
from torch.nn import functional as F

from megatron_adacc.cost.sampling import sample_of


class Layer(nn.Module):
    """[batch, width] -> the same, with dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def layer_sample(width: int = 16, batch: int = 8):
    torch.manual_seed(0)
    return sample_of(Layer(width), torch.randn(batch, width, requires_grad=True))
