"""What an autograd graph keeps alive, read without running a hook and without changing the graph.

    output --grad_fn--> node --next_functions--> node --> ...

A node holds tensors in one of these ways, and each is read at its own door:

    C++ node of an aten op      node._raw_saved_<field>     a SavedTensor, or a tuple of tensors
    in-place op on a view       node._wrapped_node          the node of the op itself (CopySlices)
    Python autograd.Function    node._raw_saved_tensors     a tuple of SavedTensor
                                vars(node)                  whatever forward() put on ctx
    C++ autograd::Function      nothing                     reported by name as unread

`SavedTensor.data` is the tensor itself where no hook was active when it was saved, the object that the
pack hook returned where one was, and None once the graph is freed. It neither unpacks nor compares
version counters, so a tensor modified in place raises in backward, where it should, and not here.
"""

import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch._C._autograd import SavedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import _CheckpointFrame

Held = torch.Tensor | torch.UntypedStorage

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # asking a tensor whether it is a wrapper is slow


@runtime_checkable
class HoldsStorages(Protocol):
    """An object returned by a pack hook, or put on ctx, that knows which memory it keeps alive."""

    def stored_storages(self) -> Iterable[torch.UntypedStorage]:
        """Every storage this object keeps alive, also those it shares; runs no op, allocates nothing."""
        ...


@dataclass(frozen=True)
class NodeHoldings:
    """What one node of the graph keeps alive.

    Attributes:
        sequence_nr: the node's autograd sequence number; it grows in the order of the forward.
        is_python: whether the node is a Python autograd.Function.
        held: tensors and storages; the same one may occur more than once.
    """

    sequence_nr: int
    is_python: bool
    held: tuple[Held, ...]


@dataclass(frozen=True)
class GraphHoldings:
    """What a graph keeps alive.

    Attributes:
        nodes: one entry a node, in the order of the forward; leaves (AccumulateGrad) are left out.
        unread_nodes: sorted names of the nodes that expose nothing and may hold tensors.
    """

    nodes: tuple[NodeHoldings, ...]
    unread_nodes: tuple[str, ...]


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's output: a tensor, or nested lists, tuples and dicts of tensors."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from tensors_in(value)


def storages_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    """The storages behind a tensor: one for a dense tensor, one for each part of a sparse or wrapped one.

    A layout without storages (MKL-DNN) gives none.
    """
    if type(tensor) not in _PLAIN_TYPES and is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        # A DTensor names its device mesh among them.
        return tuple(storage for part in parts if isinstance(part, torch.Tensor) for storage in storages_of(part))
    layout = tensor.layout
    if layout is torch.strided:
        return (tensor.untyped_storage(),)
    if layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = []
    return tuple(part.untyped_storage() for part in parts)


@dataclass(frozen=True)
class _NodeKind:
    """What the type of a node says about it."""

    is_leaf: bool
    is_python: bool
    wraps_a_node: bool
    is_unread: bool
    fields: tuple[str, ...]

    @classmethod
    def of(cls, node_type: type) -> Self:
        return cls(
            is_leaf=node_type.__name__ == "AccumulateGrad",
            is_python=issubclass(node_type, torch.autograd.function.BackwardCFunction),
            wraps_a_node=hasattr(node_type, "_wrapped_node"),
            # The one type of every C++ node that torch has no bindings for.
            is_unread=node_type.__name__ == "CppFunction",
            fields=tuple(name for name in dir(node_type) if name.startswith("_raw_saved_")),
        )


