"""The planner's prediction of the reproduction's runs, for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_adacc.cost.devices import DeviceSpec
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import planning
from megatron_adacc.megatron.max_batch_command import Batches, largest
from megatron_adacc.megatron.reproduce_jobs import ERROR_BUDGET, Experiment, Method, planned_flags


class Predictor:
    """One experiment on a device; each micro-batch is traced once. ``extra``: further flags of Megatron's."""

    def __init__(self, experiment: Experiment, device: DeviceSpec, extra: Sequence[str] = ()) -> None:
        if experiment.small:
            raise UserError("The device table has no CPU: runs with --cpu-scale are not predicted.")
        flags = planned_flags(experiment, 1, extra)
        request = planning.Request(tuple(flags), device, experiment.ranks, None, ERROR_BUDGET)
        self._batches = Batches(request, experiment.sequence)

    def run(self, method: Method, micro_batch: int) -> dict[str, Any]:
        """Samples a second, milliseconds of a step, held and peak bytes, and whether it fits."""
        found = self._batches.outcome(method.strategy, micro_batch)
        return {
            "samples_per_second": found.samples_per_second,
            "step_ms": found.step_us / 1e3,
            "held_bytes": found.held_bytes,
            "peak_bytes": found.peak_bytes,
            "fits": found.fits,
        }

    def largest(self, method: Method) -> int:
        """The largest micro-batch that fits; 0 where none does."""
        return largest(self._batches, method.strategy)
