"""How m and v are written in 16, 8 and 4 bits."""

import math

import pytest
import torch
from torch import Tensor

from megatron_adacc.optim.blocks import empty_state
from megatron_adacc.optim.formats import block_bytes, decode, encode
from megatron_adacc.optim.random_words import key_tensor, words

LOW_BITS = (16, 8, 4)


def round_trip(bits: int, m: Tensor, v: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """m and v [blocks, width] encoded and decoded; to the nearest without a seed."""
    blocks, width = m.shape
    state = [tensor.view(blocks, -1) for tensor in code_tensors(bits, blocks, width)]
    exponents = [tensor.view(blocks) for tensor in state[2:]] or [None, None]
    drawn = None if seed is None else words(key_tensor(seed, 0, 1, 0, m.device), m.shape)
    encode(bits, m, v, state[0], state[1], exponents[0], exponents[1], drawn)
    return decode(bits, state[0], state[1], exponents[0], exponents[1], width)


def code_tensors(bits: int, blocks: int, width: int) -> list[Tensor]:
    """Codes and exponents for blocks of any one width."""
    one = list(empty_state(bits, width, torch.device("cpu")).values())
    return [tensor.repeat(blocks) for tensor in one]


def typical(blocks: int = 64, width: int = 256, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """m and v as Adam has them: s log-normal within a block, |m| up to s."""
    s = torch.exp(spread * torch.randn(blocks, width) - 8)
    return s * torch.randn(blocks, width).clamp(-3, 3) * 0.3, s * s


def test_block_bytes_are_what_is_held():
    for width in (1, 7, 100, 256):
        for bits in (32, 16, *LOW_BITS):
            assert sum(tensor.nbytes for tensor in code_tensors(bits, 1, width)) == block_bytes(width, bits)
    assert [block_bytes(256, bits) for bits in (32, 16, 8, 4)] == [2048, 1024, 514, 258]


def test_codes_of_8_bits_are_torch_s_e4m3_values():
    s = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    padded = torch.nn.functional.pad(s, (0, 129)).view(1, 256)
    _, v = round_trip(8, torch.zeros_like(padded), padded**2)
    assert torch.equal(v, padded**2)


def test_8_bits_round_to_the_nearest_as_torch_does():
    s = torch.rand(32, 256) * 448
    s[:, 0] = 448  # the block's scale becomes 1
    s[0, 1:4] = torch.tensor([17.0, 19.0, 2.0**-9 * 3.5])  # ties: 17 lies between 16 and 18, 19 between 18 and 20
    _, v = round_trip(8, torch.zeros_like(s), s * s)
    # s is the root of s * s, which need not be s: compare with what the code was made from.
    assert torch.equal(v.sqrt(), (s * s).sqrt().to(torch.float8_e4m3fn).to(torch.float32))


@pytest.mark.parametrize(
    ("bits", "s_error", "q_error"), [(16, 2.0**-8, 2.0**-8), (8, 2.0**-4, 2.0**-4), (4, 2**0.25 - 1, None)]
)
def test_nearest_error_bounds(bits, s_error, q_error):
    m, v = typical(spread=0.8)
    m_back, v_back = round_trip(bits, m, v)
    relative = v_back.sqrt() / v.sqrt() - 1
    # The lowest of the 4-bit levels is 2^-7 to 2^-6.5 of the largest element.
    low_end = v.sqrt() < v.sqrt().amax(1, keepdim=True) * 2**-6.5
    assert float(relative[~low_end].abs().max()) <= s_error * 1.001
    q, q_back = m / v_back.sqrt(), m_back / v_back.sqrt()
    if q_error is None:
        step = q.abs().amax(1, keepdim=True) * 2**0.25 / 7
        assert bool(((q - q_back).abs() <= step / 2 * 1.001).all())
    else:
        # Near zero e4m3 has equal steps of 2^-9, where the largest is above 112 (room for twice of it up to 448).
        bound = torch.maximum(q.abs() * q_error, q.abs().amax(1, keepdim=True) * 2.0**-10 / 112)
        assert bool(((q - q_back).abs() <= bound * 1.001).all())


@pytest.mark.parametrize("bits", LOW_BITS)
def test_a_small_v_is_never_read_back_as_zero(bits):
    s = torch.logspace(0, -15, 256).view(1, 256)
    for seed in (None, 1):
        _, v = round_trip(bits, torch.zeros_like(s), s.double().square().float(), seed)
        assert bool((v > 0).all())


@pytest.mark.parametrize("bits", LOW_BITS)
def test_zeros_come_back(bits):
    m, v = round_trip(bits, torch.zeros(3, 256), torch.zeros(3, 256), 1)
    assert not m.any()
    assert not v.any()


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("bits", LOW_BITS)
def test_what_was_decoded_gets_its_codes_again(bits, seed):
    """Also where rounding has moved a block's largest element, and where few elements are not zero: so a checkpoint in
    float32 resumes bit for bit."""
    m, v = typical(2000, 64, spread=2.0)
    m[::2] *= torch.rand(1000, 64) < 0.1
    once = round_trip(bits, m, v, seed)
    again = round_trip(bits, *once)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])


