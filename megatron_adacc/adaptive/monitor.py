"""Looks at the tensors that the stash encodes, in the forwards of a step that is checked.

For each lossily held buffer of each layer:

    overlap   share of the sum of |x| over the present outlier channels that lies in the outlier columns in use.
              Present are channels with z above the threshold and more than twice the mean sum; the highest of them,
              as many as there are columns
    error     sqrt( mean over channels c of |x'_c - x_c|^2 / |x_c|^2 ),   x' = decode(encode(x)), channels along the
              last dimension, those that are zero or not finite left out; of a sample of x's rows

A list whose overlap is too small gives way to the channels of highest z, as many as before, so no bytes change. Where
that happens in more than PERSISTENT checks in a row, the outliers are those of a batch, not of the training: the list
still gives way, but that is no change any more which calls for another check at once, until a list has lasted.
An error that has grown by more than a factor since the list was made, or since the last such finding, is a finding too.

Watching replaces the programs' entries for the step; in all other steps the pack hook runs what it always ran.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_adacc.adaptive.config import Config
from megatron_adacc.codecs import ChannelStatistics, Codec, OutlierState, State
from megatron_adacc.errors import UserError
from megatron_adacc.graph.replay import base_of
from megatron_adacc.runtime.agree import first_rank_says
from megatron_adacc.runtime.attach import Handle
from megatron_adacc.runtime.program import EncodeEntry, Entry, Program
from megatron_adacc.runtime.stash import Stash
from megatron_adacc.runtime.states import StateKey

# Elements, about, that are looked at: for channel sums, and for the error.
SAMPLE = 2**18
ERROR_SAMPLE = 2**14

# An outlier is missed when it is so many times the mean. Where channels are alike some exceed z = 3 by chance, others
# in each step, and separating a channel of less than twice the mean does not make its group's scale much smaller.
LEAST_RATIO = 2.0

PERSISTENT = 3


@dataclass(frozen=True, order=True)
class Key:
    """One buffer of one layer, whatever the shape of the call. ``channels``: of its last dimension."""

    place: int
    site: str
    channels: int


@dataclass(frozen=True)
class Finding:
    """What a check found of one buffer.

    ``overlap``, ``listed`` (the new outlier channels; None: as before) and ``without_column`` (outliers beyond the
    columns) are of buffers with outlier columns only; ``moves``: checks in a row in which the list gave way.
    ``error``: of this check; ``reference``: what it is compared with."""

    key: Key
    overlap: float | None
    listed: OutlierState | None
    before: OutlierState | None
    without_column: int
    error: float
    reference: float
    error_grew: bool
    moves: int = 0

    @property
    def changed(self) -> bool:
        return (self.listed is not None and self.moves <= PERSISTENT) or self.error_grew


@dataclass
class _Seen:
    """What the forwards of one step showed of a buffer."""

    module: nn.Module
    state_key: StateKey
    statistics: ChannelStatistics | None
    error: Tensor


class Monitor:
    """See the module. ``groups``: process groups whose ranks hold the same channels of the same layers, such as data
    parallel ones: statistics are added and errors averaged over them. All ranks of a group look in the same steps."""

    def __init__(self, handle: Handle, config: Config, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._handle = handle
        self._config = config
        self._groups = [group for group in groups if group.size() > 1]
        self._places = {id(f.module): f.layer for f in handle.forwards}
        self._armed: list[tuple[Program, tuple[Entry, ...]]] = []
        self._seen: dict[Key, _Seen] = {}
        self.references: dict[Key, float] = {}
        self.moves: dict[Key, int] = {}
        self._shared_at = 0

    def arm(self) -> None:
        """Look at what the next forwards encode."""
        self.disarm()
        self._seen = {}
        for program in dict.fromkeys(program for _, program in self._programs()):
            self._watch(program)
        for cache in self._handle.caches:
            cache.watch = self._watch

    def disarm(self) -> None:
        """Give the programs their own entries back."""
        for cache in self._handle.caches:
            cache.watch = None
        for program, entries in self._armed:
            program.entries = entries
        self._armed = []

    def _watch(self, program: Program) -> None:
        watched = {entry.index: entry for entry in watchable(program)}
        if watched:
            self._armed.append((program, program.entries))
            program.entries = tuple(
                _Watched(watched[e.index], self) if e.index in watched else e for e in program.entries
            )

    def see(self, stash: Stash, entry: EncodeEntry, tensor: Tensor) -> None:
        """One tensor that was encoded just now. Layers in eval mode are not looked at."""
        if not stash.module.training:
            return
        with torch.no_grad():
            base = base_of(tensor.detach(), entry.view, entry.buffer)
            state = stash.program.states.known(stash.module, entry.state_key)
            in_use = state if isinstance(state, OutlierState) else None
            key = Key(self._places[id(stash.module)], entry.site, base.shape[-1])
            seen = self._seen.get(key)
            if seen is None:
                statistics = None if in_use is None else ChannelStatistics(in_use.num_channels, base.device)
                error = error_of(entry.codec, base, state)
                seen = self._seen[key] = _Seen(stash.module, entry.state_key, statistics, error)
            if seen.statistics is not None:
                seen.statistics.update(sample_of(base, entry.codec.channel_axis, SAMPLE))

    def judge(self) -> list[Finding]:
        """What the step showed, by layer and site. Waits for the device; with groups, their ranks wait for one
        another."""
        for group in self._groups:
            self._reduce(group)
        return [self._finding(key, self._seen[key]) for key in sorted(self._seen)]

    def place_lists(self, lists: Mapping[Key, Sequence[int]]) -> set[Key]:
        """Give layers these outlier channels; the keys of those that took them: a layer has to have settled, and its
        plan as many columns."""
        taken = set()
        states = self._handle.states
        for place, forward in enumerate(self._handle.forwards):
            for known, state in list(states.outliers(forward.module)):
                key = Key(place, known.site, known.channels)
                if key in lists and len(state.channels) == len(lists[key]):
                    made = OutlierState.from_channels(lists[key], state.num_channels, state.columns.device)
                    states.replace(forward.module, known, made)
                    taken.add(key)
        return taken

    def share_lists(self) -> None:
        """Where layers observed their channels in this step, each rank by its own tensors, all take the first rank's.
        The ranks of a group have the same layers and calls, so all of them observed or none did."""
        states = self._handle.states
        if states.observed == self._shared_at:
            return
        self._shared_at = states.observed
        own = self.lists()
        if self._groups and own:
            self.place_lists(first_rank_says(own, self._groups))

    def lists(self) -> dict[Key, tuple[int, ...]]:
        """The outlier channels in use."""
        return {
            Key(place, known.site, known.channels): state.channels
            for place, forward in enumerate(self._handle.forwards)
            for known, state in self._handle.states.outliers(forward.module)
        }

    def _programs(self) -> Iterator[tuple[int, Program]]:
        """The settled programs of each layer."""
        for forward in self._handle.forwards:
            for trace in forward.cache.traces():
                if trace.settled is not None:
                    # A layer that never comes with this call need not have a plan for it.
                    with contextlib.suppress(UserError):
                        yield forward.layer, forward.cache.program(trace, forward.layer)

    def _finding(self, key: Key, seen: _Seen) -> Finding:
        overlap, listed, without_column = None, None, 0
        # As they are now: ranks may have shared their lists since.
        state = self._handle.states.known(seen.module, seen.state_key)
        in_use = state if isinstance(state, OutlierState) else None
        if in_use is not None and seen.statistics is not None:
            columns = len(in_use.channels)
            sums, scores = seen.statistics.sums.tolist(), seen.statistics.z_scores().tolist()
            present = outliers_of(sums, scores, self._config.outlier_threshold)
            overlap = overlap_of(sums, present[:columns], in_use.channels)
            without_column = len(present[columns:])
            if overlap < self._config.overlap:
                listed = seen.statistics.highest(columns, self._config.outlier_threshold)
        error = float(seen.error)
        error = error if math.isfinite(error) else 0.0
        reference = self.references.get(key, error)
        grew = error > self._config.error_band * reference > 0
        moves = self.moves[key] = 0 if listed is None else self.moves.get(key, 0) + 1
        if 0 < moves <= PERSISTENT:
            self.references.pop(key, None)  # the next check sees what the new list makes of it
        else:
            self.references[key] = error if grew else reference
        return Finding(key, overlap, listed, in_use, without_column, error, reference, grew, moves)

    def _reduce(self, group: dist.ProcessGroup) -> None:
        """Add statistics and average errors over the ranks that saw the same; one that saw less adds zeros."""
        own = sorted(self._seen)
        gathered: list[list[Key]] = [[] for _ in range(group.size())]
        dist.all_gather_object(gathered, [k for k in own if self._seen[k].statistics is not None], group=group)
        with_statistics = sorted({key for keys in gathered for key in keys})
        dist.all_gather_object(gathered, own, group=group)
        keys = sorted({key for each in gathered for key in each})
        if not keys:
            return
        device = device_of(self._handle)
        sums = [self._seen[k].statistics if k in self._seen else None for k in with_statistics]
        parts = [
            torch.zeros(key.channels, device=device) if found is None else found.sums
            for key, found in zip(with_statistics, sums, strict=True)
        ]
        errors = torch.stack([self._seen[k].error if k in self._seen else torch.zeros((), device=device) for k in keys])
        finite = errors.isfinite()
        counts = torch.tensor([float(k in self._seen) for k in keys], device=device) * finite
        flat = torch.cat([*parts, torch.where(finite, errors, 0.0), counts])
        dist.all_reduce(flat, group=group)
        *parts, total, counts = flat.split([*(key.channels for key in with_statistics), len(keys), len(keys)])
        for part, statistics in zip(parts, sums, strict=True):
            if statistics is not None:
                statistics.sums = part
        for key, mean in zip(keys, total / counts, strict=True):
            if key in self._seen:
                self._seen[key].error = mean


class _Watched(Entry):
    """An entry that encodes, with the monitor looking on."""

    def __init__(self, entry: EncodeEntry, monitor: Monitor) -> None:
        self.index = entry.index
        self.site = entry.site
        self._entry = entry
        self._monitor = monitor

    def pack(self, stash: Stash, tensor: Tensor) -> object:
        handle = self._entry.pack(stash, tensor)
        self._monitor.see(stash, self._entry, tensor)
        return handle


def device_of(handle: Handle) -> torch.device:
    """Where the layers' parameters are; the CPU for layers without any."""
    parameters = (p for forward in handle.forwards for p in forward.module.parameters())
    return next((p.device for p in parameters), torch.device("cpu"))


