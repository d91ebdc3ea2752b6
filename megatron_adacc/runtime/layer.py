"""The forward of an attached layer: the layer's own forward, inside a pair of saved-tensor hooks."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import LayerGraph, Origin
from megatron_adacc.graph.replay import base_of
from megatron_adacc.graph.storages import call_tensors, named_tensors
from megatron_adacc.graph.tracer import Traced, Tracer
from megatron_adacc.runtime.errors import modified
from megatron_adacc.runtime.graph_walk import storages_of
from megatron_adacc.runtime.key import LiveState, arguments_key, environment_key
from megatron_adacc.runtime.program import Program
from megatron_adacc.runtime.sharding import refuse_absent, refuse_parts
from megatron_adacc.runtime.stash import Stash, unpack
from megatron_adacc.runtime.traces import LookedAt, Trace, TraceCache

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)


class _Deferred:
    """A handle of a call that is being traced: the tensor, until the trace says what is to become of it."""

    __slots__ = ("__weakref__", "handle", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.handle: Any = None

    def unpack(self) -> Tensor:
        if self.handle is not None:
            result = self.handle.unpack()
            assert isinstance(result, Tensor)
            return result
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise modified("a saved tensor", self.tensor._version, self.version)
        return self.tensor

    def stored_storages(self) -> tuple[torch.UntypedStorage, ...]:
        if self.handle is not None:
            return tuple(self.handle.stored_storages())
        return () if self.tensor is None else storages_of(self.tensor)


class LayerForward:
    """Stands in for ``module.forward`` while the layer is attached.

    Copies of the module (``copy.deepcopy``, pickle) get the layer's own forward: they are not attached."""

    def __init__(
        self, module: nn.Module, name: str, layer: int, cache: TraceCache, live_state: LiveState,
        stashes: WeakSet[Any],
    ) -> None:  # fmt: skip
        self.module = module
        self.name = name
        self.layer = layer
        self.cache = cache
        self.original: Callable[..., Any] = module.forward
        self.replaced = module.__dict__.get("forward")  # a forward of the instance's own, to be put back
        self._live_state = live_state
        self._stashes = stashes
        self._warned = False
        self._undisturbed: Callable[..., Any] | None = None
        self.__wrapped__ = self.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.module))
        return _plain_forward(copied if copied is not None else self.module)

    def __reduce__(self) -> Any:
        return (_plain_forward, (self.module,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._undisturbed is None:
            if "torch._dynamo" not in sys.modules:
                return self._call(*args, **kwargs)
            # In a compiled model the graph breaks here and an attached layer runs as it is: Dynamo must not
            # look into hooks. Made when it is needed, because importing torch._dynamo takes seconds.
            self._undisturbed = torch._dynamo.disable(self._call)
        return self._undisturbed(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        self._look_around()
        self.cache.begin(self.layer)
        tensors: list[Tensor] = []
        key = (arguments_key(args, kwargs, tensors), self._live_state.key(), environment_key())
        trace = self.cache.get(key, self.layer)
        if trace.settled is None and not trace.given_up:
            with self.cache.tracing:
                if trace.settled is None and not trace.given_up:  # as another thread may have found meanwhile
                    return self._trace(trace, args, kwargs)
        if trace.given_up:
            return self._keep_all(args, kwargs)
        if not trace.constants_unchanged():
            self.cache.forget(key)
            return self._trace(self.cache.get(key, self.layer), args, kwargs)
        program = self.cache.program(trace, self.layer)
        if self.cache.look is not None:
            rehearsal = Rehearsal(self.module, self.original, args, kwargs)
            self.cache.look(LookedAt(self.layer, self.module, program, rehearsal))
        stash = Stash(program, self.module, self.name)
        self._stashes.add(stash)
        stash.begin(tensors)
        try:
            with saved_tensors_hooks(stash.pack, unpack):
                output = self.original(*args, **kwargs)
            stash.finish()
        finally:
            stash.release()
        return output

    def _look_around(self) -> None:
        """Refuse or report what the engine cannot work with."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UserError(
                f"{self.name} is attached to megatron-adacc, which cannot run inside torch.func transforms (grad, "
                "vjp, vmap); call handle.detach() before, or transform a copy of the module."
            )
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            raise UserError(
                f"{self.name} is attached to megatron-adacc, which needs saved-tensor hooks, and they are disabled "
                "here (torch.autograd.graph.disable_saved_tensors_hooks); call handle.detach() before."
            )
        if not self._warned and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self._warned = True
            logger.warning(
                "Another pair of saved-tensor hooks (save_on_cpu, activation offload, checkpoint) is active around "
                "%s; only the innermost pair runs, so it will not see what this layer saves.", self.name,
            )  # fmt: skip

    def _keep_all(self, args: Any, kwargs: Any) -> Any:
        with saved_tensors_hooks(_Deferred, unpack):
            return self.original(*args, **kwargs)

    def _trace(self, trace: Trace, args: Any, kwargs: Any) -> Any:
        """Run the call under the tracer, then stash it as its own trace allows."""
        refuse_parts(self.module, self.name)  # sharded since it was attached
        refuse_absent(self.module, self.name)
        tracer = Tracer(self.module, args, kwargs)
        inputs = [t for _, t in call_tensors(args, kwargs)]
        held_inputs = [t.detach() for t in inputs]
        rehearsal = Rehearsal(self.module, self.original, args, kwargs)
        handles: list[_Deferred] = []
        call = _TracedCall(handles)
        self._stashes.add(call)

        def pack(tensor: Tensor) -> _Deferred:
            tracer.pack(tensor)
            handles.append(_Deferred(tensor))
            return handles[-1]

        with saved_tensors_hooks(pack, unpack), tracer:
            output = self.original(*args, **kwargs)
        traced = tracer.finish(output)
        with torch.no_grad():
            program = self.cache.learn(
                trace, traced, self.layer, self.module, _saved_bases(traced, handles),
                lambda graph: self._sources(graph, held_inputs), rehearsal,
            )  # fmt: skip
            self._stash_afterwards(program, held_inputs, handles)
        if self.cache.look is not None:
            self.cache.look(LookedAt(self.layer, self.module, program, rehearsal))
        return output

    def _stash_afterwards(self, program: Program, inputs: list[Tensor], handles: list[_Deferred]) -> None:
        stash = Stash(program, self.module, self.name)
        self._stashes.add(stash)
        stash.begin(inputs)
        try:
            for deferred in handles:
                assert deferred.tensor is not None
                deferred.handle = stash.pack(deferred.tensor)
                deferred.handle.version = deferred.version
                deferred.tensor = None
            stash.finish()
        finally:
            stash.release()

    def _sources(self, graph: LayerGraph, inputs: list[Tensor]) -> dict[int, Tensor]:
        """Base tensors of the graph's parameters, module buffers, attributes and inputs."""
        by_name = {(n.origin, n.name): n.tensor for n in named_tensors(self.module)}
        found = {
            b.index: by_name[b.origin, b.name].detach()
            for b in graph.buffers
            if (b.origin, b.name) in by_name and b.previous is None
        }
        for spec, tensor in reversed(list(zip(graph.inputs, inputs, strict=True))):
            if graph.buffers[spec.buffer].origin == Origin.INPUT:
                found[spec.buffer] = tensor
        return found

    def install(self) -> Self:
        self.module.forward = self
        return self

    def remove(self) -> None:
        """Put back what was there; does nothing if someone else has replaced forward since."""
        if self.module.__dict__.get("forward") is not self:
            return
        if self.replaced is None:
            del self.module.forward
        else:
            self.module.forward = self.replaced


class _TracedCall:
    """For the account of stored bytes: what a traced call holds until its trace is done."""

    def __init__(self, handles: list[_Deferred]) -> None:
        self._handles = handles

    def stored_storages(self) -> list[torch.UntypedStorage]:
        return [s for handle in self._handles for s in handle.stored_storages()]


def _plain_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def _saved_bases(traced: Traced, handles: list[_Deferred]) -> dict[int, Tensor]:
    """Base tensors of what autograd saved, by buffer."""
    graph = traced.graph
    found: dict[int, Tensor] = {}
    for pack, deferred in zip(graph.packs, handles, strict=True):
        buffer = graph.buffers[pack.view.buffer]
        if buffer.storage >= 0 and buffer.index not in found:
            assert deferred.tensor is not None
            found[buffer.index] = base_of(deferred.tensor, pack.view, buffer)
    return found
