"""Bytes that a rank holds through the whole training: parameters, gradients and the optimizer's state.

As Megatron 0.19 lays them out. The optimizer's state is counted from the start, although the first step makes it.

    bytes a parameter      fp32   fp16   fp16, gradients in fp32   bf16
    parameter                 4      2                         2      2
    gradient                  4      2                         4      4
    fp32 master copy          0      4                         4      4
    Adam's two moments        8      8                         8      8
    in all                   16     16                        18     18

(arXiv 1910.02054, section 3.1, has the 16 of fp16 mixed precision with Adam.) Gradients lie in one buffer that DDP
makes. What is divided among the n data-parallel ranks, by ZeRO's stages in the sense of that paper:

    0   nothing
    1   master copy and moments: Megatron's distributed optimizer. Parameters and gradients lie in buffers whose
        tensors start at multiples of 64 elements and whose buckets end at a multiple of lcm(n, 128); rank r owns the
        r-th part of every bucket
    2   gradients too        3   parameters too: fully sharded; each tensor is divided and rounded up
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_adacc.cost.gpt_parameters import Tensor
from megatron_adacc.errors import UserError

PRECISIONS = {"fp32": 4, "fp16": 2, "bf16": 2}
OPTIMIZERS = {"adam": 2, "sgd": 1}  # fp32 values that a step keeps for each parameter

_TENSOR_START = 64
_BUCKET_END = 128
_BUCKET_END_FOR_BANDWIDTH = 2**16


@dataclass(frozen=True)
class Training:
    """How parameters are trained.

    ``gradient_bytes``: 2 or 4 bytes an element of the gradient buffer; None is Megatron's default, 2 for fp16 and 4
    otherwise. ``momentum``: whether SGD keeps one. ``zero``: the stage, see above. ``data_parallel``: the ranks that
    share it, Megatron's data-parallel times context-parallel ranks. ``torch_optimizer``: whether the
    optimizer is torch's own, where apex and Transformer Engine are missing; its Adam counts the steps of each
    parameter in a tensor of 4 bytes on the host.

    Raises UserError for what is not known or does not fit together."""

    precision: str
    optimizer: str = "adam"
    gradient_bytes: int | None = None
    momentum: bool = True
    zero: int = 0
    data_parallel: int = 1
    torch_optimizer: bool = False

    def __post_init__(self) -> None:
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise UserError(f"The {name} is {getattr(self, name)!r}, but the known ones are {', '.join(known)}.")
        if self.data_parallel < 1:
            raise UserError(f"{self.data_parallel} data-parallel ranks are given, but there is at least one.")
        if self.zero not in range(4):
            raise UserError(f"The ZeRO stage is {self.zero}, but the stages are 0, 1, 2 and 3.")
        if self.gradient_bytes not in (None, self.parameter_bytes, 4):
            allowed = "4 bytes" if self.parameter_bytes == 4 else f"{self.parameter_bytes} or 4 bytes"
            raise UserError(
                f"Gradients of {self.precision} parameters have {allowed} an element, but {self.gradient_bytes} is "
                "given."
            )

    @property
    def parameter_bytes(self) -> int:
        """Bytes an element of a parameter."""
        return PRECISIONS[self.precision]

    @property
    def buffer_bytes(self) -> int:
        """Bytes an element of the gradient buffer."""
        if self.gradient_bytes is not None:
            return self.gradient_bytes
        return 2 if self.precision == "fp16" else 4

    @property
    def master_bytes(self) -> int:
        """Bytes of the fp32 copy of a parameter, 0 where the parameter is its own."""
        return 4 if self.parameter_bytes < 4 else 0

    @property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments of a parameter."""
        return 4 * OPTIMIZERS[self.optimizer] if self.optimizer == "adam" or self.momentum else 0

    @property
    def counts_steps(self) -> bool:
        """Whether each parameter has a counter of its own."""
        return self.torch_optimizer and self.optimizer == "adam"


@dataclass(frozen=True)
class Buckets:
    """How DDP cuts a chunk's gradient buffer: ``elements`` a bucket at least, None for one bucket (without
    --overlap-grad-reduce, and on all stages and chunks but the first). ``for_bandwidth``: Megatron's
    --ddp-pad-buckets-for-high-nccl-busbw."""

    elements: int | None = None
    for_bandwidth: bool = False


ONE_BUCKET = Buckets()


