"""Measured prices: who measures, what is kept on the disk, by which keys."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from timed_layer import Layer, layer_sample
from torch import nn

from megatron_adacc import codecs
from megatron_adacc.cost import measured as measured_module
from megatron_adacc.cost.cache import PriceCache
from megatron_adacc.cost.measured import MeasuredPrices, codec_key, op_keys
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.sampling import sample_of
from megatron_adacc.cost.timing import time_ops

CPU = torch.device("cpu")
HEADER = {"device": "test"}


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
