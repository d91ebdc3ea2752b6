"""Plan one pipeline stage: the layer classes, what they cost and need, a limit; out comes a plan and what it promises.

Used alike where the layers were traced and timed on the device at hand and where both are made up for an absent
device.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_adacc.cost.floors import layer_floors
from megatron_adacc.cost.layer_problem import LayerProblem
from megatron_adacc.cost.limits import Limit, least_written, written_bytes
from megatron_adacc.cost.simulate import Fates, LayerMemory, Simulator
from megatron_adacc.errors import UserError
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.planner import LayerPlan, Plan
from megatron_adacc.planner.floors import Floor
from megatron_adacc.planner.problem import LayerClass, Moment, Problem
from megatron_adacc.planner.solution import LayerAnswer, Solution, evaluate_layer, peak_bytes


@dataclass(frozen=True)
class ClassFacts:
    """One layer class on this stage. ``places``: which layers are of it, in the order of execution; times are of
    one layer and one micro-batch, without a plan; ``gradient_bytes``: what a layer's backward leaves behind, beside
    what the timeline has, when the layers before it run theirs."""

    problem: LayerProblem
    simulator: Simulator
    places: tuple[int, ...]
    forward_us: float
    step_us: float
    gradient_bytes: int = 0
    with_lossy: LayerProblem | None = None

    @property
    def lossy(self) -> ClassFacts:
        """The same with lossy actions on offer, where their errors are known."""
        return replace(self, problem=self.with_lossy) if self.with_lossy is not None else self

    @property
    def layer_class(self) -> LayerClass:
        return self.problem.layer_class

    def part(self, places: tuple[int, ...], chunk: int, in_flight: int) -> ClassFacts:
        """Those layers of the class that lie in one virtual pipeline stage."""
        where = f"layer {places[0]}" if len(places) == 1 else f"layers {places[0]} to {places[-1]}"
        layer_class = replace(
            self.layer_class, name=f"{self.problem.graph.module} ({where})", count=len(places), chunk=chunk,
            in_flight=in_flight,
        )  # fmt: skip
        lossy = self.with_lossy
        if lossy is not None:
            buffers, ops = lossy.layer_class.buffers, lossy.layer_class.ops
            lossy = replace(lossy, layer_class=replace(layer_class, buffers=buffers, ops=ops))
        return replace(self, problem=replace(self.problem, layer_class=layer_class), places=places, with_lossy=lossy)

    @functools.cached_property
    def kept(self) -> LayerMemory:
        """With everything held."""
        return self.simulator.memory(Fates({}, frozenset()))

    @functools.cached_property
    def floors(self) -> tuple[Floor, ...]:
        """What a layer needs at least while it runs, by its actions."""
        timeline = self.simulator.timeline
        return () if timeline is None else layer_floors(self.problem, timeline, self.simulator.input_bytes)


class NothingFits(UserError):
    """No plan is within the limit. ``least_bytes``: a limit for which there is one, None where none is known; but what
    is alive without any activation is no plan, and where that is too much, this is only what the limit must not be
    below. ``proven``: that no limit below it has a plan."""

    def __init__(self, message: str, least_bytes: int | None, proven: bool = True) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        self.proven = proven


@dataclass(frozen=True)
class Room:
    """What the activations share the device with. ``fixed_bytes``: parameters, gradients, optimizer state and all
    else that no plan changes; ``transient_bytes``: alive beside all held activations when the forward ends (the loss
    head's); ``other_us``: the step's time outside the layers, of one micro-batch; ``floor_bytes``: what the device
    needs at some moment without any activation of the layers, as while the optimizer steps; ``moments``: of the
    pipeline's schedule, which chunk runs, and how many forwards of each chunk are alive then; empty where the layer
    classes say enough."""

    fixed_bytes: int = 0
    transient_bytes: int = 0
    other_us: float = 0.0
    floor_bytes: int = 0
    moments: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What a strategy is expected to need: bytes that one micro-batch's layers hold for their backward, the largest
    bytes on the device (parameters and the like included where the room says them), and microseconds of one
    micro-batch's forward and backward."""

    name: str
    held_bytes: int
    peak_bytes: int
    step_us: float


@dataclass(frozen=True)
class StagePlan:
    """A solved stage. ``predictions``: of no plan, of full recompute, and of this one, in this order. ``facts``,
    ``problem`` and ``solution`` say why."""

    plan: Plan
    predictions: tuple[Prediction, ...]
    solution: Solution
    facts: tuple[ClassFacts, ...]
    limit: Limit
    limit_bytes: int
    problem: Problem

    @property
    def predicted(self) -> Prediction:
        return self.predictions[-1]

    @property
    def error(self) -> float:
        """Root mean square over the layers of the relative gradient errors that were measured for its lossy actions,
        one buffer at a time."""
        layers = len(self.solution.layers)
        return math.sqrt(self.solution.error / layers) if layers else 0.0

    @property
    def verdict(self) -> str:
        """How sure the solver is."""
        if self.solution.status == "optimal":
            return "optimal"
        gap = self.solution.gap
        return self.solution.status + ("" if gap is None else f", at most {100 * gap:.1f} % above the best")


def plain_bytes(facts: Sequence[ClassFacts]) -> int:
    """Bytes that one micro-batch's layers hold without a plan."""
    return sum(len(f.places) * f.kept.held for f in facts) + _shared(facts)


def _shared(facts: Sequence[ClassFacts]) -> int:
    """Inputs without gradient that all layers have in common, such as an attention mask."""
    return max((f.kept.shared for f in facts), default=0)


def question(facts: Sequence[ClassFacts], limit: Limit, room: Room, error_budget: float | None) -> Problem:
    """What the planner is asked; see :func:`plan_stage`. Raises NothingFits where the limit is too little for what is
    alive without any activation."""
    layers = sum(len(f.places) for f in facts)
    squares = None if error_budget is None else layers * error_budget**2
    if limit.total_bytes is None:
        assert limit.share is not None
        classes = tuple(replace(f.layer_class, in_flight=1) for f in facts)
        # Rounded down: not a byte more than the share.
        return Problem(classes, math.floor(limit.share * plain_bytes(facts)), _shared(facts), squares)
    if limit.total_bytes < room.floor_bytes:
        raise NothingFits(
            f"No plan fits into {limit}: parameters, gradients and optimizer state alone need "
            f"{written_bytes(room.floor_bytes)} during the optimizer's step; share the model by more ranks, or use the "
            "distributed optimizer.",
            room.floor_bytes,
        )
    return replace(_account(facts, room), limit_bytes=limit.total_bytes, error_budget=squares)


def _account(facts: Sequence[ClassFacts], room: Room) -> Problem:
    """What of the device's bytes is alive when, as the planner counts it."""
    classes = tuple(replace(f.layer_class, left_bytes=f.gradient_bytes) for f in facts)
    shared = _shared(facts)
    moments = tuple(
        Moment(chunk, tuple(alive[c.chunk] for c in classes), max(alive, default=1) * shared, chunk == len(alive) - 1)
        for chunk, alive in room.moments or _moments(classes)
    )
    placed = sorted(
        (c.chunk, place, i) for i, (c, f) in enumerate(zip(classes, facts, strict=True)) for place in f.places
    )
    return Problem(
        classes, 0, room.fixed_bytes, transient_bytes=room.transient_bytes, moments=moments,
        order=tuple(i for _, _, i in placed),
    )  # fmt: skip


def plan_stage(
    facts: Sequence[ClassFacts], limit: Limit, room: Room, *, error_budget: float | None = 0.0, name: str = "auto",
    time_limit_seconds: float = 10.0,
) -> StagePlan:  # fmt: skip
    """The fastest plan within the limit.

    A limit in bytes is one for everything on the device; a share is one for what is held of a micro-batch's
    activations, as a part of what the plain run holds. ``error_budget``: the root mean square over the layers of
    their relative gradient errors (cost/errors.py) that lossy actions may cost; 0 allows none, None any.

    Raises NothingFits, a UserError that names a limit that has a plan, the least where that is known, where nothing
    fits."""
    from megatron_adacc.planner.stage import solve_stage  # OR-Tools is needed here and nowhere before

    facts = tuple(facts)
    problem = asked = question(facts, limit, room, error_budget)
    limit_bytes, whole = problem.limit_bytes, limit.total_bytes is not None

    known: dict[tuple[int, frozenset[tuple[str, str]]], int] = {}

    def extra(index: int, actions: Mapping[str, str]) -> int:
        simulator, fates = facts[index].simulator, facts[index].problem.fates
        key = id(simulator), frozenset(actions.items())  # classes of several chunks share one
        if key not in known:
            known[key] = simulator.memory(fates(actions)).extra
        return known[key]

    def solve() -> Solution:
        if not whole:
            return solve_stage(problem, time_limit_seconds=time_limit_seconds)
        return solve_stage(problem, extra, [f.floors for f in facts], time_limit_seconds)

    solution = solve()
    while solution.layers:
        predicted = _predicted(facts, solution, room, name)
        over = predicted.peak_bytes - limit_bytes
        if not whole or over <= 0:
            break
        # The planner's bytes of a layer and the simulator's are the same but for several saved states of one storage.
        problem = replace(problem, fixed_bytes=problem.fixed_bytes + over)
        solution = solve()
    if not solution.layers:
        solution = replace(solution, least_proven=solution.least_proven and problem == asked)
        raise NothingFits(
            _too_little(solution, limit, facts, error_budget), solution.least_bytes, solution.least_proven
        )
    predictions = (none_predicted(facts, room), full_predicted(facts, room), predicted)
    return StagePlan(_plan(facts, solution, name), predictions, solution, facts, limit, limit_bytes, problem)


def _too_little(solution: Solution, limit: Limit, facts: Sequence[ClassFacts], error_budget: float | None) -> str:
    least = solution.least_bytes
    lossy = "or allow lossy actions" if error_budget == 0 else "or allow a larger error"
    if least is None:
        return f"No plan fits into {limit}: {solution.note or 'the solver found none'}."
    if limit.share is None:
        written = f"{least_written(least)} ({least:,} bytes)"
        found = f"No plan fits into {limit}: the least limit that works is {written}; give at least that"
        if not solution.least_proven:
            found = f"No plan was found that fits into {limit}: a limit of {written} works; give at least that"
        return f"{found}, a smaller micro-batch, {lossy}."
    percent = -(-10000 * least // max(1, plain_bytes(facts))) / 100
    return (
        f"No plan fits into {limit}: the least limit that works is {percent:.2f}% ({least:,} bytes); give at least "
        f"that, {lossy}."
    )


def given_stage(facts: Sequence[ClassFacts], plan: Plan, limit: Limit, room: Room) -> StagePlan:
    """What a plan that was made elsewhere, as on another rank, comes to with these facts.

    Raises UserError where it has no entry for a layer."""
    facts = tuple(fact.lossy for fact in facts)
    answers = []
    for index, fact in enumerate(facts):
        graph = fact.problem.graph
        sites = [graph.buffers[b].site for b in graph.saved]
        for place in fact.places:
            layer_plan = plan.find(fingerprint(graph), sites, place)
            if layer_plan is None:
                raise UserError(f"Plan {plan.name} has no entry for layer {place}: make it again for this model.")
            actions = fact.problem.actions_of(layer_plan)
            extra = fact.simulator.memory(fact.problem.fates(actions)).extra
            answers.append(LayerAnswer(index, actions, evaluate_layer(fact.layer_class, actions), extra))
    added_us = math.fsum(answer.outcome.cost_us for answer in answers)
    error = math.fsum(answer.outcome.error for answer in answers)
    solution = Solution("given", tuple(answers), added_us, error=error)
    predicted = _predicted(facts, solution, room, plan.name)
    predictions = (none_predicted(facts, room), full_predicted(facts, room), predicted)
    problem = question(facts, limit, room, None)
    return StagePlan(plan, predictions, solution, facts, limit, problem.limit_bytes, problem)


def _plan(facts: Sequence[ClassFacts], solution: Solution, name: str) -> Plan:
    """One layer plan a layer; the layers of a class share one if all have the same, and no other class its graph
    (another virtual pipeline stage, of which more is in flight)."""
    layers: list[LayerPlan] = []
    graphs = Counter(fingerprint(fact.problem.graph) for fact in facts)
    for index, fact in enumerate(facts):
        answers = solution.layers_of(index)
        same = all(answer.actions == answers[0].actions for answer in answers)
        same = same and graphs[fingerprint(fact.problem.graph)] == 1
        if same and answers:
            layers.append(fact.problem.layer_plan(answers[0].actions, None))
        else:
            for place, answer in zip(fact.places, answers, strict=True):
                layers.append(fact.problem.layer_plan(answer.actions, place))
    return Plan(tuple(layers), name)


def _predicted(facts: Sequence[ClassFacts], solution: Solution, room: Room, name: str) -> Prediction:
    memories = [
        facts[answer.class_index].simulator.memory(facts[answer.class_index].problem.fates(answer.actions))
        for answer in solution.layers
    ]
    indices = [answer.class_index for answer in solution.layers]
    return _prediction(facts, room, name, indices, memories, solution.cost_us)


def none_predicted(facts: Sequence[ClassFacts], room: Room) -> Prediction:
    """Every layer keeps everything."""
    return uniform_predicted(facts, room, "none", [f.kept for f in facts], [0.0] * len(facts))


def full_predicted(facts: Sequence[ClassFacts], room: Room) -> Prediction:
    """Every layer keeps its input and runs again, whole, before its backward."""
    return uniform_predicted(facts, room, "full", [_checkpointed(f) for f in facts], [f.forward_us for f in facts])


def uniform_predicted(
    facts: Sequence[ClassFacts], room: Room, name: str, memories: Sequence[LayerMemory], added_us: Sequence[float]
) -> Prediction:
    """All layers of a class do the same: ``memories`` and the microseconds added to a layer, one a class."""
    indices = [i for i, f in enumerate(facts) for _ in f.places]
    added = sum(added_us[i] for i in indices)
    return _prediction(facts, room, name, indices, [memories[i] for i in indices], added)


def _checkpointed(fact: ClassFacts) -> LayerMemory:
    graph, kept = fact.problem.graph, fact.kept
    inputs = {
        graph.buffers[spec.buffer].storage: graph.buffers[spec.buffer].nbytes
        for spec in graph.inputs
        if spec.requires_grad
    }
    held = sum(inputs.values())
    saved = {graph.buffers[b].storage for b in graph.saved}
    unsaved = sum(size for storage, size in inputs.items() if storage not in saved)
    working = unsaved + max(kept.forward, kept.backward)
    return LayerMemory(held, kept.shared, working, working)


def _prediction(
    facts: Sequence[ClassFacts], room: Room, name: str, indices: list[int], memories: list[LayerMemory], added_us: float
) -> Prediction:
    """The same account for every strategy: the planner's (4). ``indices``, ``memories``: class and bytes of each layer,
    those of a class in the order of execution."""
    problem = _account(facts, room)
    of_class: dict[int, list[LayerMemory]] = {i: [] for i in range(len(facts))}
    for i, memory in zip(indices, memories, strict=True):
        of_class[i].append(memory)
    following = {i: iter(own) for i, own in of_class.items()}
    rows = [(i, memory.held, memory.extra) for i in problem.sequence for memory in [next(following[i])]]
    plain = sum(facts[i].step_us for i in indices) + room.other_us
    held = sum(m.held for m in memories) + _shared(facts)
    return Prediction(name, held, max(room.floor_bytes, peak_bytes(problem, rows)), plain + added_us)


def _moments(classes: Sequence[LayerClass]) -> list[tuple[int, tuple[int, ...]]]:
    """Each chunk in turn runs while of all chunks as many micro-batches are alive as their classes say."""
    chunks = max((c.chunk for c in classes), default=0) + 1
    alive = [1] * chunks
    for one in classes:
        alive[one.chunk] = max(alive[one.chunk], one.in_flight)
    return [(chunk, tuple(alive)) for chunk in range(chunks)]
