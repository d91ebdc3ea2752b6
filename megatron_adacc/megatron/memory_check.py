"""The memory model beside megatron.training.theoretical_memory_usage, where both speak.

Megatron's estimate is a formula for bf16 training with Adam. It counts matrices, norms and word embeddings; the
differences to the memory model are its simplifications, and `static_differences` names them byte for byte.
"""

import copy
from argparse import Namespace
from collections.abc import Callable

from megatron_adacc.cost.gpt_parameters import Tensor
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.static_memory import Training, of_chunk

# Megatron's bytes a parameter: 2 + 4 + 4 + 8.
_MEGATRON_BYTES = 18


def _with_vocabulary(args: Namespace, job: Job) -> Namespace:
    """A copy of the arguments that has what a tokenizer would have added; Megatron's functions write into it."""
    copied = copy.copy(args)
    copied.padded_vocab_size = job.model.vocab_size
    return copied


def megatron_static_bytes(args: Namespace, job: Job) -> int:
    """Megatron's bytes of parameters, gradients and optimizer state on its "most loaded shard", rounded."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    return round(compute_weight_and_optimizer_memory(_with_vocabulary(args, job)))


def megatron_outside_bytes(args: Namespace, job: Job) -> int:
    """Megatron's bytes of activations outside the layers of a job without a pipeline, for one micro-batch."""
    from megatron.training.theoretical_memory_usage import compute_activation_memory

    without_layers = _with_vocabulary(args, job)
    without_layers.num_layers = 0
    return round(compute_activation_memory(without_layers, job.schedule.micro_batches))


def static_differences(job: Job) -> dict[str, int]:
    """What the memory model has on the first stage that Megatron's estimate has not, in bytes (negative: the other
    way round), for a job without a pipeline on one tensor-parallel rank. The sum is the whole difference."""
    (chunk,) = job.tensors(0)
    own = of_chunk(chunk, job.training)
    biases = _elements(chunk, lambda tensor: tensor.name.endswith(".bias") and "layernorm" not in tensor.name)
    positions = _elements(chunk, lambda tensor: "position" in tensor.name)
    whole = _elements(chunk, lambda _: True)
    sharded = job.training.zero == 1
    bf16 = of_chunk(chunk, Training("bf16", zero=job.training.zero, data_parallel=job.training.data_parallel))
    share = 6 + 12 / job.training.data_parallel if sharded else _MEGATRON_BYTES
    return {
        "biases of linear layers": round(biases * share),
        "position embedding": round(positions * share),
        "padding of the distributed optimizer's buffers": round(bf16.total - whole * share),
        "another precision or optimizer than bf16 with Adam": own.total - bf16.total,
    }


def _elements(chunk: tuple[Tensor, ...], chosen: Callable[[Tensor], bool]) -> int:
    return sum(tensor.elements for tensor in chunk if chosen(tensor))


def outside_differences(job: Job) -> dict[str, int]:
    """As above, for the activations outside the layers of one micro-batch, with 16-bit elements and dropout."""
    shape = job.outer
    tokens = shape.tokens
    return {
        "position indices": 8 * tokens * shape.positions,
        "dropout mask": 0 if shape.dropout else -shape.rows * shape.hidden_size,
        "statistics of the final norm": (4 if shape.rms_norm else 8) * shape.rows,
        "masked targets of the loss": 9 * tokens,
    }
