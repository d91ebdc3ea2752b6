"""What the monitor computes, and that it leaves no trace in a step that is not checked."""

import pytest
import torch
from drifting import Stack, train

from megatron_adacc import codecs, enable_memory_optim
from megatron_adacc.adaptive.monitor import _Watched, error_of, outliers_of, overlap_of, sample_of
from megatron_adacc.adaptive.signals import LossWatch, MemoryWatch


def test_outliers_have_a_high_z_and_are_large():
    sums = [1.0] * 20 + [10.0, 30.0]
    assert outliers_of(sums, [0.0] * 20 + [1.0, 4.0], 3.0) == [21]
    assert outliers_of(sums, [0.0] * 20 + [3.5, 4.0], 3.0) == [21, 20]
    # Far above the others by z, and yet not twice the mean: chance.
    assert outliers_of([1.0] * 20 + [1.5], [0.0] * 20 + [4.4], 3.0) == []


def test_overlap_is_a_share_of_the_outliers_sum():
    sums = [1.0, 1.0, 60.0, 20.0, 20.0]
    assert overlap_of(sums, [2, 3, 4], {2, 3}) == 0.8
    assert overlap_of(sums, [2, 3, 4], {0, 1}) == 0.0
    assert overlap_of(sums, [2], {1, 2}) == 1.0
    assert overlap_of(sums, [], {0}) == 1.0


def test_the_error_is_the_mean_over_channels():
    x = torch.ones(128, 4)
    x[:, 2] = 0.0  # a channel that is zero does not count
    codec = codecs.get("group_int4", implementation="torch")
    assert error_of(codec, x, None).item() == 0.0
    x = torch.tensor([[1.0, 0.25, 0.0, 0.0625]]).repeat(2, 1)
    # S = -1/8: 1 and 1/4 come back, 1/16 is half a step and becomes 0 (round half to even): an error of 1 in one of 3.
    assert error_of(codec, x, None).item() == pytest.approx((1 / 3) ** 0.5)
    x[0, 0] = torch.inf
    assert 0.0 <= error_of(codec, x, None).item() <= 1.0
    assert error_of(codec, torch.zeros(2, 4), None).isnan()


def test_a_sample_is_rows_spread_evenly():
    x = torch.arange(16 * 64 * 128, dtype=torch.float32).view(16, 64, 128)
    sample = sample_of(x, None, x.numel() // 2)
    assert sample.shape == (512, 128)
    assert torch.equal(sample, x.view(-1, 128)[::2])
    assert sample_of(x, -1, x.numel()) is x
    assert sample_of(x, 0, 128) is x
    # Not contiguous: along the first dimension, without a copy.
    assert sample_of(x.transpose(0, 1), -1, x.numel() // 4).shape == (16, 16, 128)
    assert sample_of(x, -1, 100).shape == (1, 128)


def test_only_the_steps_that_are_checked_are_watched():
    model = Stack()
    watched = []
    with enable_memory_optim(model, {"warmup_steps": 0}) as handle:

        def end(loss: torch.Tensor) -> None:
            (forward, _) = handle.attached.forwards
            (trace,) = forward.cache.traces()
            program = forward.cache.program(trace, 0)
            entries = [entry for entry in program.entries if isinstance(entry, _Watched)]
            if entries:
                watched.append((handle.steps + 1, len(entries)))
            handle.step(loss)

        train(model, range(1, 18), end)
        lossy = [action for _, action in handle.plan.layers[0].actions if not action.lossless]
    assert watched == [(step, len(lossy)) for step in (1, 2, 4, 8, 16)]
    assert len(lossy) > 0


def test_a_loss_jumps_when_it_is_far_above_its_mean():
    watch = LossWatch(0.15)
    assert [watch.jump(loss) for loss in (2.0, 2.2, 1.0, float("nan"), float("inf"))] == [None] * 5
    assert watch.mean == pytest.approx(0.9 * 2.02 + 0.1)
    assert watch.jump(2.2) is None
    assert watch.jump(3.0) == "the loss jumped to 3 from a mean of 1.946"
    assert watch.jump(3.0) is None


def test_a_peak_is_reported_once_and_again_when_it_has_grown():
    peaks = iter([None, 0.5, 0.91, 0.91, 0.915, 0.95])
    watch = MemoryWatch(0.9, lambda: next(peaks))
    found = [watch.above() for _ in range(6)]
    assert [f is not None for f in found] == [False, False, True, False, False, True]
    assert found[2] == ("memory had a peak of 91% of the device, above 90%", 0.91)
