"""Step time and memory of the engine, side by side with the plain run and with torch.utils.checkpoint.

    python benchmarks/engine.py [--rounds 15] [--layers 2] [--hidden 512] [--sequence 512] [--batch 4]
    python benchmarks/engine.py --errors        the gradient errors of compress and quantize by parameter, no times

A two-layer GPT stack, fp32, unfused attention, dropout 0.1, one thread. The variants take turns in one process, so
that a slower minute of the machine slows all of them.

    plain        nothing attached
    checkpoint   torch.utils.checkpoint around each layer (use_reentrant=False)
    keep, recompute, compress, quantize
                 attach(layers, the name)

cpu:  CPU seconds of a step, median of the rounds: what a machine that others use too disturbs least. Ratios are
      medians over the rounds of a variant's CPU seconds by plain's, and by checkpoint's, in the same round.
wall: seconds of a step, median; first: CPU seconds of the first step beyond the median (attach is before it): two
      traced forwards, verification, and whatever is compiled for the codecs.
held: bytes of distinct storages that the forward leaves behind for the backward, parameters not counted.
peak: the largest sum of live tensor bytes during forward and backward above what was live before, counted from
      the allocations that the profiler reports; exact, but for allocations outside torch.
error: the largest relative gradient error of a parameter; 0 means that all gradients have plain's very bits.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron_adacc import attach
from megatron_adacc.runtime.attach import Handle

PLANS = ("keep", "recompute", "compress", "quantize")


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
        """CPU seconds and wall seconds of a forward and backward."""
        self.layers.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        cpu, wall = time.process_time(), time.perf_counter()
        self.forward(x).square().mean().backward()
        return time.process_time() - cpu, time.perf_counter() - wall


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

    def plain(layer: nn.Module, x: Tensor) -> Tensor:
        result = layer(x)
        assert isinstance(result, Tensor)
        return result

    variants = [Variant("plain", stack, plain), Variant("checkpoint", copy.deepcopy(stack), checkpointed)]
    for plan in PLANS:
        layers = copy.deepcopy(stack)
        variants.append(Variant(plan, layers, plain, attach(layers, plan)))
    return variants


def largest_error(gradients: list[Tensor | None], exact: list[Tensor | None]) -> float:
    """The largest relative error of a parameter's gradient."""
    errors = [
        0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm())
        for a, b in zip(gradients, exact, strict=True)
        if a is not None and b is not None
    ]
    return max(errors)


def error_rows(variants: list[Variant], x: Tensor) -> list[str]:
    """A table of the relative gradient errors by parameter, as handle.gradient_errors() measures them."""
    lossy = [v for v in variants if v.name in ("compress", "quantize")]
    errors = []
    for variant in lossy:
        assert variant.handle is not None
        torch.manual_seed(0)
        errors.append(variant.handle.gradient_errors(lambda v=variant: v.forward(x).square().mean()))  # type: ignore[misc]
    rows = [f"| parameter | {' | '.join(v.name for v in lossy)} |", "|---" * (1 + len(lossy)) + "|"]
    for name in errors[0]:
        rows.append(f"| {name} | {' | '.join(f'{e[name]:.3f}' for e in errors)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rounds", 15), ("layers", 2), ("hidden", 512), ("heads", 8), ("sequence", 512), ("batch", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--errors", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = sys.stdout
    load = os.getloadavg()[0]
    out.write(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, ")
    out.write(f"{os.cpu_count()} cores, load {load:.1f} before")
    variants = build(options)
    x = torch.randn(options.batch, options.sequence, options.hidden, requires_grad=True)
    if options.errors:
        out.write("\n\n" + "\n".join(error_rows(variants, x)) + "\n")
        return
    first = {v.name: v.step(x)[0] for v in variants}
    for variant in variants:
        variant.step(x)
    gradients = {v.name: [p.grad for p in v.layers.parameters()] for v in variants}
    errors = {name: largest_error(found, gradients["plain"]) for name, found in gradients.items()}
    times: dict[str, list[tuple[float, float]]] = {v.name: [] for v in variants}
    for _ in range(options.rounds):
        for variant in variants:
            times[variant.name].append(variant.step(x))
    held = {v.name: held_bytes(v, x) for v in variants}
    peak = {v.name: peak_bytes(partial(v.step, x)) for v in variants}

    def ratio(name: str, other: str) -> float:
        return statistics.median(a[0] / b[0] for a, b in zip(times[name], times[other], strict=True))

    out.write(f", {os.getloadavg()[0]:.1f} after; {options.rounds} rounds\n\n")
    out.write(
        "| variant | cpu s | / plain | / checkpoint | wall s | first s | held MB | % of plain | peak MB | error |\n"
    )
    out.write("|---|---|---|---|---|---|---|---|---|---|\n")
    for name, rows in times.items():
        cpu, wall = (statistics.median(row[i] for row in rows) for i in (0, 1))
        out.write(
            f"| {name} | {cpu:.3f} | {ratio(name, 'plain'):.3f} | {ratio(name, 'checkpoint'):.3f} | {wall:.3f} | "
            f"{first[name] - cpu:.2f} | {held[name] / 1e6:.2f} | {100 * held[name] / held['plain']:.2f} | "
            f"{peak[name] / 1e6:.1f} | {errors[name]:.3g} |\n"
        )


if __name__ == "__main__":
    main()
