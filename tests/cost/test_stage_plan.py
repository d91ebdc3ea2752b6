"""What a stage's plan promises, with layers made up so that every figure can be worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc.cost.layer_problem import layer_problem
from megatron_adacc.cost.limits import Limit, least_written
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.sampling import sample_of
from megatron_adacc.cost.simulate import Simulator
from megatron_adacc.cost.stage_plan import ClassFacts, NothingFits, Room, given_stage, plain_bytes, plan_stage
from megatron_adacc.cost.timeline import record
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.planner import Plan, least, seen
from megatron_adacc.planner.listing import all_plans


class OpPrices:
    """Each op costs 10 us."""

    def op_us(self, graph: LayerGraph, op: int) -> float | None:
        return 10.0

    def codec(self, *_: object) -> object:
        raise AssertionError("no codec is on offer")


class Layer(nn.Module):
    """[16, 32] -> the same; saves its input, and the results of tanh and sigmoid: 3 x 2048 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().sigmoid() + x


@pytest.fixture(scope="module")
def fact() -> ClassFacts:
    """A class of such layers; ``part`` says which."""
    return learnt(Layer())


def learnt(layer: nn.Module) -> ClassFacts:
    torch.manual_seed(0)
    x = torch.randn(16, 32, requires_grad=True)
    sample = sample_of(layer, x)
    timeline = record(sample.graph, Rehearsal(layer, layer.forward, (x,), {}))
    problem = layer_problem(sample.graph, sample.evidence, OpPrices(), (), min_bytes=0)  # type: ignore[arg-type]
    return ClassFacts(problem, Simulator(sample.graph, timeline, sample.context), (), 40.0, 120.0)


def four(fact: ClassFacts, in_flight: int = 1) -> list[ClassFacts]:
    return [fact.part((0, 1, 2, 3), 0, in_flight)]


def share(percent: int) -> Limit:
    return Limit(share=Fraction(percent, 100))


def test_a_share(fact: ClassFacts) -> None:
    """Four layers hold 24576 bytes. To make sigmoid's result again costs one op where tanh's is held,
    both together three."""
    assert plain_bytes(four(fact)) == 4 * 3 * 2048
    found = [plan_stage(four(fact), share(p), Room()) for p in (100, 92, 91, 67, 66, 34)]
    assert [f.limit_bytes for f in found] == [24576, 22609, 22364, 16465, 16220, 8355]
    assert [f.predicted.held_bytes for f in found] == [24576, 22528, 20480, 16384, 14336, 8192]
    assert [f.solution.cost_us for f in found] == [0.0, 10.0, 20.0, 40.0, 60.0, 120.0]


def test_below_the_least(fact: ClassFacts) -> None:
    with pytest.raises(NothingFits, match=r"the least limit that works is 33\.34% \(8,192 bytes\)") as raised:
        plan_stage(four(fact), share(33), Room())
    assert raised.value.least_bytes == 8192


def test_the_three_strategies(fact: ClassFacts) -> None:
    found = plan_stage(four(fact), share(50), Room(fixed_bytes=1000, other_us=20.0))
    none, full, own = found.predictions
    assert [none.name, full.name, own.name] == ["none", "full", "auto"]
    assert none.step_us == 4 * 120 + 20
    assert full.step_us == none.step_us + 4 * 40
    assert own.step_us == none.step_us + found.solution.cost_us
    assert full.held_bytes == 4 * 2048
    assert none.peak_bytes >= 1000 + none.held_bytes
    assert none.peak_bytes > own.peak_bytes
    assert found.verdict == "optimal"


def test_a_limit_in_bytes_is_one_for_the_peak(fact: ClassFacts) -> None:
    """Falling limits are kept to the byte; the peak never rises, the cost never falls; the least limit that the error
    names has a plan."""
    peaks, costs = [], []
    most = plan_stage(four(fact, 2), Limit(total_bytes=10**9), Room(fixed_bytes=500)).predicted.peak_bytes
    with pytest.raises(NothingFits) as raised:
        plan_stage(four(fact, 2), Limit(total_bytes=1), Room(fixed_bytes=500))
    least = raised.value.least_bytes
    assert least is not None
    for nbytes in [*range(most, least, -3000), least]:
        found = plan_stage(four(fact, 2), Limit(total_bytes=nbytes), Room(fixed_bytes=500))
        assert found.predicted.peak_bytes <= nbytes
        peaks.append(found.predicted.peak_bytes)
        costs.append(found.solution.cost_us)
    assert peaks == sorted(peaks, reverse=True)
    assert costs == sorted(costs)
    assert costs[0] == 0.0 < costs[-1]
    with pytest.raises(NothingFits):
        plan_stage(four(fact, 2), Limit(total_bytes=least - 1), Room(fixed_bytes=500))


def refused(facts: list[ClassFacts], room: Room) -> NothingFits:
    with pytest.raises(NothingFits) as raised:
        plan_stage(facts, Limit(total_bytes=1), room)
    return raised.value


