"""A base and its adapters as one checkpoint that Megatron loads like any other.

    W = W0 + (alpha / r) B A        in float32, rounded once to W0's dtype

W0 is the weight that the adapters were trained beside: where that had fewer bits and no calibration text made them, it
is quantized again as each rank did then, and decoded; so are the linear layers without an adapter. The columns of int8
and the codes of gptq4 came of a text and of the whole model: there W0 is the base's own, and the command says so.

It has the base's format, layout and arguments, and the model alone: an optimizer's state would be that of other
weights.
"""

from __future__ import annotations

import io
import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_adacc.errors import UserError
from megatron_adacc.megatron import checkpoint_files
from megatron_adacc.megatron.checkpoint_files import Files

# What stands beside the model in a checkpoint, and stays.
_KEPT = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")


# Formats of a base that are functions of the weight alone.
_FROM_WEIGHT = ("nf4", "nf4-double")
_LINEAR = re.compile(r"decoder\.layers\.\d+\..+\.linear_(qkv|proj|fc1|fc2)\.weight")


class Adapters:
    """``state``: A and B by Megatron's full names, layers numbered through the whole model. ``args``: Megatron's
    arguments of the job that trained them. ``merged``: the weights that have been merged so far."""

    def __init__(self, state: Mapping[str, Tensor], args: Namespace) -> None:
        self.state = state
        self._args = args
        self._scale = args.adacc_lora_alpha / args.adacc_lora_rank
        self.merged: set[str] = set()

    @property
    def base_format(self) -> str:
        """The format of the base that they were trained beside."""
        return getattr(self._args, "adacc_base", None) or "16bit"

    @property
    def base_is_known(self) -> bool:
        """Whether the weights that they were trained beside can be made of the base's."""
        return self.base_format in ("16bit", *_FROM_WEIGHT)

    def changes(self, name: str) -> bool:
        """Whether a tensor of this name is another one in the merged model."""
        return name in self.weights or self._decoded(name)

    def _decoded(self, name: str) -> bool:
        return self.base_format in _FROM_WEIGHT and _LINEAR.fullmatch(name) is not None

    def _as_used(self, name: str, weight: Tensor, is_part: bool) -> Tensor:
        """The weight that training used in place of this one, of this one's dtype."""
        if not self._decoded(name):
            return weight
        from megatron_adacc.adapters import frozen

        # A checkpoint of parts can only be loaded by as many ranks: a part is what a rank quantized.
        ranks = 1 if is_part else self._args.tensor_model_parallel_size
        gated = checkpoint_files.is_gated(self._args)
        parts = [
            frozen.FORMATS[self.base_format](
                checkpoint_files.part_of(name, weight, rank, ranks, gated).to(self._args.params_dtype)
            ).dense()
            for rank in range(ranks)
        ]
        return checkpoint_files.joined(name, parts, gated).to(weight.dtype)

    @property
    def weights(self) -> set[str]:
        """The names of the weights that have an adapter."""
        return {name.removesuffix("lora_a") + "weight" for name in self.state if name.endswith("lora_a")}

    def merge(self, name: str, weight: Tensor, whole: tuple[int, ...] | None = None, part: Any = None) -> Tensor:
        """The weight of that name with its adapter; without one, the weight that was used. Where `weight` is a part of
        one of shape `whole`, `part` takes it from the whole.

        Raises UserError where the adapter is not of this weight's shape."""
        used = self._as_used(name, weight, part is not None)
        if name not in self.weights:
            return used
        path = name.removesuffix("weight")
        a, b = self.state[f"{path}lora_a"], self.state[f"{path}lora_b"]
        shape = tuple(weight.shape) if whole is None else whole
        if (b.shape[0], a.shape[1]) != shape:
            raise UserError(
                f"{name} is {list(shape)} in the base, but its adapter is for {[b.shape[0], a.shape[1]]}: this is not "
                "the base that the adapters were trained beside."
            )
        delta = (b.float() @ a.float()).mul_(self._scale)
        self.merged.add(name)
        return (used.float() + (delta if part is None else part(delta))).to(weight.dtype)

    def check_all_merged(self) -> None:
        """Raises UserError for an adapter whose weight was not there."""
        for name in sorted(self.weights - self.merged):
            raise UserError(f"The base has no {name}, which an adapter is for: it is another model.")


