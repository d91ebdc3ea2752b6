"""Random 32-bit words as a function of a key and a position, in int32 arithmetic.

The mixer is that of codecs.counter_random; here whole words are wanted, and int32 is what vector units multiply
fast. Products wrap, as they do modulo 2^32.
"""

import torch
from torch import Tensor

from megatron_adacc.codecs.counter_random import keys_of

_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


def key_tensor(seed: int, parameter: int, step: int, start: int, device: torch.device) -> Tensor:
    """int32 [3]: two keys of this parameter and step, and the position of the first element."""
    own = keys_of(keys_of(seed)[0] | (parameter << 32))[0]
    low, high = keys_of(own | (step << 32))
    return torch.tensor([_signed(low), _signed(high), _signed(start & 0xFFFFFFFF)], dtype=torch.int32, device=device)


def words(key: Tensor, shape: torch.Size) -> Tensor:
    """Random int32 of this shape for the positions from key[2] on."""
    position = torch.arange(shape.numel(), dtype=torch.int32, device=key.device).view(shape) + key[2]
    return _mix((position + key[1]) ^ key[0])


def _mix(word: Tensor) -> Tensor:
    word = word ^ ((word >> 16) & 0xFFFF)
    word = word * _FIRST
    word = word ^ ((word >> 15) & 0x1FFFF)
    word = word * _SECOND
    return word ^ ((word >> 15) & 0x1FFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
