"""Uniform quantizers: the formulas, what shares a scale, and how large an error may be."""

import pytest
import torch

from megatron_adacc.adapters.quantizers import (
    PerBlock,
    PerColumn,
    PerRow,
    PerTensor,
    pack_pairs,
    round_to_nearest,
    unpack_pairs,
)

MATRIX = torch.tensor([[-3.0, 7.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [0.5, 1.0, 14.0, 0.25, 1.0]])


@pytest.mark.parametrize(
    ("granularity", "scales"),
    [
        (PerTensor(), [[2.0]]),
        (PerRow(), [[1.0], [1.0], [2.0]]),
        (PerColumn(), [[3 / 7, 1.0, 2.0, 0.25 / 7, 2 / 7]]),
        (PerBlock(2), [[[1.0], [1 / 7], [2 / 7]], [[1.0], [1.0], [1.0]], [[1 / 7], [2.0], [1 / 7]]]),
    ],
)
def test_symmetric_scales_are_the_largest_of_seven_steps(granularity, scales):
    codes, grid = round_to_nearest(MATRIX, 4, granularity, symmetric=True)
    torch.testing.assert_close(grid.scale, torch.tensor(scales), rtol=1e-6, atol=0)
    assert codes.dtype == torch.int8
    assert codes.min() >= -7
    assert codes.max() == 7
    found = granularity.restored(grid.values(codes), 5)
    error = (granularity.arranged(found) - granularity.arranged(MATRIX)).abs()
    assert (error <= grid.scale / 2 * (1 + 1e-6)).all()


def test_an_asymmetric_range_holds_both_ends_and_zero():
    matrix = torch.tensor(
        [[-4.0, 11.0, 2.0, 0.0, 6.4], [0.0] * 5, [0.5, 1.0, 30.0, 0.25, 3.0], [-15.0, -1, -2, -3, -4]]
    )
    codes, grid = round_to_nearest(matrix, 4, PerRow(), symmetric=False)
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [[0, 15, 6, 4, 10], [0] * 5, [0, 0, 15, 0, 2], [0, 14, 13, 12, 11]]
    assert grid.zero is not None
    assert grid.zero.flatten().tolist() == [4.0, 0.0, 0.0, 15.0]
    assert grid.values(codes)[:3].tolist() == [[-4, 11, 2, 0, 6], [0] * 5, [0, 0, 30, 0, 4]]


def test_two_codes_make_a_byte_the_first_in_the_high_half():
    codes = torch.tensor([[1, 15, 0, 7]], dtype=torch.uint8)
    packed = pack_pairs(codes)
    assert packed.tolist() == [[0x1F, 0x07]]
    assert torch.equal(unpack_pairs(packed), codes)
