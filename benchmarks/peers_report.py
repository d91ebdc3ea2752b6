"""The tables and verdicts of benchmarks/peers.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_adacc.cost.stage_plan import Prediction

# The aims: a step at the peak of full recompute, by its step; at 29 % of plain's held bytes, by plain's.
CHECKPOINT_AIM = 0.80
PLAIN_AIM, PLAIN_AIM_PERCENT = 1.12, 29


@dataclass(frozen=True)
class Measured:
    """One variant. ``kind``: peer or plan. ``held``, ``peak``: bytes. ``times``: (CPU, wall) seconds by round."""

    name: str
    kind: str
    held: int
    peak: int
    error: float
    predicted: Prediction | None = None
    times: list[tuple[float, float]] = field(default_factory=list)

    def seconds(self, clock: int = 0) -> float:
        """Median over the rounds of the CPU time (0) or the wall time (1)."""
        return statistics.median(time[clock] for time in self.times)

    def ratio(self, other: Measured) -> float:
        """Median over the rounds of the CPU times' ratio."""
        return statistics.median(a[0] / b[0] for a, b in zip(self.times, other.times, strict=True))

    def spread(self, other: Measured) -> str:
        """The ratio with its range over the rounds."""
        ratios = [a[0] / b[0] for a, b in zip(self.times, other.times, strict=True)]
        return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def table_lines(found: Mapping[str, Measured], names: Mapping[str, str]) -> list[str]:
    """One row a variant; a plan's other names behind its first."""
    lines = [
        "| variant | cpu s | / plain | / checkpoint | wall s | held MB | % of plain | peak MB | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    plain, checkpoint = found["plain"], found["checkpoint"]
    for name, row in found.items():
        same = [other for other, first in names.items() if first == name and other != name]
        lines.append(
            f"| {', '.join([name, *same])} | {row.seconds():.3f} | {row.ratio(plain):.3f} | "
            f"{row.ratio(checkpoint):.3f} | {row.seconds(1):.3f} | {row.held / 1e6:.2f} | "
            f"{100 * row.held / plain.held:.2f} | {row.peak / 1e6:.1f} | {row.error:.3g} |"
        )
    return lines


def prediction_lines(found: Mapping[str, Measured], plain_us: float) -> list[str]:
    """Predicted beside measured for each plan. ``plain_us``: the predicted step of the layers without a plan."""
    plain = found["plain"]
    lines = [
        f"Predicted plain step of the layers {plain_us / 1e6:.3f} s, measured step {plain.seconds():.3f} s.",
        "",
        "| plan | held MB | measured | peak MB | measured | peak / measured | added ms | measured | step / plain "
        "| measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        promised = row.predicted
        if promised is None:
            continue
        peaks = (f"{promised.peak_bytes / 1e6:.1f}", f"{promised.peak_bytes / row.peak:.3f}")
        peak, ratio = peaks if promised.peak_bytes else ("", "")
        added = statistics.median(a[0] - b[0] for a, b in zip(row.times, plain.times, strict=True))
        lines.append(
            f"| {name} | {promised.held_bytes / 1e6:.3f} | {row.held / 1e6:.3f} | {peak} | {row.peak / 1e6:.1f} | "
            f"{ratio} | {(promised.step_us - plain_us) / 1e3:.0f} | {1e3 * added:.0f} | "
            f"{promised.step_us / plain_us:.3f} | {row.ratio(plain):.3f} |"
        )
    return lines


def verdict_lines(found: Mapping[str, Measured], names: Mapping[str, str], percents: Sequence[int]) -> list[str]:
    """auto beside each peer at the peer's bytes, beside the best peer at each limit, and the aims."""
    plain, peers = found["plain"], [m for m in found.values() if m.kind == "peer" and m.name != "plain"]
    lines = []
    for peer in peers:
        for what in ("held", "peak"):
            key = f"auto = {peer.name} {what}"
            if key not in names:
                continue
            auto = found[names[key]]
            lines.append(
                f"{peer.name}: auto at its {what} bytes takes {auto.spread(peer)} of its step; held "
                f"{auto.held / 1e6:.2f} MB beside {peer.held / 1e6:.2f}, peak {auto.peak / 1e6:.1f} MB beside "
                f"{peer.peak / 1e6:.1f}."
            )
    for percent in percents:
        key = f"auto {percent}%"
        if key not in names:
            continue
        auto = found[names[key]]
        lines += _limit_lines(found, names, auto, percent, peers)
        if percent == PLAIN_AIM_PERCENT:
            lines.append(
                f"Aim at {percent} %: at most {PLAIN_AIM} x plain's step; measured {auto.spread(plain)}: "
                f"{_met(auto.ratio(plain) <= PLAIN_AIM)}."
            )
    aimed = names.get("auto = checkpoint peak")
    if percents and aimed is not None:
        auto, checkpoint = found[aimed], found["checkpoint"]
        lines.append(
            f"Aim at the peak of full recompute: at most {CHECKPOINT_AIM} x its step; measured "
            f"{auto.spread(checkpoint)}: {_met(auto.ratio(checkpoint) <= CHECKPOINT_AIM)}."
        )
    return lines


def _limit_lines(
    found: Mapping[str, Measured], names: Mapping[str, str], auto: Measured, percent: int, peers: Sequence[Measured]
) -> list[str]:
    """auto at a limit beside the fastest eager peer, and the paper's plan, that keep to it."""
    plain = found["plain"]
    lines = []
    fitting = [p for p in peers if 100 * p.held <= percent * plain.held]
    if fitting:
        best = min(fitting, key=lambda p: p.ratio(plain))
        lines.append(f"At {percent} %: auto takes {auto.spread(best)} of the step of {best.name}, the best peer there.")
    paper = names.get(f"paper {percent}%")
    if paper is not None:
        beside = "the same plan" if found[paper] is auto else f"{auto.spread(found[paper])} of its step"
        lines.append(f"At {percent} %: auto beside the paper's formulation: {beside}.")
    return lines


def _met(met: bool) -> str:
    return "met" if met else "**not met**"
