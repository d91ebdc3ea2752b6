"""Run traced ops again: a group's steps on tensors that stand for buffers.

A buffer is represented by a tensor with the size, stride and dtype of its ``base``; every other view of it is
made from that one. Ops are called below autograd and autocast, as they were recorded: what autocast does to
arguments was recorded as ops of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_adacc.graph import schema
from megatron_adacc.graph.groups import GroupName
from megatron_adacc.graph.model import Buffer, LayerGraph, Op, Tagged, View
from megatron_adacc.graph.recipes import Group, Step
from megatron_adacc.graph.storages import flatten_tensors
from megatron_adacc.graph.tracer import CALL_PREFIX, COMPILED, EMPTY_NAMES, wait_for
from megatron_adacc.huge_pages import LEAST_BYTES, advise

# Ops that compute the same bits when their result is given to them.
INTO_MEMORY = frozenset({"aten.bmm.default", "aten.mm.default", "aten.addmm.default", "aten._softmax.default"})

POISON = 0xA5  # fills what `empty` returns while a recipe is verified: luck must not pass for proof


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither autograd nor autocast touches what runs inside."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


def same_layout(view: View, other: View) -> bool:
    return (view.size, view.stride, view.offset, view.dtype) == (
        other.size,
        other.stride,
        other.offset,
        other.dtype,
    )


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@dataclass(frozen=True)
class Loader:
    """Makes one view of a buffer from the tensor that stands for it."""

    buffer: int
    is_base: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift_bytes: int  # from the base's first element to the view's
    dtype: torch.dtype

    @staticmethod
    def of(view: View, buffer: Buffer) -> Loader:
        dtype = torch_dtype(view.dtype)
        base = buffer.base
        shift = view.offset * dtype.itemsize - base.offset * torch_dtype(base.dtype).itemsize
        return Loader(view.buffer, same_layout(view, base), view.size, view.stride, shift, dtype)

    def of_tensor(self, base: Tensor) -> Tensor:
        """The view, sharing the base's storage."""
        if self.is_base:
            return base
        if base.dtype == self.dtype:
            offset = base.storage_offset() + self.shift_bytes // self.dtype.itemsize
            return base.as_strided(self.size, self.stride, offset)
        offset_bytes = base.storage_offset() * base.element_size() + self.shift_bytes
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), offset_bytes // self.dtype.itemsize, self.size, self.stride)


def base_of(tensor: Tensor, view: View, buffer: Buffer) -> Tensor:
    """The tensor that stands for the buffer, given the one that lies on it as ``view``. The reverse of
    :meth:`Loader.of_tensor`."""
    back = Loader.of(buffer.base, Buffer(buffer.index, 0, "", buffer.origin, "", 0, view))
    return back.of_tensor(tensor)


def literal_tensor(buffer: Buffer) -> Tensor:
    """The tensor of a literal buffer, on the device that its note names."""
    assert buffer.value is not None
    dtype = torch_dtype(buffer.base.dtype)
    return torch.tensor(buffer.value, dtype=dtype, device=buffer.note).reshape(buffer.base.size)


def _huge(view: View) -> Tensor:
    """New memory on the CPU for a tensor as ``view`` says, in huge pages where the system has them."""
    tensor = torch.empty_strided(view.size, view.stride, dtype=torch_dtype(view.dtype))
    if type(tensor) is Tensor:  # a fake tensor has no address
        advise(tensor.data_ptr(), tensor.untyped_storage().nbytes())
    return tensor


def _poison(tensor: Tensor) -> None:
    nbytes = tensor.untyped_storage().nbytes()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    empty.set_(tensor.untyped_storage(), 0, (nbytes,), (1,)).fill_(POISON)


