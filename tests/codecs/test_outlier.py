"""Outlier channels: kept exactly, out of their groups' way; and the statistics that find them."""

import logging

import pytest
import torch

from megatron_adacc import codecs
from megatron_adacc.codecs import ChannelStatistics, OutlierState

ROW = torch.tensor([[0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, 1000.0]])


def test_the_row_of_eight() -> None:
    codec = codecs.get("outlier_int4", implementation="torch")
    state = OutlierState.from_channels([7], 8, "cpu")
    y = codec.decode(codec.encode(ROW, state))
    assert y[0, 7] == 1000
    assert (y - ROW)[0, :7].abs().max() <= 0.0438
    without = codec.decode(codec.encode(ROW))
    assert torch.equal(without[0, :7], torch.zeros(7))
    assert without[0, 7] == 1000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 4, 256), (9, 100), (3, 1, 128)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_outlier_channels_are_exact_in_16_bits(dtype: torch.dtype, shape: tuple[int, ...], bits: int) -> None:
    channels = [0, 17, shape[-1] - 1]
    x = torch.randn(shape).to(dtype)
    x[..., channels] *= 60
    state = OutlierState.from_channels(channels, shape[-1], "cpu")
    codec = codecs.get(f"outlier_int{bits}", implementation="torch")
    packed = codec.encode(x, state)
    rows = x.numel() // shape[-1]
    assert packed.outliers.shape == (rows, 3)
    groups = -(-x.numel() // 128)
    assert packed.nbytes == -(-x.numel() * bits // 8) + 4 * groups + rows * 3 * 2
    assert packed.nbytes == codec.packed_bytes(shape, dtype, state)
    y = codec.decode(packed)
    assert torch.equal(y[..., channels], x[..., channels])
    # The others: as if the outliers had been zero.
    zeroed = x.clone()
    zeroed[..., channels] = 0
    plain = codecs.get(f"group_int{bits}", implementation="torch")
    expected = plain.decode(plain.encode(zeroed))
    expected[..., channels] = x[..., channels]
    assert torch.equal(y, expected)


def test_float32_outliers_are_rounded_to_bfloat16_and_stay_finite() -> None:
    x = torch.randn(4, 128)
    x[:, 3] = torch.tensor([1234.567, 3.4e38, float("inf"), float("nan")])
    codec = codecs.get("outlier_int4", implementation="torch")
    y = codec.decode(codec.encode(x, OutlierState.from_channels([3], 128, "cpu")))
    assert y[0, 3] == torch.tensor(1234.567).bfloat16()
    assert y[1, 3] == torch.finfo(torch.bfloat16).max
    assert y[2, 3] == float("inf")
    assert y[3, 3].isnan()
    assert y[:, 4:].isfinite().all()


def test_another_channel_dimension() -> None:
    x = torch.randn(128, 10)
    x[5] *= 100
    codec = codecs.get("outlier_int4", implementation="torch", channel_dim=0)
    state = OutlierState.from_channels([5], 128, "cpu")
    y = codec.decode(codec.encode(x, state))
    assert y.stride() == x.stride()
    assert torch.equal(y[5], x[5].bfloat16().float())
    last = codecs.get("outlier_int4", implementation="torch")
    assert torch.equal(y.T, last.decode(last.encode(x.T.contiguous(), state)))


def test_statistics_find_planted_channels() -> None:
    statistics = ChannelStatistics(512, "cpu")
    for _ in range(3):
        x = torch.randn(40, 7, 512)
        x[..., [100, 300]] *= 50
        statistics.update(x)
    state = statistics.outliers()
    assert state.channels == (100, 300)
    assert state.left_out == ()
    assert state.slots[100] == 0
    assert state.slots[300] == 1
    assert int((state.slots >= 0).sum()) == 2


def test_z_scores_by_hand() -> None:
    statistics = ChannelStatistics(4, "cpu")
    statistics.update(torch.tensor([[1.0, -1.0, 2.0, 4.0], [0.0, 1.0, -2.0, float("inf")]]))
    # a = 1 2 4 4, mean 2.75, population deviation sqrt(1.6875).
    assert torch.equal(statistics.sums, torch.tensor([1.0, 2.0, 4.0, 4.0]))
    expected = (torch.tensor([1.0, 2.0, 4.0, 4.0]) - 2.75) / 1.6875**0.5
    assert torch.allclose(statistics.z_scores(), expected)
    assert torch.equal(ChannelStatistics(4, "cpu").z_scores(), torch.zeros(4))


def test_more_outliers_than_the_block_holds(caplog) -> None:
    statistics = ChannelStatistics(256, "cpu")
    x = torch.ones(10, 256)
    x[:, 10], x[:, 20], x[:, 30] = 100, 300, 200
    statistics.update(x)
    with caplog.at_level(logging.WARNING):
        state = statistics.outliers(threshold=2.5, capacity=2)
    assert state.channels == (20, 30)
    assert state.left_out == (10,)
    assert "3 of 256 channels are outliers (z > 2.5), but the reserved block holds 2" in caplog.text
    codec = codecs.get("outlier_int8", implementation="torch")
    y = codec.decode(codec.encode(x, state))
    assert torch.equal(y[:, [20, 30]], x[:, [20, 30]])
    assert (y[:, 10] - 100).abs().max() <= 100 / 255


def test_a_state_without_channels_is_the_group_format() -> None:
    x = torch.randn(5, 128)
    state = OutlierState.from_channels([], 128, "cpu")
    outlier, group = (codecs.get(name, implementation="torch") for name in ("outlier_int4", "group_int4"))
    assert torch.equal(outlier.decode(outlier.encode(x, state)), group.decode(group.encode(x)))
    assert outlier.packed_bytes(x.shape, x.dtype, state) == group.packed_bytes(x.shape, x.dtype)