class GraphReader:
    """Reads graphs; of what it has read it keeps only what the type of a node says."""

    def __init__(self) -> None:
        self._kinds: dict[type, _NodeKind] = {}

    def read(self, outputs: Any) -> GraphHoldings:
        """Everything that the graph behind `outputs` keeps alive.

        Args:
            outputs: a tensor, or nested lists, tuples and dicts of tensors. Those without a grad_fn have
                no graph and give nothing.
        """
        # The wrappers in `nodes` also keep the nodes alive: a SavedTensor points into its node.
        nodes: dict[Any, _NodeKind] = {}
        entries: list[NodeHoldings] = []
        visited: set[int] = set()
        pending = [tensor.grad_fn for tensor in tensors_in(outputs)]
        while pending:
            # Read in the order of the forward: what several nodes share belongs to the first.
            found = sorted(self._walk(pending, nodes), key=_first)
            pending = []
            for sequence_nr, node in found:
                kind = nodes[node]
                held: list[Held] = []
                if kind.is_python:
                    for value in vars(node).values():
                        _collect(value, held, visited)
                    # A tensor on ctx may bring a graph of its own, which no edge leads to.
                    pending.extend(item.grad_fn for item in held if isinstance(item, torch.Tensor))
                for name in kind.fields:
                    _collect_field(node, name, held, visited)
                entries.append(NodeHoldings(sequence_nr, kind.is_python, tuple(held)))
        entries.sort(key=lambda entry: entry.sequence_nr)
        unread = {node.name() for node, kind in nodes.items() if kind.is_unread}
        return GraphHoldings(tuple(entries), tuple(sorted(unread)))

    def _walk(self, roots: list[Any], nodes: dict[Any, _NodeKind]) -> list[tuple[int, Any]]:
        """Add the nodes reachable from `roots` to `nodes`; return the new ones, without the leaves."""
        pending, found = list(roots), []
        while pending:
            node = pending.pop()
            if node is None or node in nodes:
                continue
            kind = self._kinds.get(type(node))
            if kind is None:
                kind = self._kinds[type(node)] = _NodeKind.of(type(node))
            nodes[node] = kind
            if kind.is_leaf:
                continue
            found.append((node._sequence_nr(), node))
            for successor, _ in node.next_functions:
                pending.append(successor)
            if kind.wraps_a_node:
                pending.append(node._wrapped_node)
        return found


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _collect_field(node: Any, name: str, held: list[Held], visited: set[int]) -> None:
    try:
        field = getattr(node, name)
    except RuntimeError:
        return  # the node was freed, by a backward over this part of the graph
    if isinstance(field, tuple):
        # Made for this call: its id may be reused, so it must not enter `visited`.
        for entry in field:
            _collect(entry, held, visited)
    else:
        _collect(field, held, visited)


def _collect(value: Any, held: list[Held], visited: set[int]) -> None:
    """Append to `held` what `value` keeps alive.

    `visited` has the ids of the containers and functions met in this graph. Each is alive through the
    graph, so no id is reused, and each is read once: layers share recompute functions.
    """
    if isinstance(value, SavedTensor):
        saved: Any = value  # torch's type stub knows neither attribute
        packed = saved.data
        if isinstance(packed, torch.Tensor):
            held.append(packed)
        elif packed is not None:
            _collect(packed, held, visited)
            _collect_frame(saved.unpack_hook, held, visited)
    elif value is None or isinstance(value, int | float | str):
        return
    elif isinstance(value, torch.Tensor | torch.UntypedStorage):
        held.append(value)
    elif hasattr(type(value), "stored_storages"):
        held.extend(value.stored_storages())
    elif id(value) in visited:
        return
    elif isinstance(value, list | tuple | set | frozenset):
        visited.add(id(value))
        for entry in value:
            _collect(entry, held, visited)
    elif isinstance(value, dict):
        visited.add(id(value))
        for entry in value.values():
            _collect(entry, held, visited)
    elif isinstance(value, types.FunctionType):
        visited.add(id(value))
        _collect(value.__defaults__, held, visited)
        for content in _closure(value):
            _collect(content, held, visited)
    elif isinstance(value, types.MethodType):
        _collect(value.__func__, held, visited)
    elif isinstance(value, functools.partial):
        visited.add(id(value))
        for part in (value.func, value.args, value.keywords):
            _collect(part, held, visited)
    elif isinstance(value, _CheckpointFrame):
        visited.add(id(value))
        _collect(value.saved_args, held, visited)
        _collect(value.recompute_fn, held, visited)


def _collect_frame(unpack_hook: Any, held: list[Held], visited: set[int]) -> None:
    """What torch's non-reentrant checkpoint keeps to recompute.

    It packs an empty token for every tensor; its arguments and its function are in the frame that the
    unpack hook closes over. Other hooks' closures are not read: a store they share with other
    micro-batches is not this graph's.
    """
    if not isinstance(unpack_hook, types.FunctionType) or id(unpack_hook) in visited:
        return
    visited.add(id(unpack_hook))
    for content in _closure(unpack_hook):
        if isinstance(content, _CheckpointFrame):
            _collect(content, held, visited)
        else:
            _collect_frame(content, held, visited)


def _closure(function: types.FunctionType) -> Iterator[Any]:
    """The values a function closes over; a variable deleted or not yet assigned is skipped."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
