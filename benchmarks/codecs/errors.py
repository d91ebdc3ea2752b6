"""Relative squared error of every codec on the kinds of tensors that training keeps: makes docs/codecs.md's table.

    python benchmarks/codecs/errors.py

sum (x - x')**2 / sum x**2 over a [1024, 1024] float32 tensor, seed 0, by the reference implementation. "Planted"
are 8 outlier channels: 50 times larger, or for softmax rows 8 columns whose scores are higher by 6, as the first
positions of a sequence attract attention. The outlier formats get these channels as their list.
"""

import sys

import torch
from torch import Tensor

from megatron_adacc import codecs
from megatron_adacc.codecs import OutlierState

ROWS = CHANNELS = 1024
PLANTED = tuple(range(5, CHANNELS, CHANNELS // 8))

# Column title -> (codec, options).
COLUMNS: dict[str, tuple[str, dict[str, object]]] = {
    "int4 paper": ("group_int4", {"scale": "paper"}),
    "int4 signed": ("group_int4", {}),
    "int4 signed stochastic": ("group_int4", {"rounding": "stochastic"}),
    "outlier int4": ("outlier_int4", {}),
    "channel int4, 128 rows": ("channel_int4", {}),
    "channel int4, all rows": ("channel_int4", {"group_size": ROWS}),
    "affine int4": ("affine_int4", {}),
    "int8 paper": ("group_int8", {"scale": "paper"}),
    "int8 signed": ("group_int8", {}),
    "outlier int8": ("outlier_int8", {}),
    "int2 paper": ("group_int2", {"scale": "paper"}),
    "int2 signed": ("group_int2", {}),
    "outlier int2": ("outlier_int2", {}),
}


def samples() -> dict[str, Tensor]:
    """Name -> tensor [1024, 1024]."""
    torch.manual_seed(0)
    normal = torch.randn(ROWS, CHANNELS)
    laplace = torch.distributions.Laplace(0.0, 1.0).sample((ROWS, CHANNELS))
    gelu = torch.nn.functional.gelu(torch.randn(ROWS, CHANNELS))
    scores = torch.randn(ROWS, CHANNELS)
    causal = torch.ones(ROWS, CHANNELS, dtype=torch.bool).triu(1)
    tensors = {}
    for name, x in {"normal": normal, "Laplace": laplace, "GELU output": gelu}.items():
        planted = x.clone()
        planted[:, PLANTED] *= 50
        tensors |= {name: x, f"{name}, planted": planted}
    attracting = scores.clone()
    attracting[:, PLANTED] += 6
    for name, x in {"softmax rows": scores, "softmax rows, planted": attracting}.items():
        tensors[name] = x.masked_fill(causal, -torch.inf).softmax(-1)
    return tensors


def error(name: str, options: dict[str, object], x: Tensor) -> float:
    """Relative squared error of one codec on one tensor."""
    codec = codecs.get(name, implementation="torch", **options)
    state = OutlierState.from_channels(PLANTED, CHANNELS, "cpu") if name.startswith("outlier") else None
    y = codec.decode(codec.encode(x, state))
    return float(((x - y).double() ** 2).sum() / (x.double() ** 2).sum())


def table() -> str:
    """The table in Markdown: a row a codec, a column a kind of tensor."""
    tensors = samples()
    lines = ["| | " + " | ".join(tensors) + " |", "|---|" + "---:|" * len(tensors)]
    for title, (name, options) in COLUMNS.items():
        cells = [f"{error(name, options, x):.2e}" for x in tensors.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
