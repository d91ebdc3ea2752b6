"""Measured prices: which ops, how rounds are counted, what is left untouched, and what the cache saves."""

import functools
import itertools
import math
import resource

import pytest
import torch
from timed_layer import Layer, layer_sample
from torch import nn

from megatron_adacc import codecs
from megatron_adacc.cost import timing
from megatron_adacc.cost.prices import CodecPrice, StepPrice
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.sampling import sample_of
from megatron_adacc.cost.timing import CpuClock, replayed_groups, rounds_us, time_codec, time_layer, time_ops
from megatron_adacc.graph.recipes import group_recipes
from megatron_adacc.graph.replay import Replayer

CPU = torch.device("cpu")
HEADER = {"device": "test"}


class ScriptedClock:
    """A clock whose n-th interval of the r-th round is script[r][n]."""

    def __init__(self, script) -> None:
        self.script = script
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1

    def intervals_us(self):
        assert self.marks == len(self.script) + 1
        return list(self.script)


@pytest.fixture
def scripted(monkeypatch):
    """`scripted(rounds)`: clocks with these intervals, one a round; gives the list of clocks made."""

    def install(rounds):
        made = []
        scripts = iter(rounds)

        def clock_for(device):
            made.append(ScriptedClock(next(scripts)))
            return made[-1]

        monkeypatch.setattr(timing, "clock_for", clock_for)
        return made

    return install


def mark_times(count, clock):
    for _ in range(count):
        clock.mark()


# ---- rounds and clocks ----


def test_medians_without_the_first_round(scripted):
    made = scripted([[900.0, 900.0], [1.0, 40.0], [3.0, 20.0], [2.0, 30.0]])
    assert rounds_us(functools.partial(mark_times, 3), CPU, 0.0) == [2.0, 30.0]
    assert len(made) == 4


def test_a_budget_that_lasts_gives_more_rounds_up_to_a_bound(scripted):
    made = scripted(itertools.repeat([1.0]))
    rounds_us(functools.partial(mark_times, 2), CPU, 1e9)
    assert len(made) == 1 + timing.MOST_ROUNDS


def test_ranks_that_replay_together_do_equally_many(scripted):
    made = scripted(itertools.repeat([1.0]))
    rounds_us(functools.partial(mark_times, 2), CPU, 1e9, fixed=True)
    assert len(made) == 1 + timing.LEAST_ROUNDS


@pytest.mark.parametrize(
    ("threads", "wall", "cpu", "expected_us"),
    [
        (1, [0.0, 2.0, 4.0], [0.0, 1.0, 3.0], [1e6, 2e6]),  # others held the core: CPU time
        (1, [0.0, 2.0, 4.0], [0.0, 1.95, 3.95], [2e6, 2e6]),  # alone: the wall clock
        (2, [0.0, 2.0, 4.0], [0.0, 1.0, 3.0], [2e6, 2e6]),  # CPU time of two threads is their sum
    ],
)
def test_the_clock_of_the_cpu(monkeypatch, threads, wall, cpu, expected_us):
    times, processes = iter(wall), iter(cpu)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(processes))
    clock = CpuClock(threads)
    mark_times(3, clock)
    assert clock.intervals_us() == pytest.approx(expected_us)


# ---- ops ----


def test_every_op_that_a_recipe_runs_has_a_price_and_no_other():
    sample = layer_sample()
    found = time_ops(sample, 0.0)
    replayed = {step.op for group in replayed_groups(sample.graph, sample.evidence) for step in group.steps}
    assert set(found) == replayed
    assert all(0 < us < 1e6 for us in found.values())
    targets = [sample.graph.ops[o].target for o in sorted(found)]
    assert targets[:3] == ["aten.native_layer_norm.default", "aten.addmm.default", "aten.gelu.default"]
    random = [op.index for op in sample.graph.ops if op.barrier is not None]
    assert random
    assert replayed.isdisjoint(random)


def test_times_go_to_their_ops(scripted):
    sample = layer_sample()
    (group,) = replayed_groups(sample.graph, sample.evidence)
    script = [float(i) for i in range(1, len(group.steps) + 1)]
    scripted(itertools.repeat(script))
    assert time_ops(sample, 0.0) == {step.op: us for step, us in zip(group.steps, script, strict=True)}


