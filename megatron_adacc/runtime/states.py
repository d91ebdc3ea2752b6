"""What codecs know about the buffers of each layer, such as their outlier channels.

Kept by layer, site, codec and number of channels, so that all programs of a layer share it: what the first trace of a
layer observed holds when the trace settles, and for a batch of another shape. A layer in eval mode has a store of its
own, so that an evaluation leaves no trace in the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from megatron_adacc.codecs import Codec, OutlierState, State


@dataclass(frozen=True)
class StateKey:
    """One buffer of one layer, held by one codec. ``channels``: of its last dimension."""

    site: str
    codec: Codec
    channels: int


Lists = Mapping[tuple[str, str, int], Sequence[int]]  # by site, codec's name and channels: the outlier channels


class CodecStates:
    """See the module."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[nn.Module, dict[StateKey, State | None]] = WeakKeyDictionary()
        self._in_eval: WeakKeyDictionary[nn.Module, dict[StateKey, State | None]] = WeakKeyDictionary()
        self.observed = 0  # tensors that were observed in training so far
        self._given: WeakKeyDictionary[nn.Module, Lists] = WeakKeyDictionary()

    def known(self, module: nn.Module, key: StateKey) -> State | None:
        """What is known now; None where nothing is, or where the codec has nothing to know."""
        return self._store(module).get(module, {}).get(key)

    def _store(self, module: nn.Module) -> WeakKeyDictionary[nn.Module, dict[StateKey, State | None]]:
        return self._states if module.training else self._in_eval

    def of(self, module: nn.Module, key: StateKey, base: Tensor) -> State | None:
        """What the codec is to know when it encodes ``base``. Where nothing is known the tensor is observed, which
        waits for the device: in a layer's first forward, then never."""
        store = self._store(module)
        states = store.get(module)
        if states is None:
            states = store[module] = {}
        try:
            return states[key]
        except KeyError:
            state = states[key] = self._as_given(module, key, key.codec.observe(base))
            self.observed += module.training
            return state

    def replace(self, module: nn.Module, key: StateKey, state: OutlierState) -> None:
        """From now on this is known."""
        self._states.setdefault(module, {})[key] = state

    def give(self, module: nn.Module, lists: Lists) -> None:
        """Outlier channels to be used instead of what a first forward would observe, where a codec reserves as many
        columns. What was known of the layer is forgotten."""
        self._given[module] = dict(lists)
        self._states.pop(module, None)

    def outliers(self, module: nn.Module) -> Iterator[tuple[StateKey, OutlierState]]:
        """The outlier channels that are known of the layer in training."""
        for key, state in self._states.get(module, {}).items():
            if isinstance(state, OutlierState):
                yield key, state

    def _as_given(self, module: nn.Module, key: StateKey, state: State | None) -> State | None:
        given = self._given.get(module, {}).get((key.site, key.codec.name, key.channels))
        if given is None or not isinstance(state, OutlierState) or len(given) != len(state.channels):
            return state
        return OutlierState.from_channels(given, state.num_channels, state.columns.device)
