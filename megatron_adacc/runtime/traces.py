"""Traces of the layers of one class, by call key, in a bounded cache.

    call 1 of a key   traced; the call is stashed by a program of its own trace
    call 2            traced again, with other inputs and mostly by another layer: proves constants, and that
                      the program does not depend on what the trace does not record. If the two traces agree
                      the key is *settled*
    call 3 ...        run the settled program; no dispatch mode

A key whose traces never agree (control flow by the data, numbers that change) stays *unsettled*: after
MAX_TRACES calls it is no longer traced and its activations are kept as autograd would.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megatron_adacc.cost.outliers import outlier_channels
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.timing import Sample
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import LayerGraph, Origin
from megatron_adacc.graph.prove import Varying, differences, prove
from megatron_adacc.graph.replay import Context
from megatron_adacc.graph.tracer import Traced
from megatron_adacc.graph.verify import Evidence, verify
from megatron_adacc.planner import LayerPlan
from megatron_adacc.runtime.agree import agreement
from megatron_adacc.runtime.mask_check import MaskCheck
from megatron_adacc.runtime.policy import Policy
from megatron_adacc.runtime.program import Constants, Program
from megatron_adacc.runtime.states import CodecStates

logger = logging.getLogger(__name__)

MAX_TRACES = 4


@dataclass(frozen=True)
class LookedAt:
    """A call that is about to run: of the layer at a place, by a program; and a rehearsal of it."""

    place: int
    module: nn.Module
    program: Program
    rehearsal: Rehearsal


@dataclass
class Trace:
    """What is known about one call key."""

    calls: int = 0
    last: Traced | None = None
    settled: Traced | None = None
    evidence: Evidence | None = None
    programs: dict[LayerPlan, Program] = field(default_factory=dict)
    by_layer: dict[int, Program] = field(default_factory=dict)
    generation: int = 0
    varying: Varying = field(default_factory=Varying)
    layers: set[int] = field(default_factory=set)  # places of the layers that ran with it
    given_up: bool = False

    @property
    def graph(self) -> LayerGraph | None:
        traced = self.settled or self.last
        return None if traced is None else traced.graph

    def constants_unchanged(self) -> bool:
        """Whether the proven constants are still what the trace saw."""
        return all(program.constants.unchanged for program in self.programs.values())

    @property
    def constants(self) -> Constants:
        assert self.settled is not None
        return constants_of(self.settled)


def constants_of(traced: Traced) -> Constants:
    """The proven constants of a trace, which the caller must have held since."""
    tensors = {
        b: external.tensor
        for b, external in traced.externals.items()
        if traced.graph.buffers[b].origin == Origin.CONSTANT and external.tensor is not None
    }
    return Constants(tensors, {b: t._version for b, t in tensors.items()})


class TraceCache:
    """Traces of one layer class. ``capacity`` keys are remembered; of more, the one unused longest goes.
    ``layers``: the places of the layers of this class. ``states``: what codecs know about their buffers."""

    def __init__(
        self, policy: Policy, capacity: int, layers: tuple[int, ...], states: CodecStates | None = None
    ) -> None:
        self._policy = policy
        self.states = CodecStates() if states is None else states
        self._capacity = capacity
        self._layers = layers
        self._mask_checks: dict[torch.device, MaskCheck] = {}
        self._traces: OrderedDict[Hashable, Trace] = OrderedDict()
        self.count = 0  # forwards traced so far
        self.watch: Callable[[Program], None] | None = None  # gets each program that is made
        self.look: Callable[[LookedAt], None] | None = None  # gets each call of a settled program, before it runs
        self.tracing = threading.RLock()  # held while a layer runs on stand-ins, which other threads must not see

    def get(self, key: Hashable, layer: int) -> Trace:
        """The trace for a call of the layer at this place."""
        trace = self._traces.get(key)
        if trace is None:
            trace = self._traces[key] = Trace()
            if len(self._traces) > self._capacity:
                self._traces.popitem(last=False)
        else:
            self._traces.move_to_end(key)
        if layer not in trace.layers:
            trace.layers.add(layer)
            if trace.settled is not None:
                self._policy.join(layer, trace.settled.graph)
        return trace

    def traces(self) -> list[Trace]:
        return [t for t in self._traces.values() if t.graph is not None]

    def forget(self, key: Hashable) -> None:
        self._traces.pop(key, None)

    def forget_all(self) -> None:
        """Trace again from the next forward on: for a policy that wants to see the tensors as they are now."""
        self._traces.clear()

    def program(self, trace: Trace, layer: int) -> Program:
        """The settled program for the layer at this place."""
        if trace.generation != self._policy.generation:
            trace.by_layer, trace.generation = {}, self._policy.generation
        known = trace.by_layer.get(layer)
        if known is not None:
            return known
        assert trace.settled is not None
        assert trace.evidence is not None
        plan = self._policy.layer_plan(trace.settled.graph, trace.evidence, layer, True)
        found = trace.programs.get(plan)
        if found is None:
            found = self._compile(trace.settled, plan)
            found.warm_up()  # so that nothing compiles in the steps to come
            trace.programs[plan] = self._watched(found)
        trace.by_layer[layer] = found
        return found

    def _compile(self, traced: Traced, plan: LayerPlan) -> Program:
        context = context_of(traced)
        state = None
        if context.device.type == "cuda":
            if context.device not in self._mask_checks:
                self._mask_checks[context.device] = MaskCheck(context.device)
            state = self._mask_checks[context.device].state
        return Program(traced.graph, plan, context, constants_of(traced), self.states, state)

    def _watched(self, program: Program) -> Program:
        if self.watch is not None:
            self.watch(program)
        return program

    def begin(self, layer: int) -> None:
        """A forward of the layer at this place: the first of the class looks once a step after what was stored as
        bits, and tells the policy. Raises NotTwoValuedError."""
        if layer == self._layers[0]:
            for check in self._mask_checks.values():
                check.poll()
            self._policy.begin(self._layers)

    def close(self) -> None:
        """Look a last time. Raises NotTwoValuedError."""
        for check in self._mask_checks.values():
            check.close()

    def _warm_up(self, trace: Trace) -> None:
        """Compile for all layers of the class now."""
        for place in self._layers:
            # A layer that never comes with this key need not have a plan for its graph.
            with contextlib.suppress(UserError):
                self.program(trace, place)

    def learn(
        self, trace: Trace, traced: Traced, layer: int, module: nn.Module, saved: Mapping[int, Tensor],
        sources: Callable[[LayerGraph], dict[int, Tensor]], rehearsal: Rehearsal,
    ) -> Program:  # fmt: skip
        """Take in the trace of the call that just ran, and give the program that stashes this very call.

        ``saved`` are base tensors of what autograd saved; ``sources`` gives those of a graph's parameters
        and inputs; ``rehearsal`` is the call, to be run again if need be."""
        self.count += 1
        trace.calls += 1
        traced = replace(traced, graph=trace.varying.mark(traced.graph))
        settled = False
        if trace.last is not None:
            trace.varying |= differences(trace.last.graph, traced.graph)
            first, second = (trace.varying.mark(t.graph) for t in (trace.last, traced))
            settled = trace.varying.same_program(first, second)
            traced = replace(traced, graph=second)
            if settled:
                traced = prove(trace.last, traced, depends_on_host=bool(trace.varying))
        constants = constants_of(traced)
        context = context_of(traced)
        shared = agreement(traced)
        bases = sources(traced.graph) | dict(constants.tensors)
        # An opaque submodule may draw random numbers unseen; the training's own must stay as they are.
        devices = [context.device] if context.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            evidence = verify(traced.graph, saved, bases, context, module, shared)
        evidence = _with_outliers(evidence, traced.graph, saved, trace)
        self._policy.meet(traced.graph, evidence)
        if settled:
            sample = Sample(traced.graph, evidence, saved, bases, context, module)
            unseen = set(self._layers).difference(*(t.layers for t in self._traces.values()))
            self._policy.settle(trace.layers, unseen, sample, rehearsal, shared)
            trace.settled, trace.evidence, trace.last = traced, evidence, None
            trace.programs, trace.by_layer = {}, {}
            program = self.program(trace, layer)
            self._warm_up(trace)
            for buffer, external in traced.externals.items():
                if buffer not in constants.tensors:
                    external.weaken()
        else:
            plan = self._policy.layer_plan(traced.graph, evidence, layer, settled)
            program = self._watched(self._compile(traced, plan))
            for external in traced.externals.values():
                external.weaken()
            trace.last, trace.evidence = traced, evidence
            if trace.calls >= MAX_TRACES:
                trace.given_up = True
                logger.warning(
                    "The forward of %s runs other ops from call to call for equal arguments; its activations are "
                    "kept as autograd would.", traced.graph.module,
                )  # fmt: skip
        return program


def _with_outliers(evidence: Evidence, graph: LayerGraph, saved: Mapping[int, Tensor], trace: Trace) -> Evidence:
    """The evidence with the number of outlier channels that the first of this key's traces showed of each buffer. How
    many traces a key needs differs between a fresh process and one that has run for long; the plan must not."""
    found = outlier_channels(graph, saved)
    if trace.last is not None and trace.evidence is not None:
        earlier = trace.last.graph
        first = {earlier.buffers[b].site: number for b, number in trace.evidence.outlier_channels.items()}
        found = {b: first.get(graph.buffers[b].site, number) for b, number in found.items()}
    return replace(evidence, outlier_channels=found)


def context_of(traced: Traced) -> Context:
    """What the trace's arguments mean here: its live objects, its device, the autocast state right now."""
    device = traced.device or torch.device("cpu")
    enabled = torch.is_autocast_enabled(device.type)
    return Context(traced.objects, device, torch.get_autocast_dtype(device.type) if enabled else None)
