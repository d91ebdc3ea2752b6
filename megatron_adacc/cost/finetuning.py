"""Bytes of a fine-tuning on a frozen base: the base in some format, adapters, and what trains them.

A base's linear layers inside the transformer layers have the format; embeddings, norms, biases and the output layer
stay as they are. With n = in * out elements of a weight of w bytes each (adapters/frozen.py):

    16bit        w n
    nf4          36 ceil(n / 64)
    nf4-double   33 ceil(n / 64) + 4 ceil(ceil(n / 64) / 256) + 4
    int8         n + 4 out                               and columns of outlier features, which are not counted
    gptq4        (block / 2 + 5) out ceil(in / block)    a block is 16 to 128 columns

An adapter of rank r has r (in + out) parameters. They, not the base, have gradients and optimizer state
(cost/static_memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, Tensor
from megatron_adacc.cost.static_memory import StaticBytes, Training, of_elements
from megatron_adacc.errors import UserError

if TYPE_CHECKING:
    from megatron_adacc.cost.job import Job

FORMATS = ("16bit", "nf4", "nf4-double", "int8", "gptq4")

# Elements that adapters/frozen.py decodes at a time.
DECODED_ELEMENTS = 2**20

# Where only the number of parameters is known, the model has layers of 12 h^2 parameters (attention 4, MLP 8), and h is
# this many times their number: 8192 / 80 of LLaMA-65B (arXiv 2302.13971, table 2).
WIDTH_PER_LAYER = 102.4


@dataclass(frozen=True)
class Linear:
    """The weight of a linear layer, as a rank holds it: [outputs, inputs]. ``column``: whether tensor-parallel ranks
    share its outputs."""

    name: str
    outputs: int
    inputs: int
    column: bool

    def adapter(self, rank: int) -> tuple[Tensor, Tensor]:
        """A and B."""
        return Tensor(f"{self.name}.lora_a", rank * self.inputs), Tensor(f"{self.name}.lora_b", rank * self.outputs)


@dataclass(frozen=True)
class FineTuning:
    """Bytes of a rank. ``base``: of ``parameters``; ``adapters``: of ``trained`` parameters; ``full``: what training
    all parameters would take; ``inputs``: of the layers, as --recompute-granularity full keeps them, and ``outside``:
    activations outside the layers, at most; both None where no shapes are known."""

    parameters: int
    base: int
    trained: int
    adapters: StaticBytes
    full: StaticBytes
    inputs: int | None = None
    outside: int | None = None

    @property
    def total(self) -> int:
        """All that is counted."""
        return self.base + self.adapters.total + (self.inputs or 0) + (self.outside or 0)


@dataclass(frozen=True)
class Adapters:
    """What is trained beside a frozen base: adapters of a rank, by the last names of the layers that get one."""

    rank: int
    targets: tuple[str, ...]
    format: str = "16bit"

    def matrices(self, layer: Iterable[Linear], layers: int) -> tuple[Tensor, ...]:
        """A and B of so many layers like this one."""
        beside = [each for each in layer if each.name.rpartition(".")[2] in self.targets]
        return tuple(
            replace(tensor, name=f"decoder.layers.{index}.{tensor.name}")
            for index in range(layers)
            for each in beside
            for tensor in each.adapter(self.rank)
        )

    def base_bytes(self, layer: Iterable[Linear], chunk: Chunk, elements: int, element_bytes: int) -> int:
        """Of a chunk's frozen parameters, `elements` in all."""
        weights = list(layer)
        others = elements - chunk.layers * sum(each.outputs * each.inputs for each in weights)
        held = sum(weight_bytes(self.format, each.outputs, each.inputs, element_bytes) for each in weights)
        return others * element_bytes + chunk.layers * held

    def decoding_bytes(self, layer: Iterable[Linear]) -> int:
        """What decoding a weight needs beside its result, at most: eight bytes an element of a piece."""
        if self.format == "16bit":
            return 0
        return 8 * min(DECODED_ELEMENTS, max(each.outputs * each.inputs for each in layer))


