"""One scale a channel."""

import pytest
import torch

from megatron_adacc import codecs


def codec(**options):
    return codecs.get("channel_int4", implementation="torch", **options)


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 300])
def test_bytes_and_errors(rows: int) -> None:
    x = torch.randn(rows, 24) * torch.logspace(-3, 3, 24)
    packed = codec().encode(x)
    runs = -(-rows // 128)
    assert packed.codes.shape == (-(-rows // 2), 24)
    assert packed.scales.shape == (runs, 24)
    assert packed.nbytes == 24 * (-(-rows // 2) + 4 * runs) == codec().packed_bytes(x.shape, x.dtype)
    step = packed.scales.abs().repeat_interleave(128, 0)[:rows]
    assert ((codec().decode(packed) - x).abs() <= step / 2 * (1 + 1e-6)).all()


def test_a_channel_scale_does_not_see_other_channels() -> None:
    x = torch.randn(64, 8)
    alone = codec().decode(codec().encode(x))
    x[:, 3] *= 1000
    beside = codec().decode(codec().encode(x))
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(alone[:, keep], beside[:, keep])


def test_literally_one_scale_a_channel() -> None:
    x = torch.randn(1000, 16)
    single = codec(group_size=1024, scale="paper")
    packed = single.encode(x)
    assert packed.scales.shape == (1, 16)
    scale = x.abs().amax(0) / 8
    assert torch.equal(packed.scales[0], scale)
    assert torch.equal(single.decode(packed), torch.clamp(torch.round(x / scale), -8, 7) * scale)


def test_codes_stand_two_rows_to_a_byte() -> None:
    x = torch.tensor([[1.0], [-8.0], [7.0], [3.0]])
    assert codec().encode(x).codes.tolist() == [[1 | 7 << 4], [8 | 3 << 4]]


def test_query_of_an_attention_layer() -> None:
    qkv = torch.randn(16, 2, 4, 3 * 8)
    query = qkv[..., :8]
    packed = codec().encode(query)
    assert packed.scales.shape == (1, 8)
    y = codec().decode(packed)
    assert y.stride() == query.stride()
    assert torch.equal(y.contiguous(), codec().decode(codec().encode(query.contiguous())))