def watchable(program: Program) -> list[EncodeEntry]:
    """The entries that encode with loss, for each buffer the first."""
    first: dict[int, EncodeEntry] = {}
    for entry in program.entries:
        own = entry._entry if isinstance(entry, _Watched) else entry
        if isinstance(own, EncodeEntry) and not own.codec.lossless and own.buffer.base.size:
            first.setdefault(own.buffer.index, own)
    return list(first.values())


def outliers_of(sums: Sequence[float], scores: Sequence[float], threshold: float) -> list[int]:
    """The outlier channels by the module's rule for sum |x| and z of each channel, highest first."""
    least = LEAST_RATIO * sum(sums) / max(1, len(sums))
    found = [c for c, z in enumerate(scores) if z > threshold and sums[c] > least]
    return sorted(found, key=lambda c: (-scores[c], c))


def overlap_of(sums: Sequence[float], present: Sequence[int], in_use: Collection[int]) -> float:
    """The module's formula for sum |x| of each channel; 1 where there are no outliers."""
    total = sum(sums[c] for c in present)
    return sum(sums[c] for c in present if c in in_use) / total if total > 0 else 1.0


def error_of(codec: Codec, x: Tensor, state: State | None) -> Tensor:
    """The module's formula: x [..., channels] -> float32 [], NaN where no channel counts. Does not wait."""
    x = sample_of(x, codec.channel_axis, ERROR_SAMPLE)
    exact = x.float()
    difference = codec.decode(codec.encode(x, state)).float() - exact
    size, channels = exact.numel(), exact.shape[-1]
    rows = (size // channels if channels else 0, channels)
    wrong, whole = (t.reshape(rows).square().sum(0) for t in (difference, exact))
    return torch.where((whole > 0) & whole.isfinite(), wrong / whole, torch.nan).nanmean().sqrt()


def sample_of(x: Tensor, channel_axis: int | None, elements: int) -> Tensor:
    """Evenly spread rows of x, of about so many elements together; x itself where it is small, or has its channels
    along another dimension than the last."""
    if x.numel() <= elements or x.dim() < 2 or (channel_axis is not None and channel_axis % x.dim() != x.dim() - 1):
        return x
    rows = x.reshape(-1, x.shape[-1]) if x.is_contiguous() else x
    of_one = rows.numel() // rows.shape[0]
    step = math.ceil(rows.shape[0] / max(1, elements // of_one))
    return rows[::step]
