"""What the planner asks about time. Measured prices and those from a device table answer alike.

    cost of a plan = sum over ops that run again of op_us + sum over packed buffers of encode_us + decode_us

All prices are microseconds of the device that trains, for one layer and one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_adacc.codecs import Codec
from megatron_adacc.graph.model import LayerGraph


@dataclass(frozen=True)
class CodecPrice:
    """Microseconds to encode a tensor once, and to decode it once."""

    encode_us: float
    decode_us: float


@dataclass(frozen=True)
class StepPrice:
    """Microseconds of a plain forward and backward of a layer, and of the forward alone."""

    step_us: float
    forward_us: float


class Prices(Protocol):
    """Where the planner's times come from."""

    def op_us(self, graph: LayerGraph, op: int) -> float | None:
        """Microseconds to run op ``op`` of the graph again in a backward pass. None: it is never replayed."""
        ...

    def codec(self, codec: Codec, size: Sequence[int], dtype: torch.dtype) -> CodecPrice:
        """What the codec takes for a contiguous tensor of this size and dtype."""
        ...

    def step_us(self, graph: LayerGraph) -> float:
        """Microseconds of a plain forward and backward of the layer."""
        ...