def test_a_replay_calls_its_clock_after_each_step():
    sample = layer_sample()
    graph = sample.graph
    dropped = sorted(sample.evidence.verified)
    (group,) = group_recipes(graph, set(graph.saved) - set(dropped), dropped)
    calls = []
    env = {b: sample.saved.get(b, sample.sources.get(b)) for b in group.sources}
    Replayer(graph, group, sample.context).run(env, sample.module, lambda: calls.append(len(env)))
    assert len(calls) == len(group.steps)


def test_a_larger_product_costs_more():
    class Product(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            return torch.tanh(self.linear(x)).square()

    def product_us(width):
        sample = sample_of(Product(width), torch.randn(width, width, requires_grad=True))
        (op,) = [op.index for op in sample.graph.ops if op.target == "aten.addmm.default"]
        return time_ops(sample, 0.2)[op]

    assert product_us(768) > 5 * product_us(128)  # 216 times the flops


def test_timing_changes_neither_random_numbers_nor_saved_tensors_nor_gradients():
    sample = layer_sample()
    saved = {b: t.clone() for b, t in sample.saved.items()}
    sources = {b: t.clone() for b, t in sample.sources.items()}
    x = torch.randn(8, 16, requires_grad=True)
    state = torch.get_rng_state()
    time_layer(sample, Rehearsal(sample.module, sample.module.forward, (x,), {}), 0.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, saved[b]) for b, t in sample.saved.items())
    assert all(torch.equal(t, sources[b]) for b, t in sample.sources.items())
    assert all(p.grad is None for p in sample.module.parameters())
    assert x.grad is None


def test_steps_and_replays_take_turns(scripted):
    runs = []
    sample = layer_sample()

    def forward(x):
        y = Layer.forward(sample.module, x)
        y.register_hook(lambda gradient: runs.append("backward"))
        runs.append("forward")
        return y

    (group,) = replayed_groups(sample.graph, sample.evidence)
    replay = [1.0] * len(group.steps)
    x = torch.randn(8, 16, requires_grad=True)
    # A replay to warm up, then three of each.
    made = scripted([replay, [2.0, 3.0], replay, [1.0, 6.0], replay, [3.0, 3.5], replay])
    ops, price = time_layer(sample, Rehearsal(sample.module, forward, (x,), {}), 0.0)
    assert price == StepPrice(step_us=6.5, forward_us=2.0)
    assert set(ops.values()) == {1.0}
    assert runs == ["forward", "backward"] * 3
    assert len(made) == 7


# ---- codecs ----


@pytest.mark.parametrize("name", ["bitmask", "group_int4", "channel_int4", "affine_int4", "outlier_int4"])
def test_codecs_have_a_price(name):
    codec = codecs.get(name, implementation="torch")
    price = time_codec(codec, (64, 256), torch.float32, CPU, 0.0)
    assert 0 < price.encode_us < 1e6
    assert 0 < price.decode_us < 1e6


def test_a_bitmask_of_bools_has_a_price():
    price = time_codec(codecs.get("bitmask", implementation="torch"), (4, 4096), torch.bool, CPU, 0.0)
    assert price.encode_us > 0


def test_a_large_tensor_is_timed_by_a_part(scripted, monkeypatch):
    monkeypatch.setattr(timing, "CODEC_SAMPLE_ELEMENTS", 2**12)
    scripted(itertools.repeat([10.0, 500.0, 20.0]))  # emptying the caches, in between, does not count
    codec = codecs.get("group_int4", implementation="torch")
    assert time_codec(codec, (16, 2**10), torch.float32, CPU, 0.0) == CodecPrice(40.0, 80.0)
    assert time_codec(codec, (4, 2**10), torch.float32, CPU, 0.0) == CodecPrice(10.0, 20.0)


@pytest.mark.parametrize(
    ("size", "axis", "part"),
    [
        ((2**24,), None, (2**23,)),
        ((4, 2**23), None, (4, 2**21)),
        ((4, 2**23), -1, (1, 2**23)),
        ((2**13, 2**12), 1, (2**11, 2**12)),
        ((2**13, 2**10), None, (2**13, 2**10)),
        ((2**25,), 0, (2**25,)),
    ],
)
def test_the_part_keeps_the_channels(size, axis, part):
    assert timing._part(size, axis) == part
    assert math.prod(part) <= 2**23 or axis is not None


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_a_full_heap_has_no_hole_for_what_is_decoded():
    pages = 2**22 // resource.getpagesize()
    # Holes: every second block of a row is freed.
    row = [torch.zeros(2**20) for _ in range(8)]
    del row[1::2]
    with timing._full_heap(row[0]):
        before = page_faults()
        torch.zeros(2**20)
        assert page_faults() - before > pages // 2
