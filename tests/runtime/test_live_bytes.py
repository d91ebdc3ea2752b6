"""Live bytes during one layer's backward, counted storage by storage, and the ops that run again never exceed
checkpoint's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megatron_adacc import attach
from megatron_adacc.codecs import Codec, Packed
from megatron_adacc.graph import replay

SEQUENCE, BATCH, HIDDEN, HEADS = 16, 2, 32, 4


class LiveBytes(TorchDispatchMode):
    """The largest sum of bytes of storages that ops made and that were alive at one moment."""

    running: ClassVar[LiveBytes | None] = None

    def __enter__(self) -> LiveBytes:
        LiveBytes.running = self
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        LiveBytes.running = None
        super().__exit__(*exc_info)

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.note([t for t in tree_leaves(result) if isinstance(t, Tensor)], given)
        return result

    def note(self, tensors: Iterable[Tensor], given: Collection[int] = ()) -> None:
        """Count storages from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {k: (ref, n) for k, (ref, n) in self._alive.items() if not ref.expired()}
        self.highest = max(self.highest, sum(n for _, n in self._alive.values()))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs count as the kernels that they are in training, without temporaries: what they return is counted.
    The plain version, which runs on tensors as small as these, has some."""
    encode, decode = Codec.encode, Codec.decode

    def counted_encode(self: Codec, *args: Any, **kwargs: Any) -> Packed:
        with torch._C._DisableTorchDispatch():
            packed = encode(self, *args, **kwargs)
        if LiveBytes.running is not None:
            LiveBytes.running.note(packed.tensors.values())
        return packed

    def counted_decode(self: Codec, packed: Packed) -> Tensor:
        with torch._C._DisableTorchDispatch():
            tensor = decode(self, packed)
        if LiveBytes.running is not None:
            LiveBytes.running.note([tensor])
        return tensor

    monkeypatch.setattr(Codec, "encode", counted_encode)
    monkeypatch.setattr(Codec, "decode", counted_decode)


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.projection = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(BATCH, SEQUENCE, HEADS, -1).transpose(1, 2).chunk(3, -1)
        p = F.dropout(F.softmax(q @ k.transpose(2, 3), -1), self.dropout)
        x = x + F.dropout(self.projection((p @ v).transpose(1, 2).reshape(BATCH, SEQUENCE, HIDDEN)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Gated(nn.Module):
    """Two branches, a shared gate and an in-place op."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(self.gate(x))
        y = (self.up(x) * gate).add_(1.0)
        return self.down(F.dropout(y, self.dropout)) * gate + x


class Work(TorchDispatchMode):
    """Runs of each op that writes memory, by name, and the bytes that they wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()
        self.written_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.runs[func.overloadpacket.__name__] += 1
            self.written_bytes += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


def backward_work(layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> Work:
    y = call(layer, torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True))
    with Work() as work:
        y.backward(torch.ones_like(y))
    layer.zero_grad(set_to_none=True)
    return work


def backward_peak(layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> tuple[int, list[Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    with LiveBytes() as live:
        y = call(layer, x)
        live.highest = 0  # what the forward left counts, what it needed meanwhile does not
        y.backward(torch.ones_like(y))
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad(set_to_none=True)
    return live.highest, gradients


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", [Attention, Gated])
def test_backward_peak_is_at_most_checkpoints(kind: type[nn.Module], dropout: float) -> None:
    torch.manual_seed(0)
    layer = kind(dropout)
    attached = copy.deepcopy(layer)
    expected, expected_gradients = backward_peak(layer, checkpointed)
    attach(attached, "recompute", min_bytes=0)
    for _ in range(3):
        found, gradients = backward_peak(attached, plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))
    assert 0 < found <= expected


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", [Attention, Gated])
def test_no_op_runs_again_that_checkpoint_does_not_run_again(
    kind: type[nn.Module], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoint stops when it has what the backward reads, so it too leaves out a last linear without dropout."""
    copies: list[Tensor] = []
    monkeypatch.setattr(replay, "_copy_storage", copies.append)
    layer = kind(dropout)
    alone, expected = backward_work(layer, plain), backward_work(layer, checkpointed)
    attach(layer, "recompute", min_bytes=0)
    for _ in range(3):
        found = backward_work(layer, plain)
    again, checkpoint_again = found.runs - alone.runs, expected.runs - alone.runs
    assert again <= checkpoint_again
    assert found.written_bytes <= expected.written_bytes
    assert not copies
    assert again["addmm"] == 3
    assert checkpoint_again["addmm"] == (4 if kind is Attention and dropout else 3)


def test_rebuilt_buffers_go_one_by_one() -> None:
    """A chain of eight saved tensors: after k of them were read, at most 8 - k are left."""

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(8):
                x = (x * 0.5).exp()
            return x

    layer = Chain()
    handle = attach(layer, "recompute", min_bytes=0)
    seen: list[int] = []
    for _ in range(3):
        seen.clear()
        x = torch.zeros(256, requires_grad=True)
        y = layer(x)
        node = y.grad_fn
        while node is not None and not hasattr(node, "variable"):
            node.register_hook(lambda *_: seen.append(handle.stored_bytes()))
            node = node.next_functions[0][0]
        y.sum().backward()
    # Before exp's and mul's backward in turn; the layer's input, from which the recipes start, is held to the end.
    held = [8 - reader // 2 for reader in range(16)]
    assert seen[:-1] == [256 * 4 * n for n in held][:-1]
    assert seen[-1] == 0
    assert handle.stored_bytes() == 0


def test_kept_tensors_go_node_by_node_as_without_the_engine() -> None:
    layer = Attention(0.0)
    expected, _ = backward_peak(layer, plain)
    attached = copy.deepcopy(layer)
    attach(attached, "keep", min_bytes=0)
    for _ in range(3):
        found, _ = backward_peak(attached, plain)
    assert found == expected
