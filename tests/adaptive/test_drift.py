"""A channel that grows 20 times at step 40: adaptation separates it at the next check; without, the error stays."""

import logging
from collections.abc import Iterator

import pytest
import torch
from drifting import HIDDEN, ROWS, Stack, grow, train

from megatron_adacc import enable_memory_optim
from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.adaptive.monitor import Key

CHANNEL, GROWS_AT, NEXT_CHECK = 77, 40, 64
NORM = "norm/native_layer_norm.0"


class Run:
    """66 steps under the plan "compress", and what was seen on the way."""

    def __init__(self, **settings: int) -> None:
        self.model = Stack()
        self.handle: AdaptiveHandle = enable_memory_optim(self.model, {"warmup_steps": 0, **settings})
        self.errors: dict[int, float] = {}  # of the gradient of layer 0's up.weight, after a step
        self.lists: dict[int, tuple[int, ...]] = {}  # channels that layer 0 separates in its norm's output
        self.next_checks: dict[int, int] = {}
        self.probe = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with self.handle:
            train(self.model, range(1, 67), self.end, self.before)
            self.report = self.handle.report()

    def before(self, step: int) -> None:
        if step == GROWS_AT:
            grow(self.model.layers[0], CHANNEL)

    def end(self, loss: torch.Tensor) -> None:
        step = self.handle.steps + 1
        if step in (GROWS_AT - 1, NEXT_CHECK - 1):
            self.look(step)
        self.handle.step(loss)
        self.next_checks[step] = self.handle.schedule.next_check
        if step in (NEXT_CHECK, NEXT_CHECK + 2):
            self.look(step)

    def look(self, step: int) -> None:
        self.errors[step] = self.handle.gradient_errors(lambda: self.model(self.probe))["0.up.weight"]
        lists = self.handle.outlier_lists()
        self.lists[step] = lists[0, NORM]


@pytest.fixture(scope="module")
def adapted() -> Iterator[Run]:
    return Run()


@pytest.fixture(scope="module")
def fixed() -> Iterator[Run]:
    return Run(min_interval=1000, max_interval=1000)


def test_the_channel_is_in_the_list_after_the_next_check(adapted):
    assert CHANNEL not in adapted.lists[GROWS_AT - 1]
    assert adapted.lists[NEXT_CHECK - 1] == adapted.lists[GROWS_AT - 1]
    assert adapted.lists[NEXT_CHECK] == adapted.lists[NEXT_CHECK + 2] == (CHANNEL,)


def test_the_interval_is_back_at_the_least(adapted):
    checks = [1, *(step for step in adapted.next_checks if step in set(adapted.next_checks.values()))]
    assert checks == [1, 2, 4, 8, 16, 32, 64, 65, 66]
    assert adapted.next_checks[66] == 68


def test_the_error_returns_to_its_band_with_adaptation_only(adapted, fixed):
    band = 1.2 * adapted.errors[GROWS_AT - 1]
    assert adapted.errors[GROWS_AT - 1] == fixed.errors[GROWS_AT - 1]
    assert adapted.errors[NEXT_CHECK - 1] > 2 * band
    assert adapted.errors[NEXT_CHECK] < band
    assert adapted.errors[NEXT_CHECK + 2] < band
    assert fixed.errors[NEXT_CHECK] > 2 * band
    assert fixed.errors[NEXT_CHECK + 2] > 2 * band
    assert CHANNEL not in fixed.lists[NEXT_CHECK + 2]


def test_the_decision_is_one_row(adapted, fixed):
    (decision,) = adapted.handle.decisions
    (before,) = adapted.lists[GROWS_AT - 1]
    assert decision.step == NEXT_CHECK
    assert decision.why[0] == f"layer 0 {NORM}: 0% of its outliers were in the outlier columns"
    assert decision.changed == (
        f"layer 0 {NORM}: channels in [{CHANNEL}], out [{before}]",
        "next check after step 65",
    )
    assert adapted.report.splitlines()[-1].startswith("64    layer 0 ")
    assert fixed.handle.decisions == []
    assert fixed.report.endswith("decisions in 66 steps; next check after step 1000\nnone")


def test_it_is_one_log_line(caplog):
    model = Stack(1)
    with caplog.at_level(logging.INFO), enable_memory_optim(model, {"warmup_steps": 0, "max_interval": 1}) as handle:
        train(model, range(1, 8), handle.step, lambda step: grow(model.layers[0], 5) if step == 5 else None)
    lines = [r.getMessage() for r in caplog.records if r.name == "megatron_adacc.adaptive.controller"]
    assert lines == [str(handle.decisions[0])]
    assert lines[0].startswith(f"step 5: layer 0 {NORM}: 0% of its outliers were in the outlier columns")


def test_outliers_of_every_batch_do_not_keep_the_monitor_busy():
    """Another channel is large in every step: no list can last, so looking every step would be for nothing."""
    model, checks = Stack(1), []

    def move(step: int) -> None:
        if 1 < step <= 41:
            grow(model.layers[0], 7 * (step - 1) % HIDDEN, 1 / 20)
        if step <= 40:
            grow(model.layers[0], 7 * step % HIDDEN, 20)
        if step == 41:
            grow(model.layers[0], 5, 20)  # for good

    with enable_memory_optim(model, {"warmup_steps": 0, "max_interval": 8}) as handle:

        def end(loss: torch.Tensor) -> None:
            handle.step(loss)
            checks.append(handle.schedule.next_check)

        train(model, range(1, 61), end, move)
        lists = handle.outlier_lists()
        assert (5 in lists[0, NORM], handle.monitor.moves[Key(0, NORM, HIDDEN)]) == (True, 0)
    moved = [d for d in handle.decisions if "of its outliers" in d.why[0]]
    assert len(moved) == 3
    assert "so that another change of them is no news" in moved[-1].changed[1]
    assert len(set(checks)) < 20
