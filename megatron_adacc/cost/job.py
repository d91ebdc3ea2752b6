"""A training job as far as memory goes: the model, how it is split over ranks, and how it is trained. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, tensors
from megatron_adacc.cost.in_flight import Schedule
from megatron_adacc.cost.outer_activations import OuterShape
from megatron_adacc.cost.static_memory import ONE_BUCKET, Buckets, StaticBytes, Training, of_chunk
from megatron_adacc.errors import UserError


@dataclass(frozen=True)
class Job:
    """``stages[p][c]``: chunk c of pipeline stage p. ``buckets``: of the first chunk of the first stage; all others
    have one bucket. ``outer``: the shape of what flows outside the layers.

    Raises UserError where the stages do not hold the model's layers."""

    model: GptModel
    stages: tuple[tuple[Chunk, ...], ...]
    schedule: Schedule
    training: Training
    outer: OuterShape
    tensor_parallel: int = 1
    buckets: Buckets = ONE_BUCKET

    def __post_init__(self) -> None:
        layers = sum(chunk.layers for stage in self.stages for chunk in stage)
        if layers != self.model.num_layers:
            raise UserError(f"The stages hold {layers} layers, but the model has {self.model.num_layers}.")

    def static_bytes(self, stage: int, rank: int | None = None) -> StaticBytes:
        """Parameters, gradients and optimizer state of a rank on `stage`; `rank` among its data-parallel ranks, None
        for the one that holds most."""
        total = StaticBytes()
        for index, chunk in enumerate(self.stages[stage]):
            first = stage == 0 and index == 0
            buckets = self.buckets if first else Buckets(None, self.buckets.for_bandwidth)
            total += of_chunk(tensors(self.model, chunk, self.tensor_parallel), self.training, rank, buckets)
        return total

    def parameters(self, stage: int) -> int:
        """Parameters on one rank of `stage`."""
        return sum(
            tensor.elements
            for chunk in self.stages[stage]
            for tensor in tensors(self.model, chunk, self.tensor_parallel)
        )
