"""LoRA beside Megatron's column- and row-parallel linear layers (formulas: adapters/lora.py).

With t tensor-parallel ranks, s tokens, and W0 split as Megatron splits it:

    column   W0 [out / t, in]   A [r, in] on every rank    B [out / t, r] by rows    y = y0 + B (A x)
    row      W0 [out, in / t]   A [r, in / t] by columns   B [out, r] on every rank  y = y0 + B (A x, summed over ranks)

What travels between ranks is r wide. Without sequence parallelism the column's A x is the same on all ranks, and its
gradient is summed over them; the row's A x is summed in the forward. With it, x of a column and y of a row are parts of
the sequence: A x is gathered before B, and reduced and scattered before B. Then the matrix that is on every rank sees
a part of the sequence, so that its gradient is a part of a sum: it is marked `sequence_parallel`, and Megatron adds the
parts after the backward pass (megatron/core/distributed/finalize_model_grads.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_adacc.adapters import lora
from megatron_adacc.errors import UserError


class LoraColumnParallelLinear(lora.Adapted, ColumnParallelLinear):
    """ColumnParallelLinear with an adapter; input and output as its parent's."""

    # Whether the rows are two halves, gate and value, that Megatron's checkpoints keep apart.
    lora_gated: bool

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if weight is not None or runtime_gather_output:
            raise UserError("A linear layer that is called with a weight, or gathers its output, can have no adapter.")
        output, bias = super().forward(input_)
        if self.lora_unmerged is not None:
            return output, bias
        inner = F.linear(input_, self.lora_a) * self.lora_scale
        if self.sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner, group=self.tp_group)
        else:
            inner = copy_to_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + F.linear(inner, self.lora_b), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        """As the parent's; B is sharded as the weight is."""
        found = _sharded(self, {"weight": 0, "bias": 0, "lora_b": 0}, prefix, sharded_offsets, metadata)
        if self.lora_gated:
            name = f"{prefix}lora_b"
            singletons = (metadata or {}).get("singleton_local_shards", False)
            found[name] = apply_swiglu_sharded_factory(
                found[name], sharded_offsets, singletons, tp_group=self.tp_group, dp_group=metadata["dp_cp_group"]
            )
        return found


class LoraRowParallelLinear(lora.Adapted, RowParallelLinear):
    """RowParallelLinear with an adapter; input and output as its parent's."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        if self.lora_unmerged is not None:
            return output, bias
        inner = F.linear(input_, self.lora_a) * self.lora_scale
        if self.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.tp_group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + F.linear(inner, self.lora_b), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        """As the parent's; A is sharded as the weight is."""
        return _sharded(self, {"weight": 1, "lora_a": 1}, prefix, sharded_offsets, metadata)


def _sharded(module: Any, axes: dict[str, int], prefix: str, offsets: tuple, metadata: Any) -> dict:
    found: dict = make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
    return found


def inject(chunk: Any, targets: Iterable[str], rank: int, alpha: float, seed: int) -> list[str]:
    """Give an adapter to every linear layer called one of `targets` inside the transformer layers of a model chunk, and
    freeze everything else. Before DDP and the optimizer are made.

    A starts as it does on one rank: this rank's part of one matrix, drawn for the layer's number in the whole model.

    Returns:
        the full names of the adapted layers.

    Raises:
        UserError: a target that names no layer, or one that cannot have an adapter."""
    found = lora.find_targets(_inside_layers(chunk), targets)
    for name, module in found.items():
        _refuse(name, module)
    lora.refuse_shared(chunk, found)
    for name, module in found.items():
        _adapt(module, rank, alpha / rank, seed, _number(chunk, name))
    lora.freeze_base(chunk)
    if chunk.config.recompute_granularity is not None:
        _train_through_embedding(chunk)
    return list(found)


def _inside_layers(chunk: nn.Module) -> list[tuple[str, nn.Module]]:
    layers = [name for name, module in chunk.named_modules() if isinstance(module, TransformerLayer)]
    return [pair for pair in chunk.named_modules() if any(pair[0].startswith(f"{layer}.") for layer in layers)]


def _number(chunk: nn.Module, name: str) -> str:
    """A layer's name that does not depend on which rank has it: its transformer layer's number, and the path inside."""
    path, inside = name, ""
    while True:
        path, _, last = path.rpartition(".")
        inside = f"{last}.{inside}" if inside else last
        layer = chunk.get_submodule(path)
        if isinstance(layer, TransformerLayer):
            return f"{layer.layer_number}.{inside}"


def _refuse(name: str, module: Any) -> None:
    kind = type(module)
    if kind not in (ColumnParallelLinear, RowParallelLinear):
        raise UserError(
            f"{name} is a {kind.__name__} ({kind.__module__}), but adapters go beside Megatron's own column- and "
            "row-parallel linear layers: use --transformer-impl local, or leave it out of --adacc-lora-targets."
        )
    unusual = (
        module.is_expert
        or module.gtp_remat_size > 1
        or (
            kind is ColumnParallelLinear
            and (module.gather_output or module.disable_grad_reduce or module.weight is None)
        )
        or (kind is RowParallelLinear and not module.input_is_parallel)
    )
    if unusual:
        raise UserError(
            f"{name} is an expert, shares its weight or gathers its output, and can have no adapter: leave it out of "
            "--adacc-lora-targets."
        )


def _adapt(module: Any, rank: int, scale: float, seed: int, number: str) -> None:
    column = isinstance(module, ColumnParallelLinear)
    outputs, inputs = module.weight.shape
    a = lora.initial_a(rank, module.input_size, seed, number)
    if not column:
        a = a.chunk(module.tp_group.size(), dim=1)[module.tp_group.rank()]
    assert a.shape[1] == inputs
    kind = LoraColumnParallelLinear if column else LoraRowParallelLinear
    lora.adapt(module, kind, a, torch.zeros(outputs, rank), scale)
    if column:
        last = number.rpartition(".")[2]
        module.lora_gated = bool(module.config.gated_linear_unit) and last == "linear_fc1"
    split, whole = (module.lora_b, module.lora_a) if column else (module.lora_a, module.lora_b)
    set_tensor_model_parallel_attributes(split, True, 0 if column else 1, module.weight.partition_stride)
    whole.sequence_parallel = module.sequence_parallel
    for matrix in (split, whole):
        matrix.allreduce = True


def _train_through_embedding(chunk: nn.Module) -> None:
    """Let the embedding's output have a gradient. It is frozen; but Megatron's recompute skips the backward pass of
    what it recomputes where no input has a gradient, and with it the adapters of the first layer."""
    embedding = getattr(chunk, "embedding", None)
    if embedding is None:
        return

    def mark(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()
        return output

    embedding.register_forward_hook(mark)