@pytest.mark.parametrize("bits", LOW_BITS)
def test_extreme_magnitudes_stay_finite(bits):
    for magnitude in (1e-37, 1e-20, 1e18):
        m = torch.full((1, 256), magnitude)
        m_back, v_back = round_trip(bits, m, m * m, 1)
        assert bool(torch.isfinite(m_back).all())
        assert bool(torch.isfinite(v_back).all())


@pytest.mark.parametrize("bits", LOW_BITS)
def test_inf_and_nan_stay_in_their_places(bits):
    m, v = typical(2)
    clean_m, clean_v = round_trip(bits, m, v)
    largest = int(v[0].argmax())
    places = [place for place in (3, 70, 201) if place != largest]
    m[0, places[0]], v[0, places[0]] = math.nan, math.nan
    m[0, places[1]], v[0, places[1]] = math.inf, math.inf
    v[0, places[-1]] = math.inf  # g^2 overflowed, g did not
    m_back, v_back = round_trip(bits, m, v)
    assert torch.isnan(m_back[0, places[0]])
    assert not torch.isfinite(m_back[0, places[1]])
    assert v_back[0, places[-1]] == math.inf
    assert math.isfinite(m_back[0, places[-1]])
    assert int((~torch.isfinite(m_back)).sum()) == 2
    assert torch.equal(m_back[1], clean_m[1])
    assert torch.equal(v_back[1], clean_v[1])


@pytest.mark.parametrize("bits", LOW_BITS)
def test_stochastic_rounding_is_unbiased_in_v(bits):
    s = torch.exp(0.5 * torch.randn(1, 256) - 3)
    m = s * torch.randn(1, 256).clamp(-2, 2)
    backs = [round_trip(bits, m, s * s, seed) for seed in range(500)]
    v_mean = torch.stack([v for _, v in backs]).mean(0)
    # 500 draws of a relative standard deviation of at most 0.36 (4 bits): 5 sigma are 8 %.
    assert float((v_mean / (s * s) - 1).abs().max()) < {16: 0.001, 8: 0.03, 4: 0.08}[bits]
    assert float(((v_mean / (s * s)).mean() - 1).abs()) < {16: 1e-4, 8: 1e-3, 4: 5e-3}[bits]


def test_words_depend_on_all_of_the_key_and_look_uniform():
    shape = torch.Size((512, 256))
    device = torch.device("cpu")
    first = words(key_tensor(0, 0, 1, 0, device), shape)
    bits = torch.stack([(first >> bit) & 1 for bit in range(32)]).double()
    assert float((bits.mean((1, 2)) - 0.5).abs().max()) < 0.01
    # m's half and v's half, and neighbours, know nothing of each other.
    halves = torch.stack([first & 0xFFFF, (first >> 16) & 0xFFFF, (first & 0xFFFF).roll(1)]).view(3, -1).double()
    assert float((torch.corrcoef(halves) - torch.eye(3)).abs().max()) < 0.015
    for other in ((1, 0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 0)):
        assert float((words(key_tensor(*other, device), shape) == first).double().mean()) < 1e-3
    shifted = words(key_tensor(0, 0, 1, 256, device), torch.Size((1, 256)))
    assert torch.equal(shifted[0], first[1])
