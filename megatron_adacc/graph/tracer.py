"""Trace one forward of a layer into a :class:`LayerGraph`.

    with Tracer(layer, args, kwargs) as tracer:        # a dispatch mode: sees every aten op
        with saved_tensors_hooks(tracer.pack, ...):    # told of every tensor that autograd saves
            output = layer(*args, **kwargs)
    traced = tracer.finish(output)

The tracer changes nothing about the forward that it watches: the call is the training's own call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_adacc.graph import schema
from megatron_adacc.graph.compiled import observed_calls, written_inputs
from megatron_adacc.graph.external import External
from megatron_adacc.graph.fused_dropout import find_formula
from megatron_adacc.graph.model import Argument, LayerGraph, Op, Origin, View, views_in
from megatron_adacc.graph.recorder import Recorder
from megatron_adacc.graph.roles import op_leaf, with_roles
from megatron_adacc.graph.storages import flatten_tensors, has_plain_storage, named_tensors, shares_storages
from megatron_adacc.graph.submodules import ModulePaths

EMPTY_NAMES = frozenset(name.split("::")[1] for name in schema.EMPTY_OPS)
DRAWS = "draws random numbers"
COMPILED = "compiled"  # target of a torch.compile region
CALL_PREFIX = "call "  # target of an opaque submodule: "call mlp.norm"


@dataclass(frozen=True)
class Traced:
    """A graph with what belongs to this process and cannot be written to a file.

    ``objects`` are the live process groups and the like that ops were given; ``externals`` are tensors that
    no visible op wrote, by buffer; ``host_values`` is what the program read from tensors into Python."""

    graph: LayerGraph
    objects: tuple[Any, ...]
    externals: dict[int, External] = field(default_factory=dict)
    host_values: tuple[object, ...] = ()
    device: torch.device | None = None


@dataclass(frozen=True)
class Call:
    """A submodule's call under way: where ops and buffers stood at its entry, and its arguments."""

    first_op: int
    first_buffer: int
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    host_reader: str | None


