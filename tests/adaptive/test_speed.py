"""What is slower than it was timed is found and named."""

import logging
import time
from collections import Counter

import pytest
import torch
from drifting import HIDDEN, ROWS, Stack
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_adacc import enable_memory_optim
from megatron_adacc.adaptive.advice import Advice
from megatron_adacc.adaptive.signals import ENOUGH, LossWatch
from megatron_adacc.adaptive.speed import SLOW, StepClock, slower_ops


def test_the_clock_compares_medians_with_the_best():
    now = [0.0]
    clock = StepClock(lambda: now[0])

    def steps(*seconds: float) -> float:
        for one in seconds:
            now[0] += one
            clock.ended()
        return clock.times

    assert steps(9.0, 1.0, 1.0, 1.0) == 1.0  # the first has no beginning
    assert steps(1.0, 5.0) == 1.0  # one slow step is an evaluation, perhaps
    assert steps(1.5, 1.5, 1.5) == 1.5
    clock.begin_again()
    assert steps(1.5, 1.5, 1.5, 1.5, 1.5) == 1.0


class Slow(TorchDispatchMode):
    """tanh takes ten milliseconds longer."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "tanh" in str(func):
            time.sleep(0.01)
        return func(*args, **(kwargs or {}))


def test_the_slower_op_is_named(caplog):
    model = Stack()
    with enable_memory_optim(model, {"plan": "auto", "limit": "80%", "max_interval": 1}) as handle:

        def step() -> None:
            model(torch.randn(ROWS, HIDDEN, requires_grad=True)).backward()
            handle.step()

        with caplog.at_level(logging.WARNING):
            for _ in range(12):
                step()
            with Slow():
                for _ in range(8):
                    step()
    lines = [record.getMessage() for record in caplog.records if "times as long as before" in record.getMessage()]
    assert any("aten.tanh.default in Mlp takes" in line for line in lines), lines
    assert handle.attached.stored_bytes() == 0


def test_only_what_costs_a_share_is_named():
    model = Stack()
    with enable_memory_optim(model, {"plan": "recompute"}) as handle:
        for _ in range(2):
            model(torch.randn(ROWS, HIDDEN, requires_grad=True)).backward()
            handle.step()
        (graph,) = handle.attached.graphs
    times = {"aten.tanh.default": 10.0, "aten.addmm.default": 1000.0}

    def price(graph, op):
        return times.get(graph.ops[op].target)

    assert slower_ops(graph, Counter(times), price) == []
    assert slower_ops(graph, Counter({**times, "aten.tanh.default": 40.0}), price) == []
    (line,) = slower_ops(graph, Counter({**times, "aten.tanh.default": 90.0}), price)
    assert line == "aten.tanh.default in Mlp takes 9.0 times as long as it was timed (0.09 ms a layer instead of 0.01)"


def test_a_volatile_loss_late_in_training_is_said_once():
    model = Stack()
    with enable_memory_optim(model, {"warmup_steps": 0, "max_interval": 2}) as handle:
        for _ in range(2):
            model(torch.randn(ROWS, HIDDEN, requires_grad=True)).backward()
            handle.step()
        advice = Advice()
        watch = handle.loss_watch = LossWatch(1e9)
        generator = torch.Generator().manual_seed(0)
        for i in range(4 * ENOUGH):
            watch.jump(2.0 + (0.01 if i < 4 * ENOUGH - 20 else 0.2) * float(torch.randn((), generator=generator)))
        assert watch.volatility() > 2
        for _ in range(4):
            handle.schedule = handle.schedule.after(handle.schedule.next_check, False)
        (line,) = advice.on(handle)
        assert line.endswith("lower max_interval (--adacc-max-interval).")
        assert advice.on(handle) == []
        assert LossWatch(1.0).from_data(watch.to_data()).volatility() == pytest.approx(watch.volatility())
    assert SLOW > 1
