"""A graph and a plan, compiled: what the pack hook does with each tensor, and how dropped ones come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megatron_adacc import codecs
from megatron_adacc.codecs import Codec, State
from megatron_adacc.codecs.bitmask import BitmaskState
from megatron_adacc.graph.model import Buffer, LayerGraph, Origin, Pack
from megatron_adacc.graph.recipes import Group, group_recipes
from megatron_adacc.graph.replay import Context, Loader, Replayer, base_of, literal_tensor, torch_dtype
from megatron_adacc.graph.storages import storage_key, version_watch
from megatron_adacc.planner import Action, Compress, Keep, LayerPlan, Recompute
from megatron_adacc.runtime.errors import TraceMismatchError
from megatron_adacc.runtime.stash import Dropped, Encoded, Held, Packing, Source, Stash, Weight
from megatron_adacc.runtime.states import CodecStates, StateKey

SMALL_SAMPLE = 2**18  # elements

NAMED = (Origin.PARAMETER, Origin.MODULE_BUFFER, Origin.ATTRIBUTE)


class Entry:
    """What to do with the n-th tensor that autograd saves. Subclasses: one for each kind of handle."""

    def __init__(self, pack: Pack, buffer: Buffer) -> None:
        view = pack.view
        self.index = pack.index
        self.buffer = buffer
        self.site = buffer.site
        self.size = torch.Size(view.size)
        self.stride = view.stride
        self.dtype = torch_dtype(view.dtype)
        self.loader = Loader.of(view, buffer)

    def check(self, stash: Stash, tensor: Tensor) -> None:
        """Raises TraceMismatchError unless the tensor looks as it did in the trace."""
        if tensor.shape != self.size or tensor.dtype != self.dtype or tensor.stride() != self.stride:
            raise TraceMismatchError(
                f"{stash.name} saved a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and stride "
                f"{tensor.stride()} where its trace has {self.site}, {self.dtype} of shape {tuple(self.size)} "
                f"and stride {self.stride} (save {self.index})."
            )

    def pack(self, stash: Stash, tensor: Tensor) -> object:
        raise NotImplementedError


class SpecialEntry(Entry):
    """A tensor that is not plain, such as a sparse one: held as it is."""

    def __init__(self, pack: Pack, buffer: Buffer) -> None:
        self.index = pack.index
        self.site = buffer.site
        self.size = torch.Size(pack.view.size)

    def check(self, stash: Stash, tensor: Tensor) -> None:
        if tensor.shape != self.size:
            raise TraceMismatchError(f"{stash.name} saved a tensor of another shape than its trace: {self.site}.")

    def pack(self, stash: Stash, tensor: Tensor) -> Held:
        self.check(stash, tensor)
        return Held(stash, tensor.detach(), self.site)


class KeepEntry(Entry):
    def __init__(self, pack: Pack, buffer: Buffer, is_source: bool) -> None:
        super().__init__(pack, buffer)
        self.is_source = is_source
        self.view = pack.view

    def pack(self, stash: Stash, tensor: Tensor) -> Held:
        self.check(stash, tensor)
        held = tensor.detach()
        if self.is_source and self.buffer.index not in stash.sources:
            stash.sources[self.buffer.index] = Source(base_of(held, self.view, self.buffer), self.site)
        return Held(stash, held, self.site)


class WeightEntry(Entry):
    def __init__(self, pack: Pack, buffer: Buffer) -> None:
        super().__init__(pack, buffer)
        self.weight_loader = None if self.loader.is_base else self.loader

    def pack(self, stash: Stash, tensor: Tensor) -> Weight:
        self.check(stash, tensor)
        weight = stash.weights[self.buffer.index]
        offset = weight.storage_offset() * weight.element_size() + self.loader.shift_bytes
        if storage_key(tensor) != storage_key(weight) or tensor.storage_offset() * tensor.element_size() != offset:
            raise TraceMismatchError(f"{stash.name} saved another tensor where its trace has {self.site}.")
        return Weight(stash, weight, self.weight_loader, self.site)


class DropEntry(Entry):
    def __init__(self, pack: Pack, buffer: Buffer, group: int) -> None:
        super().__init__(pack, buffer)
        self.group = group

    def pack(self, stash: Stash, tensor: Tensor) -> Dropped:
        self.check(stash, tensor)
        return Dropped(stash.rebuild(self.group), version_watch(tensor), self.index, self.loader, self.site)


class EncodeEntry(Entry):
    def __init__(self, pack: Pack, buffer: Buffer, codec: Codec, is_source: bool, state: BitmaskState | None) -> None:
        super().__init__(pack, buffer)
        self.codec = codec
        self.state = state
        self.is_source = is_source
        self.view = pack.view
        channels = buffer.base.size[-1] if buffer.base.size else 1
        self.state_key = StateKey(buffer.site, codec, channels)

    def pack(self, stash: Stash, tensor: Tensor) -> Encoded:
        self.check(stash, tensor)
        index = self.buffer.index
        packing = stash.packings.get(index)
        if packing is None:
            base = base_of(tensor.detach(), self.view, self.buffer)
            packed = self.codec.encode(base, self.state if self.state is not None else self.known(stash, base))
            packing = stash.packings[index] = Packing(stash, self.codec, packed)
            if self.is_source:
                stash.sources[index] = packing
        return Encoded(packing, version_watch(tensor), self.index, self.loader, self.site)

    def known(self, stash: Stash, base: Tensor) -> State | None:
        """What the codec is to know about this buffer of this layer."""
        return stash.program.states.of(stash.module, self.state_key, base)


@dataclass(frozen=True)
class Constants:
    """Constants that a trace proved, by buffer, with their versions."""

    tensors: Mapping[int, Tensor]
    versions: Mapping[int, int]

    @property
    def unchanged(self) -> bool:
        return all(t._version == self.versions[b] for b, t in self.tensors.items())


class Program:
    """Compiled once for each graph and layer plan; shared by all calls. Holds constants, no activations.

    ``states``: what codecs know about the layers' buffers. ``mask_state``: where bitmask notes, on CUDA, what is not
    two-valued after all. Raises ValueError, naming the site, when the plan recomputes a buffer that has no recipe."""

    def __init__(
        self, graph: LayerGraph, plan: LayerPlan, context: Context, constants: Constants, states: CodecStates,
        mask_state: BitmaskState | None = None,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.states = states
        self.plan = plan
        self.context = context
        self.constants = constants
        self._mask_state = mask_state
        self.lossless = plan.lossless
        actions = dict(plan.actions)
        self._actions: dict[int, Action] = {b: actions.get(graph.buffers[b].site, Keep()) for b in graph.saved}
        dropped = [b for b, a in self._actions.items() if isinstance(a, Recompute)]
        self.stored = frozenset(b for b in self._actions if b not in set(dropped))
        groups = group_recipes(graph, self.stored, dropped)
        self._decoded = frozenset(b for b, a in self._actions.items() if isinstance(a, Compress))
        self.replayers = tuple(Replayer(graph, group, context, self._decoded) for group in groups)
        self.group_of = {b: i for i, group in enumerate(groups) for b in group.targets}
        sources = {b for group in groups for b in group.sources}
        positions = {
            spec.buffer: i
            for i, spec in reversed(list(enumerate(graph.inputs)))
            if graph.buffers[spec.buffer].origin == Origin.INPUT
        }
        self.input_sources = tuple((b, positions[b]) for b in sorted(sources) if b in positions)
        self.weight_sources = tuple(b for b in sorted(sources) if graph.buffers[b].origin in (*NAMED, Origin.CONSTANT))
        packed_weights = {
            p.view.buffer for p in graph.packs if graph.buffers[p.view.buffer].origin in (*NAMED, Origin.CONSTANT)
        }
        wanted = sorted(packed_weights | set(self.weight_sources))
        self._weight_names = tuple((b, graph.buffers[b].name) for b in wanted if b not in constants.tensors)
        self._places: WeakKeyDictionary[nn.Module, list[tuple[int, nn.Module, str]]] = WeakKeyDictionary()
        self._sources = frozenset(sources)
        self.entries = tuple(self._entry(pack) for pack in graph.packs)
        self._again: dict[tuple[int, frozenset[int]], Replayer] = {}

    def _entry(self, pack: Pack) -> Entry:
        buffer = self.graph.buffers[pack.view.buffer]
        if buffer.storage < 0:
            return SpecialEntry(pack, buffer)
        if buffer.origin in (*NAMED, Origin.CONSTANT):
            return WeightEntry(pack, buffer)
        is_source = buffer.index in self._sources and buffer.origin != Origin.INPUT
        match self._actions.get(buffer.index, Keep()):
            case Recompute():
                return DropEntry(pack, buffer, self.group_of[buffer.index])
            case Compress(codec, options):
                state = self._mask_state if codec == "bitmask" else None
                return EncodeEntry(pack, buffer, codecs.get(codec, **dict(options)), is_source, state)
            case _:
                return KeepEntry(pack, buffer, is_source)

    def warm_up(self) -> None:
        """Compile what the codecs of the plan need, so that nothing compiles later."""
        encoding = [e for e in self.entries if isinstance(e, EncodeEntry)]
        kinds = {(e.codec, e.buffer.base.size, e.buffer.base.dtype): e.state for e in encoding}
        for (codec, size, dtype), state in kinds.items():
            small = torch.Size(size).numel() <= SMALL_SAMPLE  # which a codec may do without compiling
            shape = size if small or codec.channel_axis is not None else None
            codec.warm_up(torch_dtype(dtype), self.context.device, state, shape)

    def bind_weights(self, module: nn.Module) -> dict[int, Tensor]:
        """Parameters, module buffers and constants as they are now, by buffer: some move between forwards."""
        places = self._places.get(module)
        if places is None:
            split = [(b, *name.rpartition(".")[::2]) for b, name in self._weight_names]
            places = [(b, module.get_submodule(path), leaf) for b, path, leaf in split]
            self._places[module] = places
        found: dict[int, Tensor] = {b: getattr(submodule, leaf) for b, submodule, leaf in places}
        found.update(self.constants.tensors)
        return found

    def action(self, buffer: int) -> Action:
        return self._actions.get(buffer, Keep())

    def packed_bytes(self, buffer: int) -> int:
        """Bytes in which the plan holds a buffer that it compresses, in any layer; 0 for one that it does not."""
        match self._actions.get(buffer):
            case Compress(codec, options):
                base = self.graph.buffers[buffer].base
                return codecs.get(codec, **dict(options)).packed_bytes(base.size, torch_dtype(base.dtype))
        return 0

    def site(self, buffer: int) -> str:
        return self.graph.buffers[buffer].site

    def literal(self, buffer: int) -> Tensor:
        return literal_tensor(self.graph.buffers[buffer])

    def recipe_length(self, buffer: int) -> int:
        """Ops of the buffer's own recipe, 0 when it is not recomputed."""
        if buffer not in self.group_of:
            return 0
        return len(self._slice(buffer, self.stored).steps)

    def _slice(self, buffer: int, stored: frozenset[int]) -> Group:
        return group_recipes(self.graph, stored, [buffer])[0]

    def replayer_for(self, buffer: int, live: frozenset[int]) -> Replayer:
        """What rebuilds one buffer when those of ``live`` are there."""
        found = self._again.get((buffer, live))
        if found is None:
            found = Replayer(self.graph, self._slice(buffer, self.stored | live), self.context, self._decoded)
            self._again[buffer, live] = found
        return found