class Tracer(Recorder, TorchDispatchMode):
    """Records one call. ``pack`` is to be called with each tensor that autograd saves."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._paths = ModulePaths(module, self._submodule_called, self._submodule_returned)
        self._module = module
        self._host_values: list[object] = []
        self._host_reader: str | None = None
        self._compiled = contextlib.ExitStack()
        self._inside_compiled = False
        self._compiled_draws = False
        TorchDispatchMode.__init__(self)
        Recorder.__init__(self, module, args, kwargs)

    @property
    def _path(self) -> str:
        return self._paths.current

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile must run what it compiled, as it does in training, although a mode is active."""
        return True

    def __enter__(self) -> Tracer:
        self._paths.install()
        self._compiled.enter_context(observed_calls(self._compiled_call))
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._compiled.close()
        self._paths.remove()

    # ---- what is seen ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others (DTensor, a pending collective): its own ops come here
        if self._inside_compiled:
            self._compiled_draws |= isinstance(func, torch._ops.OpOverload) and schema.draws_random(func, args, kwargs)
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            result = func(*args, **kwargs)
            self._record_unknown(str(func), result)
            return result
        if self._gathers_parameters(func, args, kwargs):
            return func(*args, **kwargs)
        name = schema.op_name(func)
        site = self._site(name)
        if name == "aten::lift_fresh":
            self._literal(args[0])
        result, looks = None, func.is_view or func.namespace == "prim"
        if looks:
            result = func(*args, **kwargs)
            if shares_storages(result, args):
                # Not even a buffer is made of what nobody reads: hooks look at parameters in an order of their own.
                return result
        if schema.overwrites_all(func):
            for tensor in self._written(func, args, kwargs):
                self._carve_scratch(tensor)
        unread = schema.unread_argument(func, args, kwargs)
        encoded_args = tuple(self._unread(a) if i == unread else self._encode(a) for i, a in enumerate(args))
        encoded_kwargs = tuple((k, self._encode(v)) for k, v in kwargs.items())
        barrier = self._barrier(func, args, kwargs)
        if not looks:
            result = func(*args, **kwargs)
        if schema.is_collective(func):
            result = wait_for(func, result)
        self._add_op(
            schema.overload_name(func), site, encoded_args, encoded_kwargs, barrier,
            self._written(func, args, kwargs), result, schema.overwrites_all(func), schema.is_collective(func),
        )  # fmt: skip
        if name in schema.HOST_READS:
            self._host_values.append(result if not isinstance(result, (Tensor, tuple, list)) else None)
            if self._host_reader is None and self._depends_on_the_call(encoded_args):
                self._host_reader = site
        return result

    @staticmethod
    def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The plain tensors that the call writes."""
        arguments = schema.written_arguments(func, args, kwargs)
        return [t for a in arguments for _, t in flatten_tensors(a, "") if has_plain_storage(t)]

    def _gathers_parameters(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call only brings parameters up to date, this layer's or others in the same memory: Megatron's
        hooks do that inside the first forwards of a step and in no others. Who reads them sees them as they are."""
        if not schema.is_collective(func):
            return False
        written = self._written(func, args, kwargs)
        tensors = [t for _, t in (*flatten_tensors(args, ""), *flatten_tensors(kwargs, "")) if has_plain_storage(t)]
        return (
            bool(written)
            and all(self._storages.holds_parameters(t) for t in written)
            and all(self._storages.holds_parameters(t) or self._is_from_before(t) for t in tensors)
        )

    def finish(self, output: Any) -> Traced:
        """The graph of the call that returned ``output``."""
        outputs = tuple(self._view(t) for _, t in flatten_tensors(output, "") if has_plain_storage(t))
        graph = LayerGraph(
            module=type(self._module).__name__,
            inputs=self._input_specs,
            ops=tuple(self._ops),
            buffers=tuple(self._buffers),
            packs=tuple(self._packs),
            outputs=outputs,
        )
        traced = Traced(
            with_roles(graph), tuple(self._objects), self._externals, tuple(self._host_values), self._device
        )
        self._let_go()
        return traced

    # ---- ops -------------------------------------------------------------------------------------------

    def _barrier(self, func: Any, args: Any, kwargs: Any) -> str | None:
        name = schema.op_name(func)
        if name == "aten::native_dropout" and not args[2]:
            return None
        if schema.draws_random(func, args, kwargs):
            return DRAWS
        if name in schema.NOT_REPEATABLE:
            return "pairs with a call on another rank"
        if name in schema.UNDECLARED_WRITES:
            return "updates running statistics"
        if name in ("aten::set_", "aten::resize_"):
            return "changes a storage"
        if any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values())):
            return DRAWS
        for _, tensor in (*flatten_tensors(args, ""), *flatten_tensors(kwargs, "")):
            if not has_plain_storage(tensor):
                return "takes a tensor that is not plain"
        return self._host_barrier()

    def _host_barrier(self) -> str | None:
        if self._host_reader is None:
            return None
        return f"follows a value read by the host at {self._host_reader}"

    def _depends_on_the_call(self, args: tuple[Argument, ...]) -> bool:
        """Whether tensors in ``args`` follow from the layer's arguments, its parameters or random numbers. A
        tensor that only came from outside, such as a generator's state, says nothing about this call."""
        pending = [view.buffer for view in views_in(args)]
        seen: set[int] = set()
        while pending:
            buffer = self._buffers[pending.pop()]
            if buffer.index in seen:
                continue
            seen.add(buffer.index)
            if buffer.writer is None:
                if buffer.origin not in (Origin.OPAQUE, Origin.LITERAL):
                    return True
                continue
            op = self._ops[buffer.writer]
            if op.barrier == DRAWS:
                return True
            pending.extend(op.reads)
        return False

    def _compiled_call(self, compiled: Any, inputs: list[Any], run: Callable[[], Any]) -> Any:
        """One call of a compiled graph becomes one op."""
        if self._inside_compiled or not all(has_plain_storage(t) for t in inputs if isinstance(t, Tensor)):
            return run()
        site = self._site(COMPILED)
        args = (self._object(compiled), tuple(self._encode(v) for v in inputs))
        written = [inputs[i] for i in written_inputs(compiled)]
        self._inside_compiled, self._compiled_draws = True, False
        try:
            result = run()
        finally:
            self._inside_compiled = False
        barrier = DRAWS if self._compiled_draws else self._host_barrier()
        self._add_op(COMPILED, site, args, (), barrier, written, result)
        if barrier == DRAWS and not written:
            self._split_compiled(inputs, [t for _, t in flatten_tensors(result, "")])
        return result

    def _split_compiled(self, inputs: list[Any], results: list[Tensor]) -> None:
        """Where the compiled region just recorded is bias, dropout and add: its mask is random, and the other
        result follows from inputs and mask. Replay proves the ops found here again, on another call."""
        op = self._ops[-1]
        if len(results) != 2 or None in op.outputs or op.index != len(self._ops) - 1 or op.target != COMPILED:
            return
        mask, out = sorted(results, key=lambda t: t.dtype != torch.bool)
        calls = find_formula(inputs, mask, out)
        if calls is None:
            return
        output = self._view(out).buffer
        self._ops[-1] = replace(op, outputs=tuple(None if o == output else o for o in op.outputs))
        self._add_calls(calls, output, self._host_barrier())

    def _add_op(
        self, target: str, site: str, args: Any, kwargs: Any, barrier: str | None, written: list[Tensor],
        result: Any, overwriting: bool = False, collective: bool = False,
    ) -> None:  # fmt: skip
        """Add the op, unless it wrote nothing: a view, or a question about a tensor."""
        index = len(self._ops)
        mutates, overwrites = self._record_writes(site, index, written, overwriting)
        outputs: list[int | None] = []
        for i, (_, tensor) in enumerate(flatten_tensors(result, "")):
            if not has_plain_storage(tensor) or self._known(tensor):
                outputs.append(None)
            else:
                region = self._storages.add(tensor, len(self._buffers), None)
                nbytes = tensor.untyped_storage().nbytes()
                base = self._storages.view(tensor, region)
                name = f"{site}.{len(mutates) + i}"  # the states that the op wrote in place come first
                outputs.append(self._new_buffer(region, base, name, Origin.OP, nbytes=nbytes, writer=index))
        if not mutates and all(o is None for o in outputs):
            return
        op = Op(
            index, target, self._path, args, kwargs, tuple(outputs), mutates, overwrites, collective, barrier,
        )  # fmt: skip
        if target == "aten.native_dropout.default" and barrier == DRAWS:
            self._record_dropout(op)
        else:
            self._ops.append(op)

    def _record_writes(
        self, site: str, index: int, written: list[Tensor], overwriting: bool
    ) -> tuple[tuple[tuple[View, int], ...], tuple[int, ...]]:
        mutates: list[tuple[View, int]] = []
        overwrites: list[int] = []
        for i, tensor in enumerate(written):
            region = self._region(tensor)
            before = self._storages.view(tensor, region)
            old = self._buffers[region.state]
            after = self._new_buffer(
                region, old.base, f"{site}.{i}", Origin.OP, nbytes=old.nbytes, writer=index, previous=old.index
            )
            mutates.append((before, after))
            if overwriting and replace(before, buffer=after) == self._buffers[after].base:
                overwrites.append(after)
        return tuple(mutates), tuple(overwrites)

    def _record_dropout(self, op: Op) -> None:
        """Split fused dropout in two: the mask is random, the result follows from input and mask. The second
        half is autograd's own formula for the gradient; replay proves that it gives the same bits."""
        output, mask = op.outputs
        source, probability, _ = op.args
        assert isinstance(probability, float)
        assert output is not None
        assert mask is not None
        self._ops.append(replace(op, outputs=(None, mask)))
        scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
        args = (source, self._buffers[mask].base, scale)
        index = len(self._ops)
        self._ops.append(Op(index, "aten.native_dropout_backward.default", op.module, args, (), (output,)))
        self._buffers[output] = replace(self._buffers[output], writer=index)

    def _record_unknown(self, name: str, result: Any) -> None:
        """A call that is no aten op, such as a higher-order op: what it returns is opaque."""
        for _, tensor in flatten_tensors(result, ""):
            if has_plain_storage(tensor):
                self._view(tensor)
                state = self._storages.region(tensor)
                if state is not None and self._buffers[state.state].origin == Origin.OPAQUE:
                    self._externals.pop(state.state, None)
                    self._buffers[state.state] = replace(self._buffers[state.state], note=f"written by {name}")

    # ---- submodules whose inside is invisible -------------------------------------------------------------

    def _submodule_called(self, args: Any, kwargs: Any) -> Call:
        return Call(
            len(self._ops),
            len(self._buffers),
            tuple(self._encode(a) for a in args),
            tuple((k, self._encode(v)) for k, v in kwargs.items()),
            self._host_reader,
        )

    def _submodule_returned(self, path: str, submodule: nn.Module, call: Call, output: Any) -> None:
        """Where the submodule's result was written by nothing visible (a fused CUDA extension), its call
        becomes one op, and what it hides inside becomes opaque."""
        tensors = [t for _, t in flatten_tensors(output, "")]
        if not all(has_plain_storage(t) for t in tensors):
            return
        inside = self._ops[call.first_op :]
        if not any(self._unwritten(t, call.first_buffer) for t in tensors):
            return
        if any(op.barrier or op.collective for op in inside) or self._host_reader != call.host_reader:
            return
        if any(before.buffer < call.first_buffer for op in inside for before, _ in op.mutates):
            return
        states = [self._view(t).buffer for t in tensors]
        del self._ops[call.first_op :]
        for index in range(call.first_buffer, len(self._buffers)):
            buffer = self._buffers[index]
            if buffer.writer is not None:
                note = f"written inside {path}, whose inside is not visible"
                self._buffers[index] = replace(buffer, origin=Origin.OPAQUE, writer=None, previous=None, note=note)
        outputs: list[int | None] = []
        for i, state in enumerate(states):
            if state < call.first_buffer or state in outputs:
                outputs.append(None)
                continue
            outputs.append(state)
            self._externals.pop(state, None)
            self._buffers[state] = replace(
                self._buffers[state],
                origin=Origin.OP, writer=call.first_op, site=f"{path}/call.{i}", note="",
            )  # fmt: skip
        parameters = tuple(self._view(named.tensor).buffer for named in named_tensors(submodule))
        self._ops.append(
            Op(
                call.first_op, CALL_PREFIX + path, path, call.args, call.kwargs, tuple(outputs),
                uses=parameters,
            )
        )  # fmt: skip

    def _unwritten(self, tensor: Tensor, first_buffer: int) -> bool:
        if self._storages.region(tensor) is None:
            return self._storages.named(tensor) is None
        buffer = self._buffers[self._view(tensor).buffer]
        if buffer.index < first_buffer:
            return False
        if buffer.writer is not None:
            return op_leaf(self._ops[buffer.writer]) in EMPTY_NAMES
        return buffer.index in self._externals


def wait_for(func: Any, result: Any) -> Any:
    """Let a collective's result be complete before anything reads it."""
    if schema.op_name(func).startswith("c10d::"):
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.ScriptObject) and hasattr(item, "wait"):
                item.wait()
        return result
    if schema.op_name(func) != f"{schema.FUNCTIONAL_COLLECTIVES}::wait_tensor":
        for _, tensor in flatten_tensors(result, ""):
            torch.ops._c10d_functional.wait_tensor.default(tensor)
    return result
