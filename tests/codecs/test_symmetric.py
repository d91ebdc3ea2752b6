"""The right values of the group formats: bytes, errors, special values, rounding."""

import math

import pytest
import torch

from megatron_adacc import codecs
from megatron_adacc.codecs.counter_random import draw_tensor, keys_of, uniform
from megatron_adacc.codecs.options import Rounding, Scale
from megatron_adacc.codecs.symmetric import Symmetric

GROUP = 128


def torch_codec(name: str, **options):
    return codecs.get(name, implementation="torch", **options)


def steps(scales: torch.Tensor, numel: int) -> torch.Tensor:
    """|S| of each element, for groups without inf and NaN."""
    return scales.abs().repeat_interleave(GROUP)[:numel]


def test_bytes_of_a_square_tensor() -> None:
    codec = torch_codec("group_int4")
    assert codec.packed_bytes((4096, 4096), torch.float16) == 8_912_896
    assert round(4096 * 4096 * 2 / 8_912_896, 3) == 3.765
    x = torch.randn(4096, 64, dtype=torch.float16)
    assert codec.encode(x).nbytes == codec.packed_bytes(x.shape, x.dtype) == 131_072 + 8192


@pytest.mark.parametrize("numel", [1, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP + 3])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("scale", ["signed", "paper"])
def test_sizes_and_errors(numel: int, bits: int, scale: str) -> None:
    codec = torch_codec(f"group_int{bits}", scale=scale)
    for x in (torch.randn(numel), torch.rand(numel), -torch.rand(numel) - 1):
        packed = codec.encode(x)
        assert packed.codes.shape == (math.ceil(numel * bits / 8),)
        assert packed.scales.shape == (math.ceil(numel / GROUP),)
        error = (codec.decode(packed) - x).abs()
        # Within S / 2; the paper's scale clips its maximum by up to S, as 2 bits do with both.
        bound = 1.0 if scale == "paper" or bits == 2 else 0.5
        assert (error <= bound * steps(packed.scales, numel) * (1 + 1e-6) + 2e-7 * x.abs()).all()


def test_the_papers_formula_exactly() -> None:
    x = torch.randn(64, GROUP)
    packed = torch_codec("group_int4", scale="paper").encode(x)
    scale = x.abs().amax(1, keepdim=True) / 8
    codes = torch.clamp(torch.round(x / scale), -8, 7)
    assert torch.equal(packed.scales, scale[:, 0])
    assert torch.equal(torch_codec("group_int4", scale="paper").decode(packed), codes * scale)
    first, second = codes.to(torch.int32).view(64, 2, 64).unbind(1)
    assert torch.equal(packed.codes.view(64, 64), ((first & 15) | (second & 15) << 4).to(torch.uint8))


def test_the_signed_scale_puts_the_largest_on_the_lowest_code() -> None:
    for sign in (1.0, -1.0):
        x = torch.rand(GROUP) * 0.9
        x[17] = sign * 0.97
        codec = torch_codec("group_int4")
        packed = codec.encode(x)
        byte = int(packed.codes[17])
        assert byte & 15 == 8  # -8
        assert codec.decode(packed)[17] == x[17]


def test_opposite_extremes_are_not_clipped() -> None:
    x = torch.tensor([1.0, -1.0, 0.96, 0.5])
    codec = torch_codec("group_int4")
    packed = codec.encode(x)
    assert packed.scales.item() == pytest.approx(1 / 7.5)
    assert ((codec.decode(packed) - x).abs() <= 1 / 15 * (1 + 1e-6)).all()


def test_constant_and_zero_groups() -> None:
    x = torch.cat([torch.zeros(GROUP), torch.full((GROUP,), 3.0), torch.full((GROUP,), -0.7), torch.full((5,), 1e-3)])
    for bits in (2, 4, 8):
        codec = torch_codec(f"group_int{bits}")
        assert torch.equal(codec.decode(codec.encode(x)), x)
    paper = torch_codec("group_int4", scale="paper")
    y = paper.decode(paper.encode(x))
    assert torch.equal(y[:GROUP], torch.zeros(GROUP))
    assert torch.equal(y[GROUP : 2 * GROUP], torch.full((GROUP,), 2.625))


def test_float16_extremes_stay_finite() -> None:
    for largest in (60000.0, 65504.0):
        x = torch.tensor([-largest, largest], dtype=torch.float16)
        for bits in (4, 8):
            for scale in ("paper", "signed"):
                codec = torch_codec(f"group_int{bits}", scale=scale)
                y = codec.decode(codec.encode(x)).float()
                assert y.isfinite().all()
                rounding = largest * torch.finfo(torch.float16).eps / 2
                assert (y - x.float()).abs().max() <= largest / 2 ** (bits - 1) + rounding


