"""Random numbers that are a function of a key and a position: no state, no order, the same bits everywhere.

    mix(h):  h ^= h >> 16;  h *= 0x21f0aaad;  h ^= h >> 15;  h *= 0x735a2d97;  h ^= h >> 15      (mod 2**32)
    random(i) = mix(mix(low32(i) ^ key_0) ^ high32(i) ^ key_1)                  32 bits for element i
    u(i) = (random(i) >> 16 + 1/2) / 2**16                                      in (0, 1)

The multipliers are those of a published search for 32-bit mixers of this shape with low avalanche bias
(C. Wellons, hash-prospector). Both are below 2**31, so the products fit in int64, which is what torch has.
Sixteen bits of u: then q + u is exact in float32 for every integer q up to 128, so an x that is a whole
number of steps is never moved.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


def _mix(word: Tensor | int) -> Tensor | int:
    word = word ^ (word >> 16)
    word = (word * _FIRST) & _MASK
    word = word ^ (word >> 15)
    word = (word * _SECOND) & _MASK
    return word ^ (word >> 15)


def keys_of(seed: int) -> tuple[int, int]:
    """Two 32-bit keys from a seed of any size; seeds that differ by little give keys that differ much."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    first = _mix(_mix(low ^ 0x9E3779B9) ^ high)
    second = _mix(_mix(first ^ 0x85EBCA6B) ^ low)
    return int(first), int(second)


def draw_tensor(seed: int, start: int, device: torch.device) -> Tensor:
    """int64 [3]: the keys of `seed` and the position of the first element, as the block functions take them."""
    return torch.tensor([*keys_of(seed), start], dtype=torch.int64, device=device)


def uniform(draw: Tensor, shape: torch.Size) -> Tensor:
    """u for the elements at positions start, start + 1, ... of `draw`, float32 of this shape."""
    position = torch.arange(shape.numel(), dtype=torch.int64, device=draw.device).view(shape) + draw[2]
    word = _mix((position & _MASK) ^ draw[0])
    word = _mix(word ^ (position >> 32) ^ draw[1])
    assert isinstance(word, Tensor)
    return ((word >> 16).to(torch.float32) + 0.5) * 2.0**-16
