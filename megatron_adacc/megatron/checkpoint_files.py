"""A checkpoint's model as whole tensors, whatever ranks wrote it, without a job.

    torch        iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt: each rank's parts, its layers numbered from 0
    torch_dist   iter_N/*.distcp, .metadata: whole tensors for who reads them; those of all layers are often one tensor
                 with the layers as first dimension

Both become one mapping of Megatron's own names, with layers numbered through the whole model and a norm under its own
name (Transformer Engine's layers, and torch_dist, name it after the linear layer that follows).

As read from megatron/training/checkpointing.py and the sharded_state_dict() of megatron/core 0.19. Megatron must be
importable (launch.prepare): what is read holds objects of its.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_adacc.errors import UserError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_RANK_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?")
_RENAMED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
# Which dimension of these is divided among tensor-parallel ranks, by name of layer and tensor.
_COLUMN = {"weight": 0, "bias": 0, "lora_b": 0}
_ROW = {"weight": 1, "lora_a": 1}
_DIVIDED = {
    "linear_qkv": _COLUMN,
    "linear_fc1": _COLUMN,
    "linear_proj": _ROW,
    "linear_fc2": _ROW,
    "word_embeddings": {"weight": 0},
    "output_layer": {"weight": 0},
}


@dataclass(frozen=True)
class Files:
    """One checkpoint. ``folder``: of its iteration; ``kind``: torch or torch_dist; ``args``: Megatron's arguments of
    the job that wrote it."""

    folder: Path
    kind: str
    iteration: int | None
    args: Namespace


def find(checkpoint: str, iteration: int | None = None) -> Files:
    """The checkpoint in the folder that --save named, its last iteration or the one given.

    Raises UserError where there is none that can be read."""
    root = Path(checkpoint)
    tracker = root / "latest_checkpointed_iteration.txt"
    if iteration is None:
        if not tracker.is_file():
            raise UserError(f"{checkpoint} has no checkpoint: name the folder that --save named.")
        text = tracker.read_text().strip()
        if text != "release" and not text.isdigit():
            raise UserError(f"{tracker} must have the number of an iteration, not {text[:40]!r}.")
        iteration = None if text == "release" else int(text)
    folder = root / ("release" if iteration is None else f"iter_{iteration:07d}")
    if not folder.is_dir():
        raise UserError(f"{checkpoint} has no folder {folder.name}: the checkpoint is not there, or was moved.")
    if (folder / "metadata.json").is_file() and (folder / ".metadata").is_file():
        from megatron.core.dist_checkpointing import load_common_state_dict

        common = load_common_state_dict(folder)
        return Files(folder, "torch_dist", iteration, common["args"])
    ranks = rank_files(folder)
    if not ranks:
        raise UserError(f"{folder} is of a format that cannot be read: --ckpt-format torch and torch_dist can.")
    return Files(folder, "torch", iteration, load_file(ranks[0, 0])["args"])


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The files of format torch by (tensor-parallel rank, pipeline stage)."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        match = _RANK_FOLDER.fullmatch(path.parent.name)
        if match is not None:
            found[int(match[1]), int(match[2] or 0)] = path
    return found


def load_file(path: Path) -> dict[str, Any]:
    """One rank's file, on the host."""
    # Megatron's own way: the file holds its arguments, whose types are its own.
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    return state


def own_name(name: str) -> str:
    """A tensor under Megatron's own name."""
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name