def weight_bytes(format: str, outputs: int, inputs: int, element_bytes: int) -> int:
    """Bytes of one weight in a format. Raises UserError for a format that is not known."""
    n = outputs * inputs
    blocks = -(-n // 64)
    match format:
        case "16bit":
            return n * element_bytes
        case "nf4":
            return 36 * blocks
        case "nf4-double":
            return 33 * blocks + 4 * -(-blocks // 256) + 4
        case "int8":
            return n + 4 * outputs
        case "gptq4":
            block = gptq_block(inputs)
            return outputs * -(-inputs // block) * (block // 2 + 5)
    raise UserError(f"The base is {format!r}, but the known formats are {', '.join(FORMATS)}.")


def gptq_block(columns: int) -> int:
    """Columns that share a scale, as adapters/gptq.py chooses them."""
    divisors = (size for size in range(128, 15, -2) if columns % size == 0)
    return next(divisors, min(128, columns + columns % 2))


def linears(model: GptModel, tensor_parallel: int = 1) -> tuple[Linear, ...]:
    """The linear layers of one transformer layer on one of `tensor_parallel` ranks."""
    queries = model.num_attention_heads * model.kv_channels // tensor_parallel
    keys = model.num_query_groups * model.kv_channels // tensor_parallel
    width = model.ffn_hidden_size // tensor_parallel
    return (
        Linear("self_attention.linear_proj", model.hidden_size, queries, False),
        Linear("self_attention.linear_qkv", queries + 2 * keys, model.hidden_size, True),
        Linear("mlp.linear_fc1", 2 * width if model.gated else width, model.hidden_size, True),
        Linear("mlp.linear_fc2", model.hidden_size, width, False),
    )


def of_parameters(parameters: int, format: str, rank: int, training: Training) -> FineTuning:
    """Of a model of which only the number of parameters is known: all of them in the format, adapters beside all linear
    layers of the model that WIDTH_PER_LAYER says.

    Raises UserError for numbers that cannot be meant."""
    _check(rank, training)
    full = of_elements(parameters, training)
    hidden = round((WIDTH_PER_LAYER * parameters / 12) ** (1 / 3)) or 1
    layer = ((hidden, hidden), (3 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    counted = sum(outputs * inputs for outputs, inputs in layer)
    held = sum(weight_bytes(format, *shape, training.parameter_bytes) for shape in layer)
    trained = round(parameters / counted * rank * sum(map(sum, layer)))
    base = -(-parameters * held // counted)
    return FineTuning(parameters, base, trained, of_elements(max(trained, 1), training), full)


def of_job(job: Job, stage: int, format: str, rank: int, targets: Iterable[str]) -> FineTuning:
    """Of a rank on a pipeline stage of a job.

    Raises UserError for numbers that cannot be meant and for targets that the layers do not have."""
    _check(rank, job.training)
    layer = linears(job.model, job.tensor_parallel)
    wanted = set(targets)
    known = {linear.name.rpartition(".")[2] for linear in layer}
    for name in sorted(wanted - known):
        raise UserError(f"An adapter is asked for {name!r}, but the layers have {', '.join(sorted(known))}.")
    tuned = replace(job, adapters=Adapters(rank, tuple(wanted), format), outer=replace(job.outer, frozen=True))
    room, frozen = tuned.room(stage), tuned.frozen_bytes(stage)
    in_flight = sum(
        count * chunk.layers for count, chunk in zip(_in_flight(job, stage), job.stages[stage], strict=True)
    )
    return FineTuning(
        parameters=job.parameters(stage),
        base=frozen,
        trained=sum(tensor.elements for chunk in tuned.trained(stage) for tensor in chunk),
        adapters=replace(room.static, parameters=room.static.parameters - frozen),
        full=job.static_bytes(stage),
        inputs=in_flight * job.outer.boundary_bytes,
        outside=room.fixed_bytes - room.static.total + max(room.transient_bytes, room.end_bytes),
    )


def _in_flight(job: Job, stage: int) -> tuple[int, ...]:
    from megatron_adacc.cost.in_flight import heaviest

    return tuple(heaviest(job.schedule, stage, [chunk.layers for chunk in job.stages[stage]]))


def _check(rank: int, training: Training) -> None:
    if rank < 1:
        raise UserError(f"The rank of an adapter is {rank}, but it must be at least 1.")
    if training.zero > 1:
        raise UserError("Adapters are not trained with fully sharded parameters: --zero must be 0 or 1.")
