"""Bytes of m and v under --adacc-state-plan, counted before anything is built (docs/states.md).

What has fewer than 4096 elements on a rank, and what tensor-parallel ranks or pipeline stages hold alike, keeps 32
bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron_adacc.cost.gpt_parameters import Tensor
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.static_memory import ONE_BUCKET, Buckets, StaticBytes, Training, pieces

MIN_QUANTIZED = 4096  # elements; BlockAdamW's own default
BITS = (16, 8, 4)

_DIVIDED = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.|(linear_proj|linear_fc2)\.weight")


def moment_bytes(elements: int, bits: int) -> int:
    """Of m and v of one tensor in blocks of 256: what optim/memory.py says, without torch. In 8 and 4 bits each block
    has two exponents of a byte; two codes of 4 bits share a byte, a last one has its own."""
    if bits > 8:
        return 2 * elements * bits // 8
    full, tail = divmod(elements, 256)
    blocks = full + (tail > 0)
    codes = elements if bits == 8 else full * 128 + (tail + 1) // 2
    return 2 * (codes + blocks)


def of_chunk(
    chunk: Sequence[Tensor],
    training: Training,
    bits: int,
    *,
    tensor_parallel: int = 1,
    rank: int | None = None,
    buckets: Buckets = ONE_BUCKET,
) -> int:
    """Bytes of m and v of a chunk's parameters on a rank, in uniform bits; `rank` as for static_memory.of_chunk."""
    own = pieces(chunk, training, rank, buckets)
    return sum(moment_bytes(elements, bits_of(tensor, elements, bits, tensor_parallel)) for tensor, elements in own)


def bits_of(tensor: Tensor, elements: int, bits: int, tensor_parallel: int) -> int:
    """What a rank's `elements` of a tensor have where all that may have `bits` have them."""
    alike = tensor.shared or (tensor_parallel > 1 and not _DIVIDED.search(tensor.name))
    return 32 if alike or elements < MIN_QUANTIZED else bits


def moments_of(tensors: Sequence[Tensor], bits: int, tensor_parallel: int) -> int:
    """Bytes of m and v of whole tensors, in uniform bits."""
    return sum(moment_bytes(t.elements, bits_of(t, t.elements, bits, tensor_parallel)) for t in tensors)


def of_stage(job: Job, stage: int, static: StaticBytes) -> dict[str, Any]:
    """By bits: m and v of the fullest rank of a stage, and all static bytes with them; nothing where the optimizer is
    not Adam, or parameters are divided too."""
    if job.training.optimizer != "adam" or job.training.zero > 1:
        return {}
    plans = {}
    for bits in BITS:
        moments = 0
        for index, chunk in enumerate(job.tensors(stage)):
            buckets = job.buckets if (stage, index) == (0, 0) else Buckets(None, job.buckets.for_bandwidth)
            parallel = job.tensor_parallel
            moments += of_chunk(chunk, job.training, bits, tensor_parallel=parallel, buckets=buckets)
        plans[str(bits)] = {"moments": moments, "total_bytes": static.total - static.moments + moments}
    return {"state_plans": plans}


def of_parameters(elements: int, training: Training, static: StaticBytes) -> dict[str, Any]:
    """The same for parameters of no particular model, as if they were one tensor; for bf16 also with a remainder of 16
    bits in place of the float32 master copy, which BlockAdamW keeps outside of Megatron."""
    if training.optimizer != "adam" or training.zero > 1:
        return {}
    share = -(-elements // (training.data_parallel if training.zero else 1))
    plans = {}
    for bits in BITS:
        moments = moment_bytes(share, bits)
        total = static.total - static.moments + moments
        plans[str(bits)] = {"moments": moments, "total_bytes": total}
        if training.precision == "bf16":
            plans[str(bits)]["with_remainder_bytes"] = total - 2 * share
    return {"state_plans": plans}


def add_rows(table: Any, stages: Sequence[dict[str, Any]], alone: bool) -> None:
    """Rows of `adacc memory`'s table: all static bytes by bits of m and v."""
    if not all("state_plans" in stage for stage in stages):
        return
    for bits in BITS:
        for key, label in (("total_bytes", ""), ("with_remainder_bytes", ", remainder master")):
            values = [stage["state_plans"][str(bits)].get(key) for stage in stages]
            if None in values:
                continue
            each = [f"{values[0] / stages[0]['parameters']:.4g}"] if alone else []
            table.add_row(f"total, moments in {bits} bits{label}", *(f"{value:,}" for value in values), *each)
