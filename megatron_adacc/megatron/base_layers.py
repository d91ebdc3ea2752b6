"""Bases of fewer bits in Megatron's column- and row-parallel linear layers (formats: adapters/frozen.py).

Each rank quantizes its own part of a weight, after it was loaded: blocks, rows and outlier columns are those of the
part. The product and its communication are Megatron's; only the weight is decoded where it is used, and again in the
backward pass. Calibrated formats run the model on text as Megatron does, over all pipeline stages, and after that each
layer by itself; tensor-parallel ranks then add up what they saw, where each saw a part of the sequence, and
data-parallel ranks take the codes of the first of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_adacc.adapters import bases, calibration, frozen
from megatron_adacc.megatron.lora_layers import LoraColumnParallelLinear, LoraRowParallelLinear


class _Quantized(nn.Module):
    """What stands in for the product of a parallel linear layer whose weight is a FrozenWeight."""

    weight: frozen.FrozenWeight
    tp_group: Any

    def _forward_impl(
        self, input: Tensor, weight: frozen.FrozenWeight, bias: Tensor | None, *, allreduce_dgrad: bool,
        sequence_parallel: bool, tp_group: Any, **_: Any,
    ) -> Tensor:  # fmt: skip
        """As linear_with_frozen_weight (megatron/core/tensor_parallel/layers.py)."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        return frozen.linear(input, weight, bias, tp_group if allreduce_dgrad else None)


class QuantizedColumnParallelLinear(_Quantized, ColumnParallelLinear):
    """ColumnParallelLinear with a FrozenWeight; input and output as its parent's."""


class QuantizedRowParallelLinear(_Quantized, RowParallelLinear):
    """RowParallelLinear with a FrozenWeight; input and output as its parent's."""


class QuantizedLoraColumnParallelLinear(_Quantized, LoraColumnParallelLinear):  # type: ignore[misc]
    """LoraColumnParallelLinear with a FrozenWeight."""


class QuantizedLoraRowParallelLinear(_Quantized, LoraRowParallelLinear):  # type: ignore[misc]
    """LoraRowParallelLinear with a FrozenWeight."""


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    ColumnParallelLinear: QuantizedColumnParallelLinear,
    RowParallelLinear: QuantizedRowParallelLinear,
    LoraColumnParallelLinear: QuantizedLoraColumnParallelLinear,
    LoraRowParallelLinear: QuantizedLoraRowParallelLinear,
}


def quantize(chunks: Sequence[Any], format: str, sequences: Tensor | None, micro_batch: int) -> dict[str, Any]:
    """Give fewer bits to all parallel linear layers inside the transformer layers of this rank's model chunks.

    Args:
        chunks: not wrapped.
        format: one of frozen.FORMATS.
        sequences: token ids to calibrate with, int64 [sequences, length], the same on all ranks; None for formats that
            are not calibrated.
        micro_batch: sequences of one call of the model.

    Returns:
        the new weights by full name, "chunk.path".

    Raises:
        UserError: as bases.quantize()."""
    stacks = [[module for module in chunk.modules() if isinstance(module, TransformerLayer)] for chunk in chunks]
    linears = {
        f"{number}.{name}": module
        for number, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if type(module) in _KINDS and _inside(name, chunk)
    }
    shared = bases.Shared(lambda name, statistic, by: _combine(linears[name], statistic, by), _largest)
    run = None if sequences is None else lambda: _run(chunks, sequences, micro_batch)
    with calibration.evaluating(chunks):
        made = bases.quantize(linears, format, run=run, stacks=stacks, kinds=_KINDS, shared=shared)
    if sequences is not None:
        _from_first_copy(list(made.values()))
    return made


@contextlib.contextmanager
def without_gathering(model: Sequence[Any]) -> Iterator[None]:
    """Inside, the hooks are away by which DDP (--overlap-param-gather) fetches parameters before each module: it has
    one for each module, and knows no module that comes later."""
    with contextlib.ExitStack() as stack:
        for chunk in model:
            if getattr(chunk, "use_forward_hook", False) and chunk.remove_forward_pre_hook_handles:
                chunk.disable_forward_pre_hook(param_sync=False)
                stack.callback(chunk.enable_forward_pre_hook)
        yield


def _inside(name: str, chunk: nn.Module) -> bool:
    path = name
    while path:
        path = path.rpartition(".")[0]
        if isinstance(chunk.get_submodule(path), TransformerLayer):
            return True
    return False


def _combine(module: Any, statistic: Tensor, by: str) -> None:
    """A column-parallel layer gathers its input where that is a part of the sequence: its hook saw the part."""
    if isinstance(module, ColumnParallelLinear) and module.sequence_parallel:
        operation = {"max": torch.distributed.ReduceOp.MAX, "sum": torch.distributed.ReduceOp.SUM}[by]
        torch.distributed.all_reduce(statistic, op=operation, group=module.tp_group)


def _largest(counts: dict[str, int]) -> dict[str, int]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, counts)
    return {name: max(one.get(name, 0) for one in everyone) for one in everyone for name in one}


def _from_first_copy(weights: list[frozen.FrozenWeight]) -> None:
    """All data-parallel ranks have the bits of the first: sums over many tokens may round otherwise elsewhere."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        first = torch.distributed.get_global_rank(group, 0)
        for weight in weights:
            for part in weight.parts():
                torch.distributed.broadcast(part, first, group=group)


def _run(chunks: Sequence[Any], sequences: Tensor, micro_batch: int) -> None:
    """The model's forward on all sequences, by Megatron's own schedule."""
    # The interleaved schedule wants as many micro-batches as stages.
    together = parallel_state.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
    count, length = sequences.shape
    rows = torch.arange(-(-count // (micro_batch * together)) * micro_batch * together) % count
    batches = sequences[rows].view(-1, together, micro_batch, length)
    schedule = get_forward_backward_func()
    with torch.no_grad():
        for group in batches:
            iterators = [iter(group) for _ in chunks]
            schedule(
                forward_step_func=_forward_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=list(chunks),
                num_microbatches=together,
                seq_length=length,
                micro_batch_size=micro_batch,
                decoder_seq_length=length,
                forward_only=True,
                collect_non_loss_data=True,
            )


def _forward_step(data_iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    tokens = next(data_iterator)
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = model(tokens.cuda(), positions.cuda(), mask.cuda(), labels=None)
    return output, lambda _, non_loss_data: None
