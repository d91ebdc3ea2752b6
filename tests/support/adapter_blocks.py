"""A small network beside whose linear layers adapters are put, for tests of adapters and of their bases."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron_adacc import adapters

ROWS, WIDTH = 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def model(layers=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers)))


def trained_b(network):
    """B as after some training: not zero."""
    generator = torch.Generator().manual_seed(1)
    for module in adapters.adapted_modules(network).values():
        module.lora_b.data.normal_(generator=generator)
    return network
