"""What a step has shown, collected, and agreed on by the ranks that share a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from megatron_adacc.adaptive.monitor import PERSISTENT, Finding


@dataclass
class News:
    """``why`` and ``changed`` are lines for people, of this rank's. What is to be done:

    resolve      solve the problem again
    again        trace the layers again, and measure errors anew
    errors       by site, the factor by which a lossy action's error has grown
    exact        places of layers whose lossy actions end
    over_share   the peak as a share of the device's memory, where it is too large
    more_bytes   on the device beside what the model says
    slow         steps take far longer than before: look which op does
    effect       what the solver predicts of it"""

    why: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    resolve: bool = False
    again: bool = False
    errors: dict[str, float] = field(default_factory=dict)
    exact: set[int] = field(default_factory=set)
    over_share: float = 0.0
    more_bytes: int = 0
    slow: bool = False
    effect: str = ""


def agreed(own: News, groups: Sequence[dist.ProcessGroup]) -> News:
    """The news of all ranks of the groups, each with its own lines; a rank without any says that another has some.
    All ranks call it at the end of the same step."""
    why = list(own.why)
    for group in groups:
        everyone: list[dict[str, Any]] = [{}] * group.size()
        dist.all_gather_object(everyone, asdict(own), group=group)
        for other in everyone:
            own.resolve |= other["resolve"]
            own.again |= other["again"]
            own.slow |= other["slow"]
            own.exact |= other["exact"]
            own.over_share = max(own.over_share, other["over_share"])
            own.more_bytes = max(own.more_bytes, other["more_bytes"])
            for site, factor in other["errors"].items():
                own.errors[site] = max(own.errors.get(site, factor), factor)
            if other["why"] and not why:
                why = ["another rank found a change"]
        own.why = why
    return own


def reasons(finding: Finding, with_error: bool = True) -> list[str]:
    """Why a finding is news. ``with_error``: a grown error is."""
    where = f"layer {finding.key.place} {finding.key.site}"
    found = []
    if finding.listed is not None:
        found.append(f"{where}: {finding.overlap:.0%} of its outliers were in the outlier columns")
    if finding.error_grew and with_error:
        found.append(f"{where}: its error grew from {finding.reference:.3g} to {finding.error:.3g}")
    return found


def changes(finding: Finding) -> list[str]:
    """What a finding has changed already."""
    if finding.listed is None or finding.before is None:
        return []
    new, old = set(finding.listed.channels), set(finding.before.channels)
    more = f", no column for {finding.without_column} more" if finding.without_column else ""
    where = f"layer {finding.key.place} {finding.key.site}"
    found = [f"{where}: channels in {sorted(new - old)}, out {sorted(old - new)}{more}"]
    if finding.moves == PERSISTENT:
        found.append(f"{where}: others in {PERSISTENT} checks in a row, so that another change of them is no news")
    return found