def write(base: Files, adapters: Adapters, root: Path) -> None:
    """Write the base with its adapters into the empty folder `root`, as Megatron's --save would. Raises UserError where
    the adapters are not of this base."""
    folder = root / base.folder.name
    folder.mkdir()
    if base.kind == "torch_dist":
        _write_torch_dist(base, adapters, folder)
    else:
        _write_torch(base, adapters, folder)
    adapters.check_all_merged()
    text = "release" if base.iteration is None else str(base.iteration)
    (root / "latest_checkpointed_iteration.txt").write_text(text)


def _write_torch(base: Files, adapters: Adapters, folder: Path) -> None:
    paths = checkpoint_files.rank_files(base.folder)
    ranks = 1 + max(rank for rank, _ in paths)
    gated = checkpoint_files.is_gated(base.args)
    layers = {}
    for (rank, stage), path in paths.items():
        if rank == 0:
            state = checkpoint_files.load_file(path)
            for chunk, key in enumerate(checkpoint_files.model_keys(state)):
                layers[chunk, stage] = checkpoint_files.count_layers(state[key])
    firsts = checkpoint_files.first_layers(layers)
    for (rank, stage), path in paths.items():
        state = checkpoint_files.load_file(path)
        kept = {name: state[name] for name in _KEPT if name in state}
        for chunk, key in enumerate(checkpoint_files.model_keys(state)):
            model = dict(state[key])
            for name, tensor in model.items():
                full = checkpoint_files.numbered(name, firsts[chunk, stage])
                if not isinstance(tensor, Tensor) or not adapters.changes(full):
                    continue
                shape = list(tensor.shape)
                dimension = checkpoint_files.divided(full)
                if dimension is not None:
                    shape[dimension] *= ranks

                def part(delta: Tensor, full: str = full, rank: int = rank) -> Tensor:
                    return checkpoint_files.part_of(full, delta, rank, ranks, gated)

                model[name] = adapters.merge(full, tensor, tuple(shape), part)
            kept[key] = model
        target = folder / path.parent.name
        target.mkdir()
        torch.save(kept, target / path.name)


def _write_torch_dist(base: Files, adapters: Adapters, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItem

    class AsMegatronWrites(DefaultSavePlanner):
        """Objects come as bytes already, which the default planner would pack again."""

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)

    def wanted(key: str) -> bool:
        return checkpoint_files.is_model_key(key) or key.startswith("common_state/")

    state = checkpoint_files.load_keys(base.folder, wanted)
    for key, entry in state.items():
        if isinstance(entry, Tensor):
            for name, layer in checkpoint_files.layers_of_key(key, entry).items():
                layer.copy_(adapters.merge(name, layer))
        else:
            state[key] = _packed(entry, key.startswith("common_state/"))
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(folder),
        planner=AsMegatronWrites(flatten_state_dict=False),
        no_dist=True,
    )
    shutil.copy(base.folder / "metadata.json", folder)
    if (base.folder / "common.pt").is_file():  # an older Megatron's
        common = torch.load(base.folder / "common.pt", map_location="cpu", weights_only=False)
        torch.save({name: value for name, value in common.items() if name in _KEPT}, folder / "common.pt")


def _packed(entry: Any, common: bool) -> io.BytesIO:
    """An object of a torch_dist checkpoint as the bytes that Megatron writes: a list of one. Of the common state, what
    is kept."""
    if isinstance(entry, io.BytesIO):
        entry.seek(0)
        entry = torch.load(entry, weights_only=False)
    if common:
        entry = [{name: value for name, value in entry[0].items() if name in (*_KEPT, "content_metadata")}]
    packed = io.BytesIO()
    torch.save(entry, packed)
    return packed