def test_float32_extremes_stay_finite() -> None:
    x = torch.tensor([3.4e38, -3.4e38, 0.0, 1e-44])
    y = torch_codec("group_int4").decode(torch_codec("group_int4").encode(x))
    assert y.isfinite().all()
    assert torch.equal(y[2:], torch.zeros(2))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inf_and_nan_come_back_in_place(bits: int, dtype: torch.dtype) -> None:
    x = torch.randn(3 * GROUP + 40).to(dtype)
    x[5], x[9], x[77] = math.inf, math.nan, -math.inf
    x[2 * GROUP : 3 * GROUP] = math.nan
    x[-1] = math.inf
    codec = torch_codec(f"group_int{bits}")
    packed = codec.encode(x)
    y = codec.decode(packed)
    assert torch.equal(y.isnan(), x.isnan())
    infinite = x.isinf()
    assert torch.equal(y[infinite], x[infinite])
    finite = x.isfinite()
    assert y[finite].isfinite().all()
    # A special group's S: largest finite magnitude / (levels + 1/2), up to 2**-14 larger.
    for group in (x[:GROUP], x[3 * GROUP :]):
        place = slice(0, GROUP) if group is x[:GROUP] or group.numel() == GROUP else slice(3 * GROUP, None)
        kept = group[group.isfinite()].float()
        step = kept.abs().max() / (2 ** (bits - 1) - 1.5)
        rounding = kept.abs().max() * torch.finfo(dtype).eps
        error = (y[place].float() - group.float())[group.isfinite()].abs()
        assert error.max() <= step / 2 * (1 + 2**-13) + rounding
    ordinary = slice(GROUP, 2 * GROUP)
    assert torch.equal(y[ordinary], codec.decode(codec.encode(x[ordinary].clone())))


@pytest.mark.parametrize("name", ["group_int4", "group_int8", "group_int2", "affine_int4", "channel_int4"])
def test_stochastic_rounding_is_unbiased_everywhere(name: str) -> None:
    encodes = 4096
    x = torch.randn(2, 64)
    x[0, 0], x[1, 1] = 3.5, -3.5
    # One tensor of 4096 copies, each with its own groups, has 4096 different positions for each element.
    codec = torch_codec(name, rounding="stochastic", group_size=128, seed=7)
    if name == "channel_int4":
        x = torch.cat([x, -x])
        copies = x.repeat(encodes // 32, 32).contiguous()
        y = codec.decode(codec.encode(copies)).view(encodes // 32, 4, 32, 64).transpose(1, 2).reshape(encodes, 4, 64)
    else:
        y = codec.decode(codec.encode(x.expand(encodes, 2, 64).contiguous()))
    deviation = (y.mean(0) - x).abs()
    standard_error = y.std(0) / math.sqrt(encodes)
    assert (deviation <= 5 * standard_error + 1e-6).all()
    # A channel here holds x and -x alone, so in half of its places an extreme, which is exact.
    assert (y.std(0) > 0).sum() > x.numel() * (0.4 if name == "channel_int4" else 0.8)


def test_stochastic_mean_over_seeds() -> None:
    x = torch.randn(40)
    codec = torch_codec("group_int4", rounding="stochastic")
    y = torch.stack([codec.decode(codec.encode(x, seed=seed)) for seed in range(4096)])
    assert ((y.mean(0) - x).abs() <= 5 * y.std(0) / 64 + 1e-6).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_does_not_move_whole_steps(bits: int) -> None:
    half = 2 ** (bits - 1)
    x = torch.arange(-half, half - 1, dtype=torch.float32).repeat(400)[: GROUP * half]
    codec = torch_codec(f"group_int{bits}", rounding="stochastic", group_size=16 if bits < 8 else 512)
    if bits == 8:
        x = torch.arange(-half, half - 1, dtype=torch.float32).repeat(10)[:512]
    y = codec.decode(codec.encode(x))
    groups = x.view(-1, codec.group_size)
    whole = groups.amin(1) == -half
    assert whole.any()
    assert torch.equal(y.view_as(groups)[whole], groups[whole])


def test_uniform_numbers() -> None:
    u = uniform(draw_tensor(3, 0, torch.device("cpu")), torch.Size((1 << 18,)))
    assert u.min() > 0
    assert u.max() < 1
    # Mean, variance and neighbour correlation within 5 standard errors.
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / u.numel())
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / u.numel())
    centred = u - 0.5
    assert abs((centred[1:] * centred[:-1]).mean()) < 5 / 12 / math.sqrt(u.numel())
    # 256 bins: chi-square with 255 degrees of freedom.
    counts = torch.histc(u, 256, 0, 1)
    chi_square = ((counts - u.numel() / 256) ** 2 / (u.numel() / 256)).sum()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_uniform_numbers_depend_on_position_and_seed_alone() -> None:
    device = torch.device("cpu")
    whole = uniform(draw_tensor(5, 0, device), torch.Size((100,)))
    assert torch.equal(uniform(draw_tensor(5, 60, device), torch.Size((40,))), whole[60:])
    assert not torch.equal(uniform(draw_tensor(6, 0, device), torch.Size((100,))), whole)
    far = uniform(draw_tensor(5, 1 << 32, device), torch.Size((100,)))
    assert not torch.equal(far, whole)
    assert len({keys_of(seed) for seed in range(1000)} | {keys_of(seed << 32) for seed in range(1, 1000)}) == 1999


def test_factors_never_let_a_quotient_past_its_reach() -> None:
    for bits in (4, 8):
        half = 2 ** (bits - 1)
        nearest = Symmetric(bits, Scale.SIGNED, Rounding.NEAREST)
        stochastic = Symmetric(bits, Scale.SIGNED, Rounding.STOCHASTIC)
        assert 1 / (half - 0.5) <= nearest.small_factor < 1 / (half - 0.5) * (1 + 2**-22)
        assert 1 / (half - 1) <= stochastic.small_factor < 1 / (half - 1) * (1 + 2**-22)
        assert nearest.large_factor == 1 / half
