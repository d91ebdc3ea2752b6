"""Step time and memory of the engine, side by side with the plain run and with torch.utils.checkpoint.

    python benchmarks/engine.py [--rounds 15] [--layers 2] [--hidden 512] [--sequence 512] [--batch 4]

A two-layer GPT stack, fp32, unfused attention, dropout 0.1, one thread. The variants take turns in one process, so
that a slower minute of the machine slows all of them; figures are medians of the rounds and ratios of medians.

    plain        nothing attached
    keep         attach(layers, "keep")
    recompute    attach(layers, "recompute")
    checkpoint   torch.utils.checkpoint around each layer (use_reentrant=False)

held: bytes of distinct storages that the forward leaves behind for the backward, parameters not counted.
peak: the largest sum of live tensor bytes during forward and backward above what was live before, counted from
      the allocations that the profiler reports; exact, but for allocations outside torch.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron_adacc import attach
from megatron_adacc.runtime.attach import Handle


class GptLayer(nn.Module):
    """Pre-norm GPT layer with unfused causal attention: [batch, sequence, hidden] -> the same."""

    def __init__(self, hidden: int, heads: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = dropout
        self.register_buffer("mask", torch.ones(sequence, sequence, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        scores = (q @ k.transpose(2, 3)) * (q.shape[-1] ** -0.5)
        probabilities = F.softmax(scores.masked_fill_(self.mask, -10000.0), dim=-1)
        context = F.dropout(probabilities, self.dropout, self.training) @ v
        context = context.transpose(1, 2).reshape(batch, sequence, hidden)
        x = x + F.dropout(self.projection(context), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


@dataclass
class Variant:
    """One way of training the stack: the layers, and how a layer is called."""

    name: str
    layers: nn.ModuleList
    call: Callable[[nn.Module, Tensor], Tensor]
    handle: Handle | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def step(self, x: Tensor) -> tuple[float, float]:
        """Seconds of the forward and of the backward."""
        self.layers.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        begin = time.perf_counter()
        loss = self.forward(x).square().mean()
        middle = time.perf_counter()
        loss.backward()
        return middle - begin, time.perf_counter() - middle


def peak_bytes(run: Callable[[], object]) -> int:
    """The largest growth of allocated CPU bytes while ``run`` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def held_bytes(variant: Variant, x: Tensor) -> int:
    """Allocated bytes that a forward leaves behind with its output alive, the layers' inputs included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = variant.forward(x)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    grown = sum(e.nbytes() for e in events)
    return grown - output.untyped_storage().nbytes() + x.untyped_storage().nbytes()


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    result = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(result, Tensor)
    return result


def build(options: argparse.Namespace) -> list[Variant]:
    torch.manual_seed(1)
    stack = nn.ModuleList(GptLayer(options.hidden, options.heads, options.sequence, 0.1) for _ in range(options.layers))
    copies = {name: copy.deepcopy(stack) for name in ("keep", "recompute", "checkpoint")}

    def plain(layer: nn.Module, x: Tensor) -> Tensor:
        result = layer(x)
        assert isinstance(result, Tensor)
        return result

    return [
        Variant("plain", stack, plain),
        Variant("keep", copies["keep"], plain, attach(copies["keep"], "keep")),
        Variant("recompute", copies["recompute"], plain, attach(copies["recompute"], "recompute")),
        Variant("checkpoint", copies["checkpoint"], checkpointed),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rounds", 15), ("layers", 2), ("hidden", 512), ("heads", 8), ("sequence", 512), ("batch", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    variants = build(options)
    x = torch.randn(options.batch, options.sequence, options.hidden, requires_grad=True)
    first = {v.name: sum(v.step(x)) for v in variants}
    second = {v.name: sum(v.step(x)) for v in variants}
    gradients = {v.name: [p.grad for p in v.layers.parameters()] for v in variants}
    times: dict[str, list[tuple[float, float]]] = {v.name: [] for v in variants}
    for _ in range(options.rounds):
        for variant in variants:
            times[variant.name].append(variant.step(x))
    held = {v.name: held_bytes(v, x) for v in variants}
    peak = {v.name: peak_bytes(lambda v=v: v.step(x)) for v in variants}
    medians = {name: statistics.median(a + b for a, b in rows) for name, rows in times.items()}
    out = sys.stdout
    out.write(f"{'variant':<11}{'step s':>8}{'/plain':>8}{'/ckpt':>8}{'fwd s':>8}{'bwd s':>8}")
    out.write(f"{'held MB':>9}{'% plain':>9}{'peak MB':>9}{'first s':>9}{'exact':>7}\n")
    for variant in variants:
        name = variant.name
        exact = all(torch.equal(a, b) for a, b in zip(gradients[name], gradients["plain"], strict=True))
        forward, backward = (statistics.median(row[i] for row in times[name]) for i in (0, 1))
        out.write(
            f"{name:<11}{medians[name]:8.3f}{medians[name] / medians['plain']:8.3f}"
            f"{medians[name] / medians['checkpoint']:8.3f}{forward:8.3f}{backward:8.3f}{held[name] / 1e6:9.2f}"
            f"{100 * held[name] / held['plain']:9.2f}{peak[name] / 1e6:9.1f}"
            f"{first[name] - second[name]:9.2f}{exact!s:>7}\n"
        )
    out.write(f"traced forwards: {variants[2].handle.traced_forwards if variants[2].handle else 0}\n")


if __name__ == "__main__":
    main()
