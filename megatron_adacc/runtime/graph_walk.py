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
from typing import Any, Protocol, runtime_checkable

import torch
from torch._C._autograd import SavedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import _CheckpointFrame

Held = torch.Tensor | torch.UntypedStorage


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


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: one for a dense tensor, one for each part of a sparse or wrapped one.

    A layout without storages (MKL-DNN) gives none.
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield part.untyped_storage()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield part.untyped_storage()


class GraphReader:
    """Reads graphs; of what it has read it keeps only the field names of each type of node."""

    def __init__(self) -> None:
        self._fields: dict[type, tuple[str, ...]] = {}

    def read(self, outputs: Any) -> GraphHoldings:
        """Everything that the graph behind `outputs` keeps alive.

        Args:
            outputs: a tensor, or nested lists, tuples and dicts of tensors. Those without a grad_fn have
                no graph and give nothing.
        """
        # The wrappers in `nodes` also keep the nodes alive: a SavedTensor points into its node.
        nodes: dict[Any, None] = {}
        entries: list[NodeHoldings] = []
        visited: set[int] = set()
        pending = [tensor.grad_fn for tensor in tensors_in(outputs)]
        while pending:
            # Read in the order of the forward: what several nodes share belongs to the first.
            found = sorted(self._walk(pending, nodes), key=lambda node: node._sequence_nr())
            pending = []
            for node in found:
                held: list[Held] = []
                is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
                if is_python:
                    for value in vars(node).values():
                        _collect(value, held, visited)
                    # A tensor on ctx may bring a graph of its own, which no edge leads to.
                    pending.extend(item.grad_fn for item in held if isinstance(item, torch.Tensor))
                for name in self._field_names(type(node)):
                    _collect_field(node, name, held, visited)
                entries.append(NodeHoldings(node._sequence_nr(), is_python, tuple(held)))
        entries.sort(key=lambda entry: entry.sequence_nr)
        # CppFunction is the one type of every C++ node that torch has no bindings for.
        unread = {node.name() for node in nodes if type(node).__name__ == "CppFunction"}
        return GraphHoldings(tuple(entries), tuple(sorted(unread)))

    def _walk(self, roots: list[Any], nodes: dict[Any, None]) -> list[Any]:
        """Add the nodes reachable from `roots` to `nodes`; return the new ones without the leaves."""
        pending, found = list(roots), []
        while pending:
            node = pending.pop()
            if node is None or node in nodes:
                continue
            nodes[node] = None
            if type(node).__name__ == "AccumulateGrad":
                continue
            found.append(node)
            pending.extend(successor for successor, _ in node.next_functions)
            if type(node).__name__ == "CopySlices":
                pending.append(node._wrapped_node)
        return found

    def _field_names(self, node_type: type) -> tuple[str, ...]:
        names = self._fields.get(node_type)
        if names is None:
            names = tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))
            self._fields[node_type] = names
        return names


def _collect_field(node: Any, name: str, held: list[Held], visited: set[int]) -> None:
    try:
        field = getattr(node, name)
    except RuntimeError:
        return  # the node was freed, by a backward over this part of the graph
    # The tuple is made for this call: its id may be reused, so it must not enter `visited`.
    for entry in field if isinstance(field, tuple) else (field,):
        _collect(entry, held, visited)


def _collect(value: Any, held: list[Held], visited: set[int]) -> None:
    """Append to `held` what `value` keeps alive.

    `visited` has the ids of the containers and functions met in this graph. Each is alive through the
    graph, so no id is reused, and each is read once: layers share recompute functions.
    """
    if value is None or isinstance(value, int | float | str):
        return
    if isinstance(value, torch.Tensor | torch.UntypedStorage):
        held.append(value)
    elif isinstance(value, SavedTensor):
        saved: Any = value  # torch's type stub knows neither attribute
        _collect(saved.data, held, visited)
        _collect_frame(saved.unpack_hook, held, visited)
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
