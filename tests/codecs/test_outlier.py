"""Outlier channels: kept exactly, out of their groups' way; and the statistics that find them."""

import logging

import pytest
import torch

from megatron_adacc import codecs
from megatron_adacc.codecs import ChannelStatistics, OutlierState
from megatron_adacc.codecs.statistics import reserved_columns
from megatron_adacc.errors import UserError

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


@pytest.mark.parametrize("shape", [(6, 4, 256), (9, 100), (40,), (0, 64), (3, 0), (), (5, 2)])
@pytest.mark.parametrize("columns", [0, 1, 3])
def test_reserved_columns_are_the_highest_channels_and_the_bytes_follow_from_the_shape(
    shape: tuple[int, ...], columns: int
) -> None:
    x = torch.randn(shape)
    channels = shape[-1] if shape else 1
    listed = [c for c in (1, channels - 1, 4) if 0 <= c < channels][:columns]
    if shape:
        x[..., listed] *= 60
    codec = codecs.get("outlier_int4", columns=columns, implementation="torch")
    state = codec.observe(x)
    assert isinstance(state, OutlierState)
    assert len(state.channels) == min(columns, channels)
    if x.numel() and columns < 3 and channels > 5:
        assert set(state.channels) == set(listed)
    packed = codec.encode(x, state)
    assert packed.nbytes == codec.packed_bytes(shape, x.dtype) == codec.packed_bytes(shape, x.dtype, state)
    rows = x.numel() // channels if channels else 0
    plain = codecs.get("group_int4").packed_bytes(shape, x.dtype)
    assert packed.nbytes == plain + 2 * rows * min(columns, channels)
    # Without a state encode finds the same channels itself.
    assert torch.equal(codec.decode(packed), codec.decode(codec.encode(x)))


def test_a_state_of_another_number_of_channels_than_reserved_is_refused() -> None:
    codec = codecs.get("outlier_int4", columns=2, implementation="torch")
    state = OutlierState.from_channels([3], 64, "cpu")
    with pytest.raises(UserError, match=r"lists 1 channels, but the codec has columns=2"):
        codec.encode(torch.randn(4, 64), state)
    with pytest.raises(UserError, match=r"lists 1 channels, but the codec has columns=2"):
        codec.packed_bytes((4, 64), torch.float32, state)


@pytest.mark.parametrize("columns", [-1, 2**15, True, 1.5, "2"])
def test_columns_that_are_no_number_of_columns_are_refused(columns: object) -> None:
    with pytest.raises(UserError, match="it has to be a number from 0 to 32767"):
        codecs.get("outlier_int4", columns=columns)


def test_other_codecs_observe_nothing() -> None:
    x = torch.randn(4, 64)
    names = [name for name in codecs.names() if not name.startswith("outlier")]
    assert [codecs.get(name).observe(x) for name in names] == [None] * 6
    assert codecs.get("outlier_int4").observe(x) is None


@pytest.mark.parametrize(
    ("channels", "found", "columns"),
    [
        (64, 0, 1),
        (64, 3, 3),
        (64, 30, 4),
        (1024, 0, 4),
        (1024, 7, 7),
        (1024, 90, 32),
        (4096, 0, 16),
        (2, 9, 2),
        (1, 0, 1),
    ],
)
def test_how_many_columns_are_reserved(channels: int, found: int, columns: int) -> None:
    assert reserved_columns(channels, found) == columns


def test_the_highest_channels_name_the_outliers_that_they_leave_out() -> None:
    statistics = ChannelStatistics(64, "cpu")
    sums = torch.ones(64)
    sums[[5, 40, 41]] = torch.tensor([30.0, 10.0, 20.0])
    statistics.sums += sums
    state = statistics.highest(1, threshold=1.0)
    assert (state.channels, state.left_out) == ((5,), (41, 40))
    assert statistics.highest(4).channels == (0, 5, 40, 41)
    assert statistics.highest(4).left_out == ()
