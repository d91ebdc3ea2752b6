"""How far a run is beyond the limit of its plan, and what limit the next plan gets."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch

from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import StagePlan

STEP = Fraction(1, 20)  # of what activations may take, given up after a failed allocation of unknown size


def excess_of(stage: StagePlan, stored_bytes: Callable[[], int], device: torch.device) -> int:
    """Bytes that are held now beyond the plan's limit.

    On a GPU the allocator knows what is held. On the CPU nobody keeps the account but the stash: what it holds beyond
    what the plan's layers hold with all their micro-batches in flight is taken to come on top of the predicted peak."""
    if device.type == "cuda":
        if stage.limit.total_bytes is None:
            return 0
        return max(0, torch.cuda.memory_allocated(device) - stage.limit_bytes)
    beyond = stored_bytes() - planned_bytes(stage)
    if beyond <= 0:
        return 0
    needed = stage.predicted.held_bytes if stage.limit.total_bytes is None else stage.predicted.peak_bytes
    return max(0, needed + beyond - stage.limit_bytes)


def planned_bytes(stage: StagePlan) -> int:
    """Held by the layers with all micro-batches in flight that the plan reckons with."""
    classes = stage.problem.classes if stage.limit.total_bytes is not None else [f.layer_class for f in stage.facts]
    flights = [c.in_flight for c in classes]
    layers = sum(a.outcome.held_bytes * flights[a.class_index] for a in stage.solution.layers)
    shared = stage.predicted.held_bytes - sum(a.outcome.held_bytes for a in stage.solution.layers)
    return layers + shared * max(flights, default=1)


def tightened(stage: StagePlan, excess_bytes: int) -> Limit:
    """A lower limit than this plan's: by the excess where it is known, else by a twentieth of what activations may
    take. It starts from what the plan needs where that is less than its limit."""
    if stage.limit.total_bytes is None:
        plain = stage.limit_bytes / stage.limit.share if stage.limit.share else Fraction(1)
        needed = min(stage.predicted.held_bytes, stage.limit_bytes)
        less = max(excess_bytes, int(STEP * stage.limit_bytes), 1)
        return Limit(share=max(Fraction(0), Fraction(needed - less) / Fraction(plain)))
    needed = min(stage.predicted.peak_bytes, stage.limit_bytes)
    less = max(excess_bytes, int(STEP * max(0, needed - stage.problem.fixed_bytes)), 1)
    return Limit(total_bytes=max(1, needed - less))