def _compiled(compiled_graph: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
    return compiled_graph(list(inputs))


def _copy_storage(base: Tensor) -> Tensor:
    storage = base.untyped_storage().clone()
    empty = torch.empty(0, dtype=base.dtype, device=base.device)
    return empty.set_(storage, base.storage_offset(), base.size(), base.stride())


class _Step:
    """One op, ready to run: arguments with loaders in the place of views."""

    def __init__(self, graph: LayerGraph, step: Step, untouched: frozenset[int], context: Context) -> None:
        op, copies, frees = graph.ops[step.op], step.copies, step.frees
        self._graph = graph
        self._untouched = untouched
        self._context = context
        self.args = tuple(self._compile(a) for a in op.args)
        self.kwargs = {name: self._compile(v) for name, v in op.kwargs}
        self.copies = copies
        self.frees = frees
        self.outputs = op.outputs
        self.mutates = tuple((before.buffer, after) for before, after in op.mutates)
        self.overwrites = tuple(
            (before.buffer, Loader.of(before, graph.buffers[before.buffer]))
            for before, after in op.mutates
            if after in op.overwrites
        )
        self.collective = op.collective
        self.empty = False
        self.out: Loader | None = None
        self.fresh: View | None = None
        self.module_path: str | None = None
        if op.target.startswith(CALL_PREFIX):
            self.module_path = op.target.removeprefix(CALL_PREFIX)
        else:
            self.function: Any = _compiled if op.target == COMPILED else schema.find_op(op.target)
            self._reuse_dead_operand(op)
            if self.out is None:
                self._take_huge_pages(op)
            self.empty = op.target != COMPILED and op.target.split(".")[1] in EMPTY_NAMES

    def _reuse_dead_operand(self, op: Op) -> None:
        """Let a pointwise op write its result over an operand that this step reads last: the same bits without
        new memory, whose page faults cost more than the arithmetic."""
        if len(op.outputs) != 1 or op.outputs[0] is None or op.mutates or not op.args:
            return
        result = self._graph.buffers[op.outputs[0]]
        dead = [a for a in op.args if isinstance(a, View) and self._may_become(op, a, result)]
        if not dead:
            return
        operand = dead[0]
        if op.target == "aten._softmax.default" and self._context.device.type == "cpu":
            # The CPU kernel finishes reading an element's row before it writes the element.
            self.function = torch.ops.aten._softmax.out
        elif torch.Tag.pointwise not in self.function.tags:
            return
        else:
            variant = schema.out_variant(self.function)
            if variant is None:
                return
            self.function = variant
        self.out = Loader.of(operand, self._graph.buffers[operand.buffer])

    def _take_huge_pages(self, op: Op) -> None:
        """On a CPU, let an op write a large result to memory that is taken here, in huge pages."""
        if len(op.outputs) != 1 or op.outputs[0] is None or op.mutates or self._context.device.type != "cpu":
            return
        result = self._graph.buffers[op.outputs[0]]
        if result.nbytes < LEAST_BYTES or result.base.offset:
            return
        if op.target not in INTO_MEMORY and torch.Tag.pointwise not in self.function.tags:
            return
        variant = schema.out_variant(self.function)
        if variant is not None:
            self.function, self.fresh = variant, result.base

    def _may_become(self, op: Op, view: View, result: Buffer) -> bool:
        """Whether the result may lie where the operand does."""
        if view.buffer not in self.frees or view.buffer in self._untouched:
            return False
        operand = self._graph.buffers[view.buffer]
        if operand.nbytes != result.nbytes or not same_layout(view, result.base):
            return False
        return all(v == view for v in op.views() if v.buffer == view.buffer)

    def _compile(self, argument: Any) -> Any:
        if isinstance(argument, View):
            return Loader.of(argument, self._graph.buffers[argument.buffer])
        if isinstance(argument, tuple):
            return tuple(self._compile(a) for a in argument)
        if isinstance(argument, Tagged):
            return self._context.live(argument)
        return argument

    def _load(self, argument: Any, env: Mapping[int, Tensor]) -> Any:
        if isinstance(argument, Loader):
            return argument.of_tensor(env[argument.buffer])
        if isinstance(argument, tuple):
            return [self._load(a, env) for a in argument]
        if isinstance(argument, GroupName):
            return argument.boxed()
        return argument

    def run(self, env: dict[int, Tensor], module: nn.Module, poison: bool = False) -> None:
        """Run the op and, unless in a verification, free what it read last."""
        for buffer in self.copies:
            env[buffer] = _copy_storage(env[buffer])
        for buffer, loader in self.overwrites:
            dtype, device = loader.dtype, self._context.device
            env[buffer] = torch.empty_strided(loader.size, loader.stride, dtype=dtype, device=device)
        args = [self._load(a, env) for a in self.args]
        kwargs = {name: self._load(v, env) for name, v in self.kwargs.items()}
        if self.out is not None:
            kwargs["out"] = self.out.of_tensor(env[self.out.buffer])
        elif self.fresh is not None:
            kwargs["out"] = _huge(self.fresh)
        if self.module_path is not None:
            with self._context.autocast():
                result = module.get_submodule(self.module_path).forward(*args, **kwargs)
        else:
            result = self.function(*args, **kwargs)
            if self.collective:
                result = wait_for(self.function, result)
        for before, after in self.mutates:
            env[after] = env.pop(before)
        if any(o is not None for o in self.outputs):
            tensors = [result] if isinstance(result, Tensor) else [t for _, t in flatten_tensors(result, "")]
            for output, tensor in zip(self.outputs, tensors, strict=True):
                if output is not None:
                    env[output] = tensor
                    if poison and self.empty:
                        _poison(tensor)
        if not poison:
            for buffer in self.frees:
                env.pop(buffer, None)


@dataclass(frozen=True)
class StorageStep:
    """What one replay step does to storages, by buffer: ``loads`` are read; ``copies`` get a copy of their own;
    ``fresh`` get new memory before the call; the storage of a ``moves`` pair's first is then the second's;
    ``outputs`` get new memory, or that of ``over``; ``frees`` are let go of."""

    loads: tuple[int, ...]
    copies: tuple[int, ...]
    fresh: tuple[int, ...]
    moves: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    over: int | None
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Context:
    """What a recorded argument means in this process: live objects, the device, the autocast state."""

    objects: tuple[Any, ...]
    device: torch.device
    autocast_dtype: torch.dtype | None = None

    def live(self, tagged: Tagged) -> Any:
        if tagged.kind == "object":
            assert isinstance(tagged.value, int)
            return self.objects[tagged.value]
        if tagged.kind == "device":
            return self.device if tagged.value == self.device.type else torch.device(str(tagged.value))
        if tagged.kind == "complex":
            return complex(str(tagged.value))
        return getattr(torch, str(tagged.value))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self.autocast_dtype is not None
        return torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=enabled)


