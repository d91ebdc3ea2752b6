"""How many outlier columns a plan reserves for each buffer, from what the traced layers showed.

    a_i = sum |x| over channel i      z_i = (a_i - mean(a)) / std(a)      outlier: z_i > 3      (arXiv 2508.00806)

A plan names a number of columns and no channels: outlier channels differ from layer to layer and move with the
training, while the bytes of a plan have to hold for all its layers and for as long as it is used. Each layer fills the
columns with its own channels of highest z, in its first forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_adacc.codecs import ChannelStatistics
from megatron_adacc.codecs.statistics import reserved_columns
from megatron_adacc.graph.model import FLOAT_DTYPES, Buffer, LayerGraph, Role
from megatron_adacc.graph.verify import Evidence, is_dense
from megatron_adacc.planner import Compress

THRESHOLD = 3.0
WITH_CHANNELS = frozenset({Role.LINEAR_INPUT, Role.NORM_OUTPUT, Role.RESIDUAL})


def outlier_channels(graph: LayerGraph, saved: Mapping[int, Tensor]) -> dict[int, int]:
    """By buffer, the number of outlier channels of the saved tensors that have any.

    ``saved`` holds, by buffer, the base tensors of saved activations; those that outlier codecs are made for are
    looked at, channels along the last dimension. Waits for the device once."""
    counts: dict[int, Tensor] = {}
    for index in graph.saved:
        if index in saved and graph.role(index) in WITH_CHANNELS and _has_channels(graph.buffers[index]):
            statistics = ChannelStatistics(saved[index].shape[-1], saved[index].device)
            statistics.update(saved[index])
            counts[index] = (statistics.z_scores() > THRESHOLD).sum()
    if not counts:
        return {}
    numbers = torch.stack(list(counts.values())).tolist()
    return {index: number for index, number in zip(counts, numbers, strict=True) if number}


def lossy_action(graph: LayerGraph, evidence: Evidence, buffer: int, codec: str) -> Compress:
    """Hold the buffer with a codec of this name: an outlier codec with columns for what the evidence shows."""
    if not codec.startswith("outlier"):
        return Compress(codec)
    channels = graph.buffers[buffer].base.size[-1]
    columns = reserved_columns(channels, evidence.outlier_channels.get(buffer, 0))
    return Compress(codec, (("columns", columns),))


def _has_channels(buffer: Buffer) -> bool:
    return bool(buffer.base.size) and buffer.base.dtype in FLOAT_DTYPES - {"float64"} and is_dense(buffer)