@dataclass(frozen=True)
class StaticBytes:
    """Bytes of one rank by what they are. ``counters`` lie on the host where the model lies on a GPU."""

    parameters: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    counters: int = 0

    @property
    def total(self) -> int:
        """All of them on the model's device."""
        return self.parameters + self.gradients + self.master + self.moments

    def __add__(self, other: StaticBytes) -> StaticBytes:
        return StaticBytes(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def of_elements(elements: int, training: Training) -> StaticBytes:
    """Bytes of `elements` parameters, as if they were one tensor and nothing were padded.

    Raises UserError for fewer than one parameter."""
    if elements < 1:
        raise UserError(f"{elements} parameters are given, but a model has at least one.")
    share = -(-elements // training.data_parallel)
    return StaticBytes(
        parameters=(share if training.zero >= 3 else elements) * training.parameter_bytes,
        gradients=(share if training.zero >= 2 else elements) * training.buffer_bytes,
        master=(share if training.zero >= 1 else elements) * training.master_bytes,
        moments=(share if training.zero >= 1 else elements) * training.moment_bytes,
        counters=4 if training.counts_steps else 0,
    )


def of_chunk(
    chunk: Sequence[Tensor], training: Training, rank: int | None = None, buckets: Buckets = ONE_BUCKET
) -> StaticBytes:
    """Bytes of one chunk's parameters on data-parallel `rank`; None is the rank that holds most.

    Raises UserError for a rank that does not exist."""
    own = _pieces(chunk, training, rank, buckets)
    whole = sum(tensor.elements for tensor in chunk)
    if training.zero == 1:
        ends = _layout(chunk, training.data_parallel, buckets)[1]
        whole = ends[-1][1] if ends else 0
    return StaticBytes(
        parameters=(sum(own) if training.zero == 3 else whole) * training.parameter_bytes,
        gradients=(sum(own) if training.zero >= 2 else whole) * training.buffer_bytes,
        master=sum(own) * training.master_bytes,
        moments=sum(own) * training.moment_bytes,
        counters=4 * len(own) if training.counts_steps else 0,
    )


def gathered_bytes(chunk: Sequence[Tensor], training: Training) -> int:
    """Bytes of what fully sharded ranks have whole for a moment, beside their shares, at most.

    Stage 3: the parameters of two units, the running one and the next, which is fetched ahead, and of what is in no
    unit; and the gradients of the running unit. Stage 2: those gradients. A unit is a layer or the embedding, as in
    torch's fully_shard and in Megatron's use of it."""
    if training.zero < 2 or training.data_parallel == 1:
        return 0
    units: dict[str, int] = {}
    for tensor in chunk:
        names = tensor.name.split(".")
        unit = ".".join(names[:3]) if names[:2] == ["decoder", "layers"] else names[0]
        units[unit] = units.get(unit, 0) + tensor.elements
    alone = sum(units.pop(name, 0) for name in ("decoder", "output_layer"))
    largest = max(units.values(), default=0)
    if training.zero == 2:
        return largest * training.buffer_bytes
    return (3 * largest + alone) * training.parameter_bytes


def step_bytes(
    chunks: Sequence[Sequence[Tensor]],
    training: Training,
    cuda: bool,
    rank: int | None = None,
    buckets: Buckets = ONE_BUCKET,
) -> int:
    """Bytes that are alive only while the optimizer steps, when no activation is; `buckets` are the first chunk's.

    They are fp32 copies of 16-bit gradients, and what torch's own optimizers compute with: Adam makes the root of the
    second moment, SGD the gradient with weight decay, on CUDA of all tensors at once. On the CPU it is one tensor at
    a time, and Adam has a quotient beside the root.

    Raises UserError for a rank that does not exist."""
    own: list[int] = []
    for index, chunk in enumerate(chunks):
        own += _pieces(chunk, training, rank, buckets if index == 0 else Buckets(None, buckets.for_bandwidth))
    copies = 4 * sum(own) if training.buffer_bytes < 4 else 0
    if not training.torch_optimizer:
        return copies
    if cuda:
        return copies + 4 * sum(own)
    return copies + 4 * max(own, default=0) * (2 if training.optimizer == "adam" else 1)


def _pieces(chunk: Sequence[Tensor], training: Training, rank: int | None, buckets: Buckets) -> list[int]:
    return [elements for _, elements in pieces(chunk, training, rank, buckets)]


def pieces(
    chunk: Sequence[Tensor], training: Training, rank: int | None = None, buckets: Buckets = ONE_BUCKET
) -> list[tuple[Tensor, int]]:
    """The pieces of tensors whose optimizer state data-parallel `rank` holds, and the elements of each; None is the
    rank that holds most."""
    if rank is not None and not 0 <= rank < training.data_parallel:
        raise UserError(f"Rank {rank} does not exist: there are {training.data_parallel} data-parallel ranks.")
    if training.zero == 0:
        return [(tensor, tensor.elements) for tensor in chunk]
    if training.zero > 1:
        return [(tensor, -(-tensor.elements // training.data_parallel)) for tensor in chunk]
    starts, ends = _layout(chunk, training.data_parallel, buckets)
    ranks = range(training.data_parallel) if rank is None else (rank,)
    owned = (_owned(chunk, starts, ends, training.data_parallel, which) for which in ranks)
    return max(owned, key=lambda found: sum(elements for _, elements in found))


def _layout(chunk: Sequence[Tensor], ranks: int, buckets: Buckets) -> tuple[list[int], list[tuple[int, int]]]:
    """Where each tensor starts in the distributed optimizer's buffer, last tensor first, and where each bucket starts
    and ends."""
    multiple = math.lcm(ranks, _BUCKET_END, _BUCKET_END_FOR_BANDWIDTH if buckets.for_bandwidth else 1)
    starts: list[int] = []
    ends: list[tuple[int, int]] = []
    position = bucket_start = 0

    def end_bucket() -> None:
        nonlocal position, bucket_start
        position = _rounded_up(position, multiple)
        ends.append((bucket_start, position))
        bucket_start = position

    for tensor in reversed(chunk):
        position = _rounded_up(position, _TENSOR_START)
        if tensor.shared and position > bucket_start:
            end_bucket()
        starts.append(position)
        position += tensor.elements
        if tensor.shared or (buckets.elements is not None and position - bucket_start >= buckets.elements):
            end_bucket()
    if position > bucket_start:
        end_bucket()
    return starts, ends


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _owned(
    chunk: Sequence[Tensor], starts: list[int], ends: list[tuple[int, int]], ranks: int, rank: int
) -> list[tuple[Tensor, int]]:
    """The pieces of tensors in the rank-th part of every bucket."""
    found = []
    bucket = 0
    for start, tensor in zip(starts, reversed(chunk), strict=True):
        while ends[bucket][1] <= start:
            bucket += 1
        first, end = ends[bucket]
        size = (end - first) // ranks
        part = first + rank * size
        common = min(part + size, start + tensor.elements) - max(part, start)
        if common > 0:
            found.append((tensor, common))
    return found