def whole_model(files: Files, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The model's tensors whose names (see above) are `wanted`, whole, on the host, of the dtypes that were written.

    Raises UserError for a kind of model whose parts are not known."""
    if getattr(files.args, "num_experts", None):
        raise UserError(f"{files.folder} is of a model with experts, whose parts are not known here.")
    return dict(_of_torch_dist(files, wanted) if files.kind == "torch_dist" else _of_torch(files, wanted))


# ---- torch_dist ----


def is_model_key(key: str) -> bool:
    """Whether a key of a torch_dist checkpoint is of the model, not of optimizer, schedule or generators."""
    return key.startswith(("embedding.", "decoder.", "output_layer."))


def load_keys(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The entries of a torch_dist checkpoint whose keys are `wanted`: tensors whole, objects as Megatron wrote them."""
    import io

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    state: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if wanted(key):
            if isinstance(entry, TensorStorageMetadata):
                state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            else:
                state[key] = io.BytesIO()
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def layers_of_key(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of a torch_dist checkpoint by its name (see above): one for each layer where they are stacked. Views."""
    name = own_name(key)
    if not name.startswith("decoder.layers.") or _LAYER.fullmatch(name):
        return {name: tensor}
    inside = name.removeprefix("decoder.layers.")
    return {f"decoder.layers.{number}.{inside}": each for number, each in enumerate(tensor)}


def _of_torch_dist(files: Files, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    def key_wanted(key: str) -> bool:
        probe = own_name(key)
        return is_model_key(key) and "_extra_state" not in key and wanted(probe)

    for key, tensor in load_keys(files.folder, key_wanted).items():
        yield from layers_of_key(key, tensor).items()


# ---- torch ----


def model_keys(state: Mapping[str, Any]) -> list[str]:
    """The chunks of a rank's file, in order."""
    return sorted((key for key in state if re.fullmatch(r"model\d*", key)), key=lambda key: (len(key), key))


def first_layers(chunks: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """(chunk, stage) -> its number of layers, as (chunk, stage) -> the number of its first layer: the model goes
    through the first chunks of all stages before the second ones."""
    found, first = {}, 0
    for place in sorted(chunks):
        found[place] = first
        first += chunks[place]
    return found


def count_layers(model: Mapping[str, Any]) -> int:
    """Layers of one chunk by its tensors' names."""
    return len({match[1] for name in model if (match := _LAYER.fullmatch(name))})


def numbered(name: str, first: int) -> str:
    """The name of a chunk's tensor, whose first layer is the model's number `first`, through the whole model."""
    match = _LAYER.fullmatch(own_name(name))
    return own_name(name) if match is None else f"decoder.layers.{first + int(match[1])}.{match[2]}"


def divided(name: str) -> int | None:
    """The dimension in which tensor-parallel ranks share a tensor; None where each has it whole."""
    path, _, kind = name.rpartition(".")
    return _DIVIDED.get(path.rpartition(".")[2], {}).get(kind)


def is_gated(args: Namespace) -> bool:
    """Whether the rows of linear_fc1 are two halves."""
    return bool(args.swiglu or getattr(args, "quick_geglu", False))


def _halves(name: str, gated: bool) -> bool:
    """Whether each rank has a part of each of two halves."""
    return gated and name.rpartition(".")[0].endswith(".linear_fc1")


def joined(name: str, parts: list[Tensor], gated: bool) -> Tensor:
    """The whole tensor of the ranks' parts."""
    dimension = divided(name)
    if dimension is None or len(parts) == 1:
        return parts[0]
    if _halves(name, gated):
        firsts, seconds = zip(*(part.chunk(2, dimension) for part in parts), strict=True)
        parts = [*firsts, *seconds]
    return torch.cat(parts, dimension)


def part_of(name: str, whole: Tensor, rank: int, ranks: int, gated: bool) -> Tensor:
    """A rank's part of the whole tensor: what joined() joins."""
    dimension = divided(name)
    if dimension is None or ranks == 1:
        return whole
    if _halves(name, gated):
        return torch.cat([half.chunk(ranks, dimension)[rank] for half in whole.chunk(2, dimension)], dimension)
    return whole.chunk(ranks, dimension)[rank]


def _of_torch(files: Files, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    paths = rank_files(files.folder)
    ranks = 1 + max(tensor for tensor, _ in paths)
    stages = 1 + max(stage for _, stage in paths)
    if len(paths) != ranks * stages:
        raise UserError(f"{files.folder} has files of {len(paths)} ranks, not of {ranks} x {stages}: some are gone.")
    states = {place: load_file(path) for place, path in paths.items()}
    chunks = {
        (chunk, stage): states[0, stage][key]
        for stage in range(stages)
        for chunk, key in enumerate(model_keys(states[0, stage]))
    }
    firsts = first_layers({place: count_layers(model) for place, model in chunks.items()})
    for (chunk, stage), model in chunks.items():
        key = model_keys(states[0, stage])[chunk]
        for name, tensor in model.items():
            full = numbered(name, firsts[chunk, stage])
            # A tied embedding is on the last stage too.
            copy = full == "output_layer.weight" and not files.args.untie_embeddings_and_output_weights
            if isinstance(tensor, Tensor) and "_extra_state" not in name and wanted(full) and not copy:
                parts = [states[rank, stage][key][name] for rank in range(ranks)]
                yield full, joined(full, parts, is_gated(files.args))
