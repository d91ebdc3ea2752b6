"""Softmax output: within [0, 1], zeros exact."""

import math

import pytest
import torch

from megatron_adacc import codecs

CODEC = codecs.get("affine_int4", implementation="torch")


def decoded(x: torch.Tensor, codec=CODEC) -> torch.Tensor:
    return codec.decode(codec.encode(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_causal_softmax(dtype: torch.dtype, rounding: str) -> None:
    scores = torch.randn(4, 200, 200) * 3
    scores.masked_fill_(torch.ones(200, 200, dtype=torch.bool).triu(1), -math.inf)
    x = scores.softmax(-1).to(dtype)
    y = decoded(x, codecs.get("affine_int4", implementation="torch", rounding=rounding))
    assert y.min() >= 0
    assert y.max() <= 1
    assert (y[x == 0] == 0).all()
    assert (x == 0).sum() >= 4 * 199 * 100


def test_bytes_and_errors() -> None:
    x = torch.rand(1000) * 7 - 3
    packed = CODEC.encode(x)
    assert packed.codes.shape == (500,)
    assert packed.bounds.shape == (8, 2)
    assert packed.nbytes == 564 == CODEC.packed_bytes(x.shape, x.dtype)
    step = ((packed.bounds[:, 1] - packed.bounds[:, 0]) / 15).repeat_interleave(128)[:1000]
    assert ((CODEC.decode(packed) - x).abs() <= step / 2 * (1 + 1e-6) + 1e-6).all()


def test_constant_groups_and_extremes_are_exact() -> None:
    x = torch.cat([torch.full((128,), 1 / 3), torch.zeros(128), torch.full((7,), -1e-3)])
    assert torch.equal(decoded(x), x)
    pair = torch.tensor([0.1, 0.7, 0.3])
    assert torch.equal(decoded(pair)[:2], pair[:2])


def test_worked_example() -> None:
    packed = CODEC.encode(torch.tensor([0.0, 3.0, 15.0, 7.0]))
    assert packed.bounds.tolist() == [[0.0, 15.0]]
    assert packed.codes.tolist() == [0 | 15 << 4, 3 | 7 << 4]


def test_extremes_stay_finite() -> None:
    half = torch.tensor([-60000.0, 60000.0, 1.0], dtype=torch.float16)
    assert torch.equal(decoded(half)[:2], half[:2])
    full = torch.tensor([-3.4e38, 3.4e38, 0.0])
    assert torch.equal(decoded(full)[:2], full[:2])
    assert decoded(full)[2].abs() <= 3.4e38 / 15 * 1.001


@pytest.mark.parametrize("constant", [False, True])
def test_inf_and_nan_come_back_in_place(constant: bool) -> None:
    x = torch.full((256,), 0.25) if constant else torch.rand(256)
    x[3], x[50], x[51] = math.nan, math.inf, -math.inf
    x[128:] = math.nan
    y = decoded(x)
    assert torch.equal(y.isnan(), x.isnan())
    assert y[50] == math.inf
    assert y[51] == -math.inf
    finite = x.isfinite()
    bound = 0.0 if constant else (x[finite].max() - x[finite].min()) / 24
    assert (y[finite] - x[finite]).abs().max() <= bound * (1 + 1e-6)
