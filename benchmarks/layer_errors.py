"""Relative gradient errors of a layer with one buffer held lossily, by role and codec.

    python benchmarks/layer_errors.py [--hidden 512] [--sequence 512] [--batch 1] [--table]

For two GPT layers, one after the other (benchmarks/engine.py: unfused attention, GELU, dropout 0.1), and two Llama
layers (RMS norm, rotary embedding, two query heads to a key head, SwiGLU, no dropout), fp32, fresh weights, normal
inputs. An error is that of cost/errors.py: all gradients of the layer as one vector, each tensor scaled to norm 1, for
a random gradient of the output. --table gives the entries of cost/typical_errors.py: the largest over a role's buffers.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time

import torch
from engine import GptLayer
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_adacc.cost.errors import gradient_errors, joint_error, lossy_choices
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.graph import Role, trace, unverified


class LlamaLayer(nn.Module):
    """RMS norm, rotary embedding, grouped queries, SwiGLU: [batch, sequence, hidden] -> the same."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.norm1 = nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden // 2, bias=False)
        self.value = nn.Linear(hidden, hidden // 2, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.RMSNorm(hidden)
        wide = 8 * hidden // 3 // 64 * 64
        self.gate = nn.Linear(hidden, wide, bias=False)
        self.up = nn.Linear(hidden, wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)
        angles = torch.outer(torch.arange(sequence), 10000.0 ** -torch.linspace(0, 1, self.size // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("mask", torch.ones(sequence, sequence, dtype=torch.bool).triu(1))

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        normed = self.norm1(x)
        q, k, v = (
            linear(normed).view(batch, sequence, -1, self.size).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        k, v = (t.repeat_interleave(2, 1) for t in (self._rotated(k), v))
        scores = (self._rotated(q) @ k.transpose(2, 3)) * self.size**-0.5
        context = F.softmax(scores.masked_fill(self.mask, -10000.0), -1) @ v
        x = x + self.projection(context.transpose(1, 2).reshape(batch, sequence, hidden))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("sequence", 512), ("batch", 1), ("heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--table", action="store_true", help="print the entries of cost/typical_errors.py")
    options = parser.parse_args()
    torch.manual_seed(1)
    size = (options.hidden, options.heads, options.sequence)
    stacks = {"GPT": [GptLayer(*size, 0.1) for _ in range(2)], "Llama": [LlamaLayer(*size) for _ in range(2)]}
    out = sys.stdout
    out.write(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}\n")
    largest: dict[tuple[Role, str], float] = {}
    for name, layers in stacks.items():
        x = torch.randn(options.batch, options.sequence, options.hidden)
        for place, layer in enumerate(layers):
            x = x.detach().requires_grad_()
            graph = trace(layer, x)
            start = time.perf_counter()
            choices = lossy_choices(graph, unverified(graph))
            errors = gradient_errors(graph, Rehearsal(layer, layer.forward, (x,), {}), choices)
            seconds = time.perf_counter() - start
            out.write(
                f"\n{name} layer {place}: {len(errors)} errors in {seconds:.1f} s, load {os.getloadavg()[0]:.1f}\n\n"
                "| site | role | codec | error |\n|---|---|---|---|\n"
            )
            for choice in sorted(choices, key=lambda c: c.buffer):
                error, role = errors[choice.buffer, choice.label], graph.role(choice.buffer)
                out.write(f"| {graph.buffers[choice.buffer].site} | {role} | {choice.label} | {error:.2g} |\n")
                key = role, choice.action.codec
                largest[key] = max(error, largest.get(key, 0.0))
            first = {c.buffer: c for c in reversed(choices)}.values()
            alone = [errors[c.buffer, c.label] for c in first]
            together = joint_error(graph, Rehearsal(layer, layer.forward, (x,), {}), first)
            out.write(
                f"\nthe first choices of all {len(alone)} buffers together: {together:.4f}; the root of the sum of "
                f"their squares: {sum(e * e for e in alone) ** 0.5:.4f}; their sum: {sum(alone):.3f}\n"
            )
            out.flush()
            with torch.no_grad():
                x = layer(x)
    if options.table:
        out.write("\n")
        for (role, codec), error in largest.items():
            out.write(f'        (Role.{role.name}, "{codec}"): {error:.2g},\n')


if __name__ == "__main__":
    main()
