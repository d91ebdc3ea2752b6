"""A training job as far as memory goes: the model, how it is split over ranks, and how it is trained. Plain data.

    bytes of a rank = fixed + what the layers hold and need + at the end of the forward: transient

`Job.room` says the parts that no plan for the layers changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_adacc.cost.finetuning import Adapters, Linear, linears
from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, Tensor, tensors
from megatron_adacc.cost.in_flight import Schedule, held_bytes
from megatron_adacc.cost.outer_activations import OuterBytes, OuterShape
from megatron_adacc.cost.outer_activations import of_chunk as outer_of_chunk
from megatron_adacc.cost.static_memory import (
    ONE_BUCKET,
    Buckets,
    StaticBytes,
    Training,
    gathered_bytes,
    of_chunk,
    step_bytes,
)
from megatron_adacc.errors import UserError

# States of generators, scalars, copies inside collectives: 20,000 to 95,000 bytes were seen beside all that is
# counted, on the CPU.
SMALL_BYTES = 2**17


@dataclass(frozen=True)
class StageRoom:
    """What a rank needs beside its layers' activations.

    ``static``: through the whole training. ``fixed_bytes``: all that is alive whenever a layer runs: the static
    bytes, the scratch buffer, what fully sharded ranks gather, a micro-batch of data, gradients between stages, what
    embedding and head of the micro-batches in flight hold (but the head of the running one), the gradient of a tied
    weight.
    ``transient_bytes``: beside that, from the end of the last layer's forward to the beginning of its backward.
    ``end_bytes``: beside ``fixed_bytes``, when all layers of the running micro-batch had their backward.
    ``step_bytes``: in all, while the optimizer steps; no activation is alive then."""

    static: StaticBytes
    fixed_bytes: int
    transient_bytes: int
    end_bytes: int
    step_bytes: int


@dataclass(frozen=True)
class Job:
    """``stages[p][c]``: chunk c of pipeline stage p. ``buckets``: of the first chunk of the first stage; all others
    have one bucket. ``outer``: the shape of what flows outside the layers. ``adapters``: what alone is trained, beside
    a frozen model; None where the model is. The columns that an int8 base keeps for outlier features are not counted.

    Raises UserError where the stages do not hold the model's layers."""

    model: GptModel
    stages: tuple[tuple[Chunk, ...], ...]
    schedule: Schedule
    training: Training
    outer: OuterShape
    tensor_parallel: int = 1
    buckets: Buckets = ONE_BUCKET
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        layers = sum(chunk.layers for stage in self.stages for chunk in stage)
        if layers != self.model.num_layers:
            raise UserError(f"The stages hold {layers} layers, but the model has {self.model.num_layers}.")

    def tensors(self, stage: int) -> tuple[tuple[Tensor, ...], ...]:
        """The parameters of each chunk of `stage`, as one rank holds them."""
        return tuple(tensors(self.model, chunk, self.tensor_parallel) for chunk in self.stages[stage])

    def parameters(self, stage: int) -> int:
        """Parameters on one rank of `stage`."""
        return sum(tensor.elements for chunk in self.tensors(stage) for tensor in chunk)

    @property
    def _linears(self) -> tuple[Linear, ...]:
        return linears(self.model, self.tensor_parallel)

    def trained(self, stage: int) -> tuple[tuple[Tensor, ...], ...]:
        """The parameters of each chunk of `stage` that are trained."""
        if self.adapters is None:
            return self.tensors(stage)
        return tuple(self.adapters.matrices(self._linears, chunk.layers) for chunk in self.stages[stage])

    def frozen_bytes(self, stage: int) -> int:
        """Bytes of the parameters of a rank on `stage` that are not trained."""
        if self.adapters is None:
            return 0
        element_bytes = self.training.parameter_bytes
        return sum(
            self.adapters.base_bytes(self._linears, chunk, sum(tensor.elements for tensor in own), element_bytes)
            for chunk, own in zip(self.stages[stage], self.tensors(stage), strict=True)
        )

    def _buckets(self, stage: int, chunk: int) -> Buckets:
        return self.buckets if stage == chunk == 0 else Buckets(None, self.buckets.for_bandwidth)

    def static_bytes(self, stage: int, rank: int | None = None) -> StaticBytes:
        """Parameters, gradients and optimizer state of a rank on `stage`; `rank` among its data-parallel ranks, None
        for the one that holds most."""
        total = StaticBytes(parameters=self.frozen_bytes(stage))
        for index, chunk in enumerate(self.trained(stage)):
            total += of_chunk(chunk, self.training, rank, self._buckets(stage, index))
        return total

    def outer_bytes(self, stage: int) -> tuple[OuterBytes, ...]:
        """What each chunk of `stage` holds and needs outside its layers."""
        return tuple(outer_of_chunk(self.outer, chunk) for chunk in self.stages[stage])

    def room(self, stage: int, rank: int | None = None) -> StageRoom:
        """What a rank on `stage` needs beside its layers' activations; `rank` as above."""
        static = self.static_bytes(stage, rank)
        outer = self.outer_bytes(stage)
        # Step counters lie on the host.
        base = static.total + (0 if self.outer.cuda else static.counters)
        base += max(gathered_bytes(chunk, self.training) for chunk in self.trained(stage))
        base += 0 if self.adapters is None else self.adapters.decoding_bytes(self._linears)
        base += self.outer.scratch_bytes + self.outer.batch_bytes + SMALL_BYTES
        if self.tensor_parallel > 1 and not self.outer.cuda and not self.outer.sequence_parallel:
            base += self.outer.boundary_bytes  # what gloo copies while it reduces
        head, tied = outer[-1].head, outer[-1].backward
        held = held_bytes(self.schedule, stage, [each.held for each in outer])
        fixed = base + held - head + tied + max(each.stage_gradients for each in outer)
        transient = head + max(outer[-1].forward_end, outer[-1].backward_start) - tied
        step = step_bytes(self.trained(stage), self.training, self.outer.cuda, rank, self._buckets(stage, 0))
        return StageRoom(static, fixed, transient, outer[0].backward_end - tied, base + step)
