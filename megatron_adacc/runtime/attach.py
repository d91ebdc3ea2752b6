"""attach(): put layers under a plan, and the handle that looks after them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import Room, StagePlan
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.planner import LayerPlan, Plan
from megatron_adacc.runtime.auto import Auto
from megatron_adacc.runtime.gradient_errors import error_table, gradients, named_parameters, relative_error
from megatron_adacc.runtime.key import LiveState, class_key, numbering_attributes
from megatron_adacc.runtime.layer import LayerForward
from megatron_adacc.runtime.policy import Policy, policy_for
from megatron_adacc.runtime.report import report, stage_report
from megatron_adacc.runtime.setting import Setting
from megatron_adacc.runtime.sharding import refuse_parts
from megatron_adacc.runtime.states import CodecStates
from megatron_adacc.runtime.traces import TraceCache

MIN_BYTES = 1024
TRACES_PER_CLASS = 16


def attach(
    layers: nn.Module | Sequence[nn.Module],
    plan: str | Plan | Path | Policy = "recompute",
    *,
    limit: str | None = None,
    error_budget: float = 0.0,
    groups: Sequence[dist.ProcessGroup] = (),
    setting: Setting | None = None,
    min_bytes: int = MIN_BYTES,
    traces_per_class: int = TRACES_PER_CLASS,
) -> Handle:
    """Store what ``layers`` keep for backward as ``plan`` says, from their next forward on.

    Args:
        layers: one layer, a ModuleList of layers, or a list of them. Each layer's call is one unit: its
            input is the boundary that recomputation starts from.
        plan: "keep": everything stays. "recompute": what has a recipe that was shown to be exact is
            recomputed, dropout masks are stored as bits. "compress": each buffer by the codec of its role.
            "quantize": the paper's direct INT4 of everything, to compare with. "auto": what the solver finds
            fastest within the limit, from costs that are measured on this device. A Plan, the path of a plan file,
            or what makes the plan of each layer.
        limit: for "auto". Bytes such as "30GiB": of everything on a GPU (on a CPU: of these layers' activations,
            working memory and gradients). A share such as "25%": of the activations that the layers hold without a
            plan. Default: the device's memory less 5 %.
        error_budget: for "auto", the relative gradient error that lossy actions may cost, as the root mean square over
            the layers; 0 allows none.
        groups: for "auto", process groups whose ranks train the same layers on inputs of the same shapes at the same
            time, such as the ranks that FSDP shards over: all get the plan of the first, as soon as there is one (in
            the first forward, where every layer has a twin). Without, each rank has the plan that its own times
            suggest; no gradient depends on that.
        setting: for "auto", more about the run than the limit; limit, error budget and groups are then in it.
        min_bytes: smaller buffers are kept by the plans that are made here.
        traces_per_class: how many call keys (shapes and the like) are remembered for each layer class.

    Returns:
        a handle; ``handle.detach()`` leaves the layers as they were. It is a context manager.

    Raises:
        UserError: no layer, a layer twice or inside another, one that is attached already, one with parts that are
            sharded by themselves (FSDP), no such plan, a limit or error budget that cannot be read, or a limit, error
            budget or groups that come with another plan than "auto".
    """
    modules = _modules(layers)
    classes: dict[Hashable, dict[int, nn.Module]] = {}
    keys = [class_key(module) for module in modules]
    for place, (key, module) in enumerate(zip(keys, modules, strict=True)):
        classes.setdefault(key, {})[place] = module
    policy: Policy
    if plan == "auto":
        if setting is None:
            read = None if limit is None else Limit.parse(limit)
            setting = Setting(read, room_on, groups=groups, error_budget=error_budget, min_bytes=min_bytes)
        policy = Auto(setting, tuple(tuple(members) for members in classes.values()))
    elif limit is not None:
        raise UserError(f"A limit is for the plan 'auto'; the plan {str(plan)!r} does not look at one: leave it out.")
    elif error_budget:
        raise UserError(
            f"An error budget is for the plan 'auto'; the plan {str(plan)!r} does not look at one: leave it out."
        )
    elif groups:
        raise UserError(
            f"Process groups are for the plan 'auto'; the plan {str(plan)!r} is the same on all ranks: leave them out."
        )
    elif isinstance(plan, str | Plan | Path):
        policy = policy_for(str(plan) if isinstance(plan, Path) else plan, min_bytes)
    else:
        policy = plan
    states = CodecStates()
    caches = {key: TraceCache(policy, traces_per_class, tuple(members), states) for key, members in classes.items()}
    numbering = {key: numbering_attributes(members) for key, members in classes.items()}
    stashes: WeakSet[Any] = WeakSet()
    forwards = []
    for place, (key, module) in enumerate(zip(keys, modules, strict=True)):
        name = f"layer {place} ({type(module).__name__})"
        live_state = LiveState(module, numbering[key])
        forwards.append(LayerForward(module, name, place, caches[key], live_state, stashes))
    return Handle([f.install() for f in forwards], list(caches.values()), stashes, policy, states)


def room_on(device: torch.device) -> Room:
    """What activations share the device with, when nothing else is known: what is allocated now, on a GPU."""
    return Room(fixed_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)


def _modules(layers: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    one_layer = isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList)
    modules: list[Any] = [layers] if one_layer else list(layers)  # type: ignore[arg-type]
    if not modules:
        raise UserError("attach() needs at least one layer; it was given an empty list.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise UserError(f"attach() takes modules; it was given a {type(module).__name__}.")
        if isinstance(module.__dict__.get("forward"), LayerForward):
            raise UserError(f"This {type(module).__name__} is attached already; call its handle's detach() first.")
    inside = {id(sub): m for m in modules for sub in m.modules() if sub is not m}
    for i, module in enumerate(modules):
        if any(module is other for other in modules[:i]):
            raise UserError("attach() was given the same layer twice; give each once.")
        if id(module) in inside:
            raise UserError(
                f"attach() was given a {type(module).__name__} and the {type(inside[id(module)]).__name__} that "
                "contains it; give one of them."
            )
        for sub in module.modules():
            if isinstance(sub.__dict__.get("forward"), LayerForward):
                raise UserError(
                    f"A {type(sub).__name__} inside this {type(module).__name__} is attached already; detach it first."
                )
        refuse_parts(module, f"This {type(module).__name__}")
    return modules


class Handle:
    """The attached layers. ``detach()`` undoes attach(); graphs and stashes in flight stay valid."""

    def __init__(
        self, forwards: list[LayerForward], caches: list[TraceCache], stashes: WeakSet[Any], policy: Policy,
        states: CodecStates,
    ) -> None:  # fmt: skip
        self._forwards = forwards
        self.states = states
        self._caches = caches
        self._stashes = stashes
        self._policy = policy
        self._gradient_errors: dict[str, float] = {}

    def stored_bytes(self) -> int:
        """Bytes that live stashes hold now: kept, packed and rebuilt tensors, each storage once; not the
        parameters and module buffers of the attached layers."""
        skipped = set()
        for forward in self._forwards:
            for tensor in (*forward.module.parameters(), *forward.module.buffers()):
                skipped.add(tensor.untyped_storage()._cdata)
        sizes = {}
        for stash in list(self._stashes):
            for storage in stash.stored_storages():
                if storage._cdata not in skipped:
                    sizes[storage._cdata] = storage.nbytes()
        return sum(sizes.values())

    @property
    def forwards(self) -> list[LayerForward]:
        """What stands in for each layer's forward, by the layer's place."""
        return list(self._forwards)

    @property
    def caches(self) -> list[TraceCache]:
        """The traces of each layer class."""
        return list(self._caches)

    @property
    def policy(self) -> Policy:
        """What makes the plans of the layers."""
        return self._policy

    def trace_again(self) -> None:
        """Forget what was traced; the next forwards are traced and planned as the first were. Between steps only."""
        for cache in self._caches:
            cache.forget_all()

    @property
    def graphs(self) -> list[LayerGraph]:
        """One graph for each layer class and call key that was traced, without repetition."""
        found = {}
        for cache in self._caches:
            for trace in cache.traces():
                assert trace.graph is not None
                found[fingerprint(trace.graph)] = trace.graph
        return list(found.values())

    @property
    def plan(self) -> Plan:
        """The plan in force, as far as layers have been traced; can be saved and attached again."""
        layers: dict[LayerPlan, None] = {}
        for forward in self._forwards:
            for trace in forward.cache.traces():
                if trace.settled is not None:
                    layers[forward.cache.program(trace, forward.layer).plan] = None
        return Plan(tuple(layers), self._policy.name)

    @property
    def stage(self) -> StagePlan | None:
        """What the solver answered, under "auto", once it has been asked."""
        return self._policy.stage if isinstance(self._policy, Auto) else None

    @property
    def traced_forwards(self) -> int:
        """How many forwards ran under the tracer so far."""
        return sum(cache.count for cache in self._caches)

    def report(self) -> str:
        """A table for each graph: site, role, shape, dtype, bytes, action with its recipe's length, and what keeps
        a buffer from being recomputed; then the gradient errors, if they were measured."""
        rows = [] if self.stage is None else [stage_report(self.stage)]
        for cache in self._caches:
            places = [f.layer for f in self._forwards if f.cache is cache]
            rows += [report(cache, trace, places) for trace in cache.traces()]
        if self._gradient_errors:
            rows.append(error_table(self._gradient_errors))
        return "\n\n".join(rows) or "no layer was traced yet: nothing has run with gradients enabled"

    def gradient_errors(self, loss: Callable[[], Tensor]) -> dict[str, float]:
        """Measure what the plan costs: relative gradient error of each parameter of the attached layers, by
        ``layer.path``; the report shows it from then on. Nothing is trained: no .grad and no default random
        generator is changed.

        Args:
            loss: runs the model on some inputs and returns its loss. It is called twice, attached and not, and
                must do the same both times: what it draws from generators of its own (Megatron's tracker), and
                what its forward changes (running statistics), is its to put back.

        Raises:
            UserError: loss() gives no scalar with a gradient, or none that the layers contribute to.
        """
        parameters = named_parameters({f.layer: f.module for f in self._forwards})
        planned = gradients(loss, list(parameters.values()))
        attached = [f for f in self._forwards if f.module.__dict__.get("forward") is f]
        try:
            for forward in attached:
                forward.remove()
            exact = gradients(loss, list(parameters.values()))
        finally:
            for forward in attached:
                forward.install()
        self._gradient_errors = {
            name: relative_error(a, b)
            for name, a, b in zip(parameters, planned, exact, strict=True)
            if a is not None and b is not None
        }
        return dict(self._gradient_errors)

    def detach(self) -> None:
        """Give the layers their own forward back. A second call does nothing.

        Raises:
            NotTwoValuedError: on CUDA, something that was stored as bits had more than two values.
        """
        self._remove()
        for cache in self._caches:
            cache.close()

    def _remove(self) -> None:
        for forward in self._forwards:
            forward.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        else:
            self._remove()
