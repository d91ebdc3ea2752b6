"""Prices for a device that is not there, from what each op of a traced layer computes and moves (counts.py).

    op_us = launch + max(flops / achievable flops, bytes / achievable bandwidth)             (roofline)
    collective_us = launch + bytes sent / achievable link bandwidth
    codec: the tensor and its packed form moved once, either way

A layer's step is its forward and the backward of analytic_backward.py. Ops run one after the other, as they do on a
stream; what overlaps in a real step (collectives with products) is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from megatron_adacc.codecs import Codec
from megatron_adacc.cost.analytic_backward import backward_work
from megatron_adacc.cost.counts import FREE, Work, collective_bytes, is_half_of_dropout, op_leaf, op_work
from megatron_adacc.cost.devices import DeviceSpec
from megatron_adacc.cost.prices import CodecPrice
from megatron_adacc.graph.model import LayerGraph, Op


class AnalyticPrices:
    """The ``Prices`` of a device from the table. ``ranks``: how many take part in collectives whose sizes do not
    tell, such as an all-reduce."""

    def __init__(self, device: DeviceSpec, ranks: int = 1) -> None:
        self._device = device
        self._ranks = ranks

    def op_us(self, graph: LayerGraph, op: int) -> float | None:
        """See ``Prices``. None for an op that may not run again."""
        found = graph.ops[op]
        return None if found.barrier is not None else self.forward_us(graph, found)

    def ops_us(self, graph: LayerGraph, ops: Iterable[Op]) -> float:
        """Microseconds of these ops of the forward in a row."""
        return sum(self.forward_us(graph, op) for op in ops if not is_half_of_dropout(graph, op))

    def forward_us(self, graph: LayerGraph, op: Op) -> float:
        """Microseconds of any op of the forward."""
        if op_leaf(op) in FREE:
            return 0.0
        if op.collective:
            sent = collective_bytes(graph, op, self._ranks)
            return self._device.launch_us + 1e6 * sent / self._device.achievable_link
        return self._work_us(op_work(graph, op))

    def step_us(self, graph: LayerGraph) -> float:
        """See ``Prices``."""
        forward = self.ops_us(graph, graph.ops)
        backward = sum(self._work_us(work) for work in backward_work(graph))
        # The gradient of an all-gather is a reduce-scatter of the same bytes, that of an all-reduce another one.
        collectives = sum(self.forward_us(graph, op) for op in graph.ops if op.collective)
        return forward + backward + collectives

    def codec(self, codec: Codec, size: Sequence[int], dtype: torch.dtype) -> CodecPrice:
        """See ``Prices``."""
        moved = math.prod(size) * dtype.itemsize + codec.packed_bytes(tuple(size), dtype)
        us = self._work_us(Work(0, moved))
        return CodecPrice(us, us)

    def _work_us(self, work: Work) -> float:
        device = self._device
        computing = work.flops / device.matmul_flops(work.dtype)
        moving = work.bytes / device.achievable_bandwidth
        return device.launch_us + 1e6 * max(computing, moving)