def least_of_all(facts: list[ClassFacts], fixed_bytes: int, alive: int) -> int:
    """Over all plans of all layers: the backward takes the layers from the last, each frees its bytes of one of the
    micro-batches and leaves its gradients."""
    memories = []
    for fact in facts:
        plans = all_plans(fact.layer_class, None, lossless=True)
        assert plans is not None
        fates = [fact.problem.fates(plans.actions(i)) for i in range(len(plans))]
        memories.append([fact.simulator.memory(one) for one in fates])
    order = [i for _, i in sorted((place, i) for i, fact in enumerate(facts) for place in fact.places)]
    peaks = []
    for chosen in itertools.product(*(memories[i] for i in order)):
        now = fixed_bytes + alive * sum(memory.held for memory in chosen)
        peaks.append(now)
        for i, memory in reversed(list(zip(order, chosen, strict=True))):
            peaks[-1] = max(peaks[-1], now + memory.extra)
            now += facts[i].gradient_bytes - memory.held
    return min(peaks)


@pytest.mark.parametrize(
    ("places", "gradient_bytes"), [([(0, 1, 2)], 0), ([(0, 1, 2)], 3000), ([(0, 2), (1,)], 0), ([(0, 2), (1,)], 7000)]
)
def test_the_least_limit_is_exact(fact: ClassFacts, places: list[tuple[int, ...]], gradient_bytes: int) -> None:
    """Also where gradients stay, and where layers of two kinds lie in turn."""
    facts = [replace(fact.part(own, 0, 1), gradient_bytes=gradient_bytes) for own in places]
    room = Room(fixed_bytes=500, moments=((0, (2,)),))
    error = refused(facts, room)
    expected = least_of_all(facts, 500, 2)
    assert (error.least_bytes, error.proven) == (expected, True)
    assert f"the least limit that works is {least_written(expected)} ({expected:,} bytes)" in str(error)
    found = plan_stage(facts, Limit(total_bytes=expected), room)
    assert found.predicted.peak_bytes == found.solution.peak_bytes == expected


def test_the_least_limit_does_not_depend_on_times() -> None:
    fact = learnt(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh()))
    found = set()
    for seed in range(6):
        times = torch.rand(len(fact.layer_class.ops), generator=torch.Generator().manual_seed(seed)).tolist()
        ops = tuple(replace(op, us=100 * us) for op, us in zip(fact.layer_class.ops, times, strict=True))
        timed = replace(fact, problem=replace(fact.problem, layer_class=replace(fact.layer_class, ops=ops)))
        found.add(refused(four(timed), Room()).least_bytes)
    assert len(found) == 1


def test_a_limit_that_is_not_proven_to_be_the_least_works(fact: ClassFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least, "MOST_ASKED", 1)
    monkeypatch.setattr(seen, "FEW_PLANS", 0)
    error = refused(four(fact), Room())
    assert not error.proven
    assert error.least_bytes is not None
    written = f"a limit of {least_written(error.least_bytes)} ({error.least_bytes:,} bytes) works; give at least that"
    assert str(error).startswith(f"No plan was found that fits into 1 B: {written}, a smaller micro-batch")
    assert (
        plan_stage(four(fact), Limit(total_bytes=error.least_bytes), Room()).predicted.peak_bytes <= error.least_bytes
    )


def test_what_no_plan_changes_must_fit_alone(fact: ClassFacts) -> None:
    with pytest.raises(NothingFits, match="parameters, gradients and optimizer state alone need") as raised:
        plan_stage(four(fact), Limit(total_bytes=10**6), Room(floor_bytes=10**6 + 1))
    assert raised.value.least_bytes == 10**6 + 1


def test_micro_batches_in_flight(fact: ClassFacts) -> None:
    """What one holds twice, costs twice."""
    one, two = (plan_stage(four(fact, n), Limit(total_bytes=10**9), Room()).predicted for n in (1, 2))
    assert one.held_bytes == two.held_bytes
    assert two.peak_bytes == one.peak_bytes + one.held_bytes


def test_a_plan_from_elsewhere_says_the_same_here(fact: ClassFacts) -> None:
    own = plan_stage(four(fact), share(60), Room())
    given = given_stage(four(fact), Plan.from_json(own.plan.to_json()), share(60), Room())
    assert given.predictions == own.predictions
    assert [a.actions for a in given.solution.layers] == [a.actions for a in own.solution.layers]
    with pytest.raises(UserError, match="no entry for layer 0"):
        given_stage(four(fact), Plan(()), share(60), Room())


def test_alternating_classes_of_one_graph(fact: ClassFacts) -> None:
    """Layers 0, 2 and 1, 3: the plans go to the places that they were made for."""
    facts = [fact.part((0, 2), 0, 1), fact.part((1, 3), 0, 1)]
    found = plan_stage(facts, share(70), Room())
    assert sorted(layer.layer for layer in found.plan.layers if layer.layer is not None) == [0, 1, 2, 3]
    assert found.predicted.held_bytes <= found.limit_bytes == 17203
