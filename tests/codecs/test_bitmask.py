"""bitmask: lossless, or an error."""

import pytest
import torch

from megatron_adacc import codecs
from megatron_adacc.codecs import BitmaskState, NotTwoValuedError
from megatron_adacc.codecs.bitmask import BLOCK

TORCH = codecs.get("bitmask", implementation="torch")
SIZES = [0, 1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8])
def test_two_values_come_back_bit_for_bit(numel: int, dtype: torch.dtype) -> None:
    mask = torch.rand(numel) < 0.9
    x = mask if dtype is torch.bool else (mask.float() * (3.0 if dtype.itemsize == 1 else 1 / 0.9)).to(dtype)
    packed = TORCH.encode(x)
    y = TORCH.decode(packed)
    assert y.dtype is dtype
    assert torch.equal(x, y)
    values = 0 if dtype is torch.bool else 2 * dtype.itemsize * -(-numel // BLOCK)
    assert packed.nbytes == -(-numel // 8) + values == TORCH.packed_bytes(x.shape, dtype)


def test_dropout_noise_takes_one_bit_an_element() -> None:
    noise = torch.empty(1024, 1024).bernoulli_(0.9).div_(0.9)
    packed = TORCH.encode(noise)
    assert packed.nbytes == 131_072 + 64 * 8
    assert torch.equal(TORCH.decode(packed), noise)


@pytest.mark.parametrize("values", [(-0.0, 0.0), (float("nan"), 1.0), (float("inf"), float("-inf")), (2.0, 2.0)])
def test_values_are_compared_as_bits(values: tuple[float, float]) -> None:
    x = torch.where(torch.rand(100) < 0.5, *values)
    y = TORCH.decode(TORCH.encode(x))
    assert torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize("implementation", ["torch", "compiled", "interpret"])
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([0.0, 1.0, -0.0]),
        torch.cat([torch.zeros(5 * BLOCK + 3), torch.ones(1), torch.full((1,), 1.0 + 2**-23)]),
        # Every block has two values, the tensor has three.
        torch.cat([torch.zeros(BLOCK), torch.ones(BLOCK), torch.full((BLOCK,), 2.0)]),
        torch.arange(9, dtype=torch.uint8),
    ],
    ids=["three", "signed zero", "one of many", "by block", "uint8"],
)
def test_a_third_value_raises(implementation: str, x: torch.Tensor) -> None:
    with pytest.raises(NotTwoValuedError, match=r"has more\. Keep it, recompute it or use a lossy codec"):
        codecs.get("bitmask", implementation=implementation).encode(x)


def test_deferred_check_raises_when_asked() -> None:
    state = BitmaskState.on("cpu")
    state.raise_if_violated()
    TORCH.encode(torch.ones(3), state)
    state.raise_if_violated()
    state.violations.fill_(1)
    with pytest.raises(NotTwoValuedError, match="more than two different values"):
        state.raise_if_violated()


def test_a_violated_block_holds_nan_and_sets_the_flag() -> None:
    """What a deferred check leaves behind on the device: no rounded value."""
    from megatron_adacc.codecs.bitmask import decode_blocks, encode_blocks

    x = torch.tensor([0.0, 1.0, 2.0, 1.0] * 4).view(torch.int32).view(1, 8, 2)
    bits, values = torch.empty(1, 2, dtype=torch.uint8), torch.empty(1, 2, dtype=torch.int32)
    violations = torch.zeros(1, dtype=torch.int32)
    encode_blocks(x, bits, values, violations, nan_bits=0x7FC00000, is_bool=False)
    assert violations.item() == 1
    y = torch.empty_like(x)
    decode_blocks(bits, values, y, is_bool=False)
    assert y.view(torch.float32).isnan().all()
