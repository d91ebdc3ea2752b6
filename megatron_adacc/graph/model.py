"""The layer graph: what one forward of one layer ran, read, wrote and saved. Pure data, no torch.

A *buffer* here is one state of one storage. An op that writes into a storage that already had contents makes
a new buffer with the same ``storage`` and ``previous`` set, so that every buffer has one writer and a recipe
is a plain backward slice. A *view* says how a tensor lies on its buffer.

    ops       aten ops (and opaque submodule calls), in the order in which they ran; views are not ops
    buffers   b.writer is the index of the op that wrote it, or None: parameter, input, constant, opaque
    packs     what autograd saved, in order: the n-th call of the pack hook is packs[n]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip

FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})


class Origin(StrEnum):
    """Where the contents of a buffer come from."""

    OP = "op"
    INPUT = "input"
    PARAMETER = "parameter"
    MODULE_BUFFER = "module buffer"
    ATTRIBUTE = "attribute"  # a tensor held by a module without registration
    LITERAL = "literal"  # a small tensor made from numbers written in the program
    CONSTANT = "constant"  # the same storage, unchanged, in two traces with different inputs
    OPAQUE = "opaque"  # written by something the tracer cannot see


class Role(StrEnum):
    """What a buffer is in the layer, found from its producers and consumers."""

    LINEAR_INPUT = "linear input"
    NORM_OUTPUT = "norm output"
    QUERY_KEY_VALUE = "query/key/value"
    ATTENTION_PROBABILITIES = "attention probabilities"
    DROPOUT_MASK = "dropout mask"
    RESIDUAL = "residual"
    STATISTICS = "statistics"
    PARAMETER = "parameter"
    OTHER = "other"


@dataclass(frozen=True)
class View:
    """A tensor on a buffer. ``offset`` counts elements of ``dtype`` from the buffer's first byte, which is
    the start of the storage, or for parameters and inputs the first byte of that tensor."""

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str

    @property
    def numel(self) -> int:
        n = 1
        for s in self.size:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES.get(self.dtype, 1)

    @property
    def expanded(self) -> bool:
        return any(st == 0 and sz > 1 for sz, st in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True)
class Tagged:
    """An argument that is neither a number, a string nor a tensor: a dtype, a device, a process group.

    ``kind`` is one of dtype, device, layout, memory_format, complex, tensor, object; an object's ``value`` is its
    place in the trace's table of live objects, and ``note`` its type, so that graphs of two ranks compare.
    """

    kind: str
    value: str | int
    note: str = ""


Argument = None | bool | int | float | str | View | Tagged | tuple[Any, ...]


def views_in(argument: object) -> Iterator[View]:
    """Every view in an argument tree, in order."""
    if isinstance(argument, View):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from views_in(item)


@dataclass(frozen=True)
class Op:
    """One call. ``outputs[i]`` is the buffer that the i-th tensor returned defines, or None where the
    output is a view of something known; ``mutates`` are (view before, buffer after) of written arguments;
    ``overwrites`` are the buffers of ``mutates`` whose earlier contents the call does not read."""

    index: int
    target: str
    module: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int | None, ...]
    mutates: tuple[tuple[View, int], ...] = ()
    overwrites: tuple[int, ...] = ()
    collective: bool = False
    barrier: str | None = None  # why this call may not run again; None: it may
    uses: tuple[int, ...] = ()  # buffers read without being arguments: parameters of an opaque submodule

    def views(self) -> Iterator[View]:
        yield from views_in(self.args)
        yield from views_in(tuple(v for _, v in self.kwargs))

    @property
    def reads(self) -> tuple[int, ...]:
        """Buffers whose contents the call depends on, each once."""
        skipped = {v.buffer for v, after in self.mutates if after in self.overwrites}
        seen = {view.buffer: None for view in self.views() if view.buffer not in skipped}
        return tuple(seen | dict.fromkeys(self.uses))

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(b for b in self.outputs if b is not None) + tuple(after for _, after in self.mutates)


@dataclass(frozen=True)
class Buffer:
    """One state of one storage; ``base`` is the tensor that first showed it (for a view: where it lies)."""

    index: int
    storage: int
    site: str
    origin: Origin
    name: str
    nbytes: int
    base: View
    writer: int | None = None
    previous: int | None = None
    value: tuple[bool | int | float, ...] | None = None  # numbers of a literal
    note: str = ""


@dataclass(frozen=True)
class Pack:
    """The n-th tensor that autograd saved."""

    index: int
    view: View


@dataclass(frozen=True)
class InputSpec:
    """A tensor argument of the layer: where it stands in the call and how it lies."""

    name: str
    buffer: int
    size: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True)
class LayerGraph:
    """One traced forward of one layer. Build with :func:`megatron_adacc.graph.trace`."""

    module: str
    inputs: tuple[InputSpec, ...]
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    packs: tuple[Pack, ...]
    outputs: tuple[View, ...]
    roles: tuple[Role, ...] = field(default=())

    @property
    def saved(self) -> tuple[int, ...]:
        """Buffers that autograd saved and that are activations: not parameters, module buffers, constants."""
        seen: dict[int, None] = {}
        for pack in self.packs:
            if self.is_activation(pack.view.buffer):
                seen[pack.view.buffer] = None
        return tuple(seen)

    def is_activation(self, buffer: int) -> bool:
        return self.buffers[buffer].origin in (Origin.OP, Origin.INPUT, Origin.OPAQUE)

    @property
    def parameter_packs(self) -> int:
        return sum(self.buffers[p.view.buffer].origin == Origin.PARAMETER for p in self.packs)

    @property
    def activation_bytes(self) -> int:
        """Bytes of distinct activation storages that autograd saved, the layer's input included."""
        storages = {self.buffers[b].storage: self.buffers[b].nbytes for b in self.saved}
        return sum(storages.values())

    def last_state(self, buffer: int) -> bool:
        """Whether nothing in the layer wrote over this state of the storage."""
        return buffer not in self._overwritten

    @property
    def _overwritten(self) -> frozenset[int]:
        found = self.__dict__.get("_overwritten_cache")
        if found is None:
            found = frozenset(b.previous for b in self.buffers if b.previous is not None)
            object.__setattr__(self, "_overwritten_cache", found)
        return found

    def packs_of(self, buffer: int) -> tuple[int, ...]:
        return tuple(p.index for p in self.packs if p.view.buffer == buffer)

    def role(self, buffer: int) -> Role:
        return self.roles[buffer] if self.roles else Role.OTHER

    def __str__(self) -> str:
        header = (
            f"{self.module}: {len(self.ops)} ops, {len(self.packs)} packs ({self.parameter_packs} parameters), "
            f"{len(self.saved)} saved buffers, {self.activation_bytes:,} bytes"
        )
        rows = [("site", "role", "shape", "dtype", "bytes", "packs")]
        for index in self.saved:
            b = self.buffers[index]
            shape = "x".join(map(str, b.base.size)) or "scalar"
            count = str(len(self.packs_of(index)))
            rows.append((b.site, str(self.role(index)), shape, b.base.dtype, f"{b.nbytes:,}", count))
        return header + "\n" + format_table(rows)


def format_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of equal length as left-aligned columns, the first row being the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