class Replayer:
    """Runs the steps of a group. Holds no tensor between runs.

    ``private``: sources that are loaded for this run alone, such as decoded ones; results may replace them."""

    def __init__(
        self, graph: LayerGraph, group: Group, context: Context, private: frozenset[int] = frozenset()
    ) -> None:
        self.group = group
        untouched = frozenset(group.sources) - private
        self._steps = [_Step(graph, step, untouched, context) for step in group.steps]
        self._ops = [graph.ops[s.op] for s in group.steps]
        self._writes = [frozenset(graph.ops[s.op].writes) for s in group.steps]
        # An opaque submodule runs as Python code of its own, under the autocast state of the trace.
        self._segments = [
            (plain, list(steps)) for plain, steps in itertools.groupby(self._steps, key=lambda s: s.module_path is None)
        ]

    def __len__(self) -> int:
        return len(self._steps)

    def storage_steps(self) -> tuple[StorageStep, ...]:
        """What the steps allocate and free, for an account of the memory that a run needs."""
        return tuple(
            StorageStep(
                loads=op.reads,
                copies=step.copies,
                fresh=tuple(before for before, _ in step.overwrites),
                moves=step.mutates,
                outputs=tuple(o for o in step.outputs if o is not None),
                over=None if step.out is None else step.out.buffer,
                frees=step.frees,
            )
            for step, op in zip(self._steps, self._ops, strict=True)
        )

    def run(
        self, env: dict[int, Tensor], module: nn.Module, after_step: Callable[[], None] | None = None
    ) -> dict[int, Tensor]:
        """Rebuild all targets from ``env``, which must hold the sources and is consumed. ``after_step`` is called
        after each step and what it freed: a clock."""
        for plain, steps in self._segments:
            with quiet() if plain else torch.no_grad():
                for step in steps:
                    step.run(env, module)
                    if after_step is not None:
                        after_step()
        return {b: env[b] for b in self.group.targets}

    def stepwise(self, env: dict[int, Tensor], module: nn.Module) -> Iterator[frozenset[int]]:
        """Run step by step, with what ``empty`` returns poisoned; yields the buffers that each step wrote."""
        for step, writes in zip(self._steps, self._writes, strict=True):
            with quiet() if step.module_path is None else torch.no_grad():
                step.run(env, module, poison=True)
            yield writes
            for buffer in step.frees:
                env.pop(buffer, None)
