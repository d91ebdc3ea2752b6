"""Proof of recipes: replay each and compare with the tensor that the forward saved, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_adacc.graph.bits import bits_equal
from megatron_adacc.graph.model import FLOAT_DTYPES, Buffer, LayerGraph, Origin, Role
from megatron_adacc.graph.recipes import Availability, group_recipes
from megatron_adacc.graph.replay import Context, Loader, Replayer, literal_tensor

NOT_ON_ALL_RANKS = "another rank of its process group could not prove it"
REPLAY_DIFFERS = "its replay does not give the saved bits"


@dataclass(frozen=True)
class Evidence:
    """What a trace has shown about the saved buffers of its graph.

    ``verified``: a replay gave their bits. ``refused``: why a buffer is not offered for recompute.
    ``two_valued``: buffers with no recipe that hold at most two values, which one bit an element stores.
    ``outlier_channels``: in how many of its channels a buffer was far larger than in the others, where there are
    such (cost/outliers.py)."""

    verified: frozenset[int]
    refused: Mapping[int, str] = field(default_factory=dict)
    two_valued: frozenset[int] = frozenset()
    outlier_channels: Mapping[int, int] = field(default_factory=dict)


def is_dense(buffer: Buffer) -> bool:
    """Whether the buffer's base tensor covers its whole storage, each byte once."""
    expected = 1
    order = sorted(zip(buffer.base.stride, buffer.base.size, strict=True))
    for stride, size in order:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return buffer.base.offset == 0 and buffer.base.nbytes == buffer.nbytes


def holds_two_values(tensor: Tensor) -> bool:
    """Whether each element has the bits of the smallest or of the largest."""
    if tensor.numel() == 0:
        return False
    if tensor.dtype == torch.bool:
        return True
    low, high = tensor.amin(), tensor.amax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        return False
    return bits_equal(torch.where(tensor == high, high, low), tensor)


def candidates(graph: LayerGraph) -> tuple[tuple[int, ...], dict[int, str]]:
    """Saved buffers that have a recipe when everything with a recipe is dropped, and why the others have
    none. In the order of their writers: what has no recipe is held and may serve the recipes of later ones. (A fused
    dropout's result has a smaller number than its mask, and is made from it.)"""
    writers = {b: graph.buffers[b].writer for b in graph.saved}
    stored = {b for b, writer in writers.items() if writer is None}
    dropped: list[int] = []
    refused: dict[int, str] = {}
    availability = Availability(graph, stored)
    for index in sorted(set(graph.saved) - stored, key=lambda b: (writers[b] or 0, b)):
        problem = availability.problem(index)
        if problem is None:
            dropped.append(index)
        else:
            refused[index] = problem
            stored.add(index)
            availability = Availability(graph, stored)
    return tuple(dropped), refused


def unverified(graph: LayerGraph) -> Evidence:
    """Evidence of a trace whose tensors have no contents (fake tensors): recipes are taken on trust, dropout
    masks are taken for two-valued."""
    dropped, refused = candidates(graph)
    masks = (b for b in refused if graph.role(b) == Role.DROPOUT_MASK and is_dense(graph.buffers[b]))
    return Evidence(frozenset(dropped), refused, frozenset(masks))


def verify(
    graph: LayerGraph, saved: Mapping[int, Tensor], sources: Mapping[int, Tensor], context: Context,
    module: nn.Module, shared: Callable[[Collection[int]], Collection[int]] | None = None,
) -> Evidence:  # fmt: skip
    """Replay every recipe of the graph on the tensors of the forward that was traced.

    ``saved`` holds, by buffer, the base tensors of saved activations, ``sources`` those of parameters, inputs
    and constants. A buffer whose replay differs is refused, and later replays go on from its true bits.
    ``shared`` gives those of some buffers on which all ranks that replay together agree: it is asked before
    the replay, so that all issue the same collectives, and after it."""
    dropped, refused = candidates(graph)
    if shared is not None:
        common = shared(dropped)
        refused |= {b: NOT_ON_ALL_RANKS for b in dropped if b not in common}
        dropped = tuple(b for b in dropped if b in common)
    stored = set(graph.saved) - set(dropped)
    wrong: set[int] = set()
    for group in group_recipes(graph, stored, dropped):
        env = gather(graph, group.sources, saved, sources, context)
        # A plan stores masks as bits, and replay then writes over what it decoded: the proof does the same.
        masks = frozenset(b for b in group.sources if b in saved and _may_be_mask(graph, b))
        env |= {b: env[b].clone() for b in masks}
        targets = set(group.targets)
        for writes in Replayer(graph, group, context, masks).stepwise(env, module):
            for index in writes & targets:
                if not _matches(graph, index, env[index], saved[index]):
                    wrong.add(index)
                    env[index] = saved[index].clone()
    refused |= dict.fromkeys(wrong, REPLAY_DIFFERS)
    verified = frozenset(dropped) - wrong
    two_valued = frozenset(b for b in refused if _may_be_mask(graph, b) and holds_two_values(saved[b]))
    if shared is not None:
        common = shared(verified)
        refused |= {b: NOT_ON_ALL_RANKS for b in verified if b not in common}
        verified, two_valued = frozenset(common), frozenset(shared(two_valued))
    return Evidence(verified, refused, two_valued)


def gather(
    graph: LayerGraph, wanted: tuple[int, ...], saved: Mapping[int, Tensor], sources: Mapping[int, Tensor],
    context: Context,
) -> dict[int, Tensor]:  # fmt: skip
    """Base tensors of source buffers, literals made anew."""
    env = {}
    for index in wanted:
        buffer = graph.buffers[index]
        if buffer.origin == Origin.LITERAL:
            env[index] = literal_tensor(buffer)
        else:
            env[index] = saved[index] if index in saved else sources[index]
    return env


def _matches(graph: LayerGraph, index: int, rebuilt: Tensor, original: Tensor) -> bool:
    buffer = graph.buffers[index]
    for pack in graph.packs:
        if pack.view.buffer == index:
            loader = Loader.of(pack.view, buffer)
            if not bits_equal(loader.of_tensor(rebuilt), loader.of_tensor(original)):
                return False
    return True


def _may_be_mask(graph: LayerGraph, index: int) -> bool:
    buffer = graph.buffers[index]
    if not is_dense(buffer) or buffer.origin != Origin.OP:
        return False
    is_mask = graph.role(index) == Role.DROPOUT_MASK and buffer.base.dtype in FLOAT_DTYPES
    return is_mask or buffer.base.dtype == "bool"
