"""From the time of a micro-batch on each stage to samples a second of the whole job.

    a step of a pipeline with stages of t_1 ... t_p microseconds a micro-batch, m micro-batches, v chunks a stage:
        m max t + (sum of t - max t) / v                                    filling and draining the pipeline
    gradients of n data-parallel ranks:   2 (n - 1) / n  gradient bytes over the link
    optimizer: its own gradients read for their norm and for the update, 16-bit ones by way of an fp32 copy;
        master copies (or parameters) and moments read; parameters, master copies and moments written

    samples/s = micro-batch size x m x n / step

The pipeline's formula is exact for equal stages (arXiv 2104.04473, section 2.2: the bubble is (p - 1) t / v) and an
upper bound of 1F1B for unequal ones. Not in it: sending activations between stages, reading data, and what overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adacc.cost.devices import DeviceSpec
from megatron_adacc.cost.job import Job


def pipeline_us(stages_us: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Microseconds of a step's forwards and backwards; ``stages_us``: of one micro-batch on each stage."""
    slowest = max(stages_us)
    return micro_batches * slowest + (sum(stages_us) - slowest) / chunks


def optimizer_us(job: Job, stage: int, device: DeviceSpec) -> float:
    """Microseconds that a rank of `stage` spends once a step: reducing gradients and stepping the optimizer."""
    static, training = job.static_bytes(stage), job.training
    own = static.gradients / (training.data_parallel if training.zero == 1 else 1)
    # A gradient of 16 bits is read once, into a copy that is written once and read twice; one of 32 bits is read twice.
    gradients = own + 3 * 4 * own / 2 if training.buffer_bytes == 2 else 2 * own
    kept = static.parameters + static.master + static.moments
    moved = static.master + static.moments + kept + gradients
    if not training.master_bytes:
        moved += static.parameters  # the update reads what else it reads from the master copy
    ranks = training.data_parallel
    reduced = 2 * (ranks - 1) / ranks * static.gradients
    return 1e6 * (moved / device.achievable_bandwidth + reduced / device.achievable_link)


def samples_per_second(micro_batch: int, micro_batches: int, data_parallel: int, step_us: float) -> float:
    """Of all ranks together."""
    return 1e6 * micro_batch * micro_batches * data_parallel / step_us
