"""Measured prices: which ops, how rounds are counted, what is left untouched, and what the cache saves."""

import functools
import itertools
import math
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from megatron_adacc import codecs
from megatron_adacc.cost import measured as measured_module
from megatron_adacc.cost import timing
from megatron_adacc.cost.cache import PriceCache
from megatron_adacc.cost.measured import MeasuredPrices, codec_key, op_keys
from megatron_adacc.cost.prices import CodecPrice, StepPrice
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.sampling import sample_of
from megatron_adacc.cost.timing import CpuClock, replayed_groups, rounds_us, time_codec, time_layer, time_ops
from megatron_adacc.graph.recipes import group_recipes
from megatron_adacc.graph.replay import Replayer

CPU = torch.device("cpu")
HEADER = {"device": "test"}


class Layer(nn.Module):
    """[batch, width] -> the same, with dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def layer_sample(width: int = 16, batch: int = 8):
    torch.manual_seed(0)
    return sample_of(Layer(width), torch.randn(batch, width, requires_grad=True))


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


# ---- MeasuredPrices and its cache ----


@pytest.fixture
def count_measurements(monkeypatch):
    """Calls of time_ops, time_codec and time_layer that MeasuredPrices makes, by name."""
    calls = []
    for name in ("time_ops", "time_codec", "time_layer"):
        original = getattr(measured_module, name)

        def counting(*args, _name=name, _original=original, **kwargs):
            calls.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(measured_module, name, counting)
    return calls


def rehearsal_of(sample):
    x = torch.randn(8, sample.module.norm.normalized_shape[0], requires_grad=True)
    return Rehearsal(sample.module, sample.module.forward, (x,), {})


def test_prices_answer_for_a_measured_graph():
    sample = layer_sample()
    prices = MeasuredPrices(CPU, budget_seconds=0.0)
    prices.measure(sample, rehearsal_of(sample))
    for op in sample.graph.ops:
        price = prices.op_us(sample.graph, op.index)
        assert (price is None) == (op.index not in time_ops(sample, 0.0))
    assert prices.step_us(sample.graph) > sum(prices.op_us(sample.graph, op.index) or 0 for op in sample.graph.ops) / 4
    with pytest.raises(KeyError):
        prices.op_us(layer_sample(width=32).graph, 0)


def test_the_second_start_measures_nothing(tmp_path, count_measurements):
    sample = layer_sample()
    first = MeasuredPrices(CPU, PriceCache(tmp_path, HEADER), 0.0)
    first.measure(sample, rehearsal_of(sample))
    codec = codecs.get("bitmask", implementation="torch")
    price = first.codec(codec, (8, 16), torch.float32)
    assert first.codec(codec, (8, 16), torch.float32) == price
    assert count_measurements == ["time_layer", "time_codec"]
    again = layer_sample()
    second = MeasuredPrices(CPU, PriceCache(tmp_path, HEADER), 0.0)
    second.measure(again, rehearsal_of(again))
    assert second.codec(codec, (16, 8), torch.float32) == price  # without channels, only the number counts
    assert len(count_measurements) == 2
    for op in range(len(sample.graph.ops)):
        assert second.op_us(again.graph, op) == first.op_us(sample.graph, op)
    assert second.step_us(again.graph) == first.step_us(sample.graph)


def test_another_size_is_measured(tmp_path, count_measurements):
    cache = PriceCache(tmp_path, HEADER)
    MeasuredPrices(CPU, cache, 0.0).measure(layer_sample())
    MeasuredPrices(CPU, cache, 0.0).measure(layer_sample(batch=9))
    assert count_measurements == ["time_ops", "time_ops"]


def test_keys_tell_apart_what_costs_differently():
    sample = layer_sample()
    keys = op_keys(sample.graph, sample)
    # Equal ops of equal fate share a key; here all differ.
    assert len(set(keys.values())) == len(keys)
    assert all(key.startswith("op aten.") for key in keys.values())
    half = sample_of(Layer().bfloat16(), torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True))
    assert set(op_keys(half.graph, half).values()).isdisjoint(keys.values())
    wider = layer_sample(batch=9)
    assert set(op_keys(wider.graph, wider).values()).isdisjoint(keys.values())


def test_keys_of_codecs():
    group, channel = codecs.get("group_int4"), codecs.get("channel_int4")
    keys = [
        codec_key(group, (4, 8), torch.float32),
        codec_key(group, (4, 8), torch.float16),
        codec_key(group, (4, 9), torch.float32),
        codec_key(codecs.get("group_int4", scale="paper"), (4, 8), torch.float32),
        codec_key(channel, (4, 8), torch.float32),
        codec_key(channel, (8, 4), torch.float32),
    ]
    assert len(set(keys)) == 6
    assert codec_key(group, (8, 4), torch.float32) == keys[0]


@pytest.mark.parametrize("others_know", [True, False])
def test_ranks_measure_unless_all_of_them_know(tmp_path, count_measurements, others_know):
    sample = layer_sample()
    cache = PriceCache(tmp_path, HEADER)
    MeasuredPrices(CPU, cache, 0.0).measure(sample)
    assert count_measurements == ["time_ops"]
    MeasuredPrices(CPU, cache, 0.0).measure(sample, shared=lambda buffers: buffers if others_know else ())
    assert count_measurements == ["time_ops"] * (1 if others_know else 2)


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x).tanh()
        total = functional.all_reduce(y.detach(), "sum", dist.group.WORLD)
        return (y * total).exp().sin()


def two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        sample = sample_of(Summed(), torch.randn(4, 8, requires_grad=True))
        known = {key: [1.0] for key in op_keys(sample.graph, sample).values()} if rank else {}
        cache = PriceCache(Path(folder) / str(rank), HEADER)
        cache.update(known)

        def shared(buffers):
            flag = torch.tensor(int(len(buffers) > 0))
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            return buffers if flag else ()

        # Rank 1 knows all prices and must measure nevertheless; the budgets would allow different rounds.
        prices = MeasuredPrices(CPU, cache, 0.0 if rank else 1.0)
        prices.measure(sample, shared=shared)
        (collective,) = [op.index for op in sample.graph.ops if op.target == "_c10d_functional.all_reduce.default"]
        price = prices.op_us(sample.graph, collective)
        assert price is not None
        assert price > 0
        assert price != 1.0
        key = op_keys(sample.graph, sample)[collective]
        assert " [2] " in key  # the group's size
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_two_ranks_time_their_collectives_together(tmp_path):
    mp.spawn(two_ranks, (str(tmp_path),), nprocs=2)
