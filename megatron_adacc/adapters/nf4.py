"""NormalFloat with 4 bits (QLoRA, arXiv 2305.14314): sixteen values, each of a normal variable equally often, times one
scale a block.

    block of 64:    c = max|x|      q = the nearest of VALUES to x / c          4 + 32 / 64          = 4.5   bits
    doubly:         c - mean(c) in blocks of 256, each element in 8 bits        4 + 8 / 64 + 32 / (64 256) = 4.127 bits
                    of a tree of decimal fractions, times the block's max

Blocks run over the matrix by rows. The 8 bits are the signed dynamic type of 8-bit optimizers (arXiv 2110.02861,
section 1.3), which the published code uses. Codes and scales are those of bitsandbytes' `quantize_4bit`, bit for bit;
of scales in 8 bits, those that lie about midway between two values may be rounded to the other.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_adacc.adapters.quantizers import pack_pairs

BLOCK = 64
SCALES_BLOCK = 256

# arXiv 2305.14314, appendix E.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# Elements that are encoded or decoded at a time: what they are in between takes some ten bytes an element.
PIECE = 2**20


@functools.cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@functools.cache
def pairs(device: torch.device) -> Tensor:
    """What each byte stands for: float32 [256, 2]."""
    byte = torch.arange(256, device=device)
    return _values(device)[torch.stack((byte >> 4, byte & 15), dim=1)]


@functools.cache
def dynamic_values(device: torch.device) -> Tensor:
    """The 256 values of 8 bits, ascending, float32: with i bits for the fraction, 2^i means of a division of
    [0.1, 1] in equal parts, times 10^(i - 6), of either sign, for i = 0 ... 6; and 0 and 1."""
    found = [0.0, 1.0]
    for bits in range(7):
        edges = torch.linspace(0.1, 1, 2**bits + 1, dtype=torch.float32, device="cpu")
        means = ((edges[:-1] + edges[1:]) / 2 * 10 ** (bits - 6)).tolist()
        found += means + [-mean for mean in means]
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def _nearest(values: Tensor, x: Tensor) -> Tensor:
    """The index of the nearest of ascending `values`, the lower of two that are equally near; uint8."""
    return torch.bucketize(x, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    return F.pad(flat, (0, -flat.numel() % block)).view(-1, block)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [ceil(n / 64) 32], and scales, float32 [ceil(n / 64)], of n finite elements of any float dtype."""
    flat = weight.detach().flatten()
    codes, scales = [], []
    for piece in flat.split(PIECE):
        blocks = _in_blocks(piece.float(), BLOCK)
        most = blocks.abs().amax(1)
        found = _nearest(_values(flat.device), blocks / torch.where(most > 0, most, 1.0)[:, None])
        codes.append(pack_pairs(found).flatten())
        scales.append(most)
    return torch.cat(codes), torch.cat(scales)


def encode_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales in 8 bits: codes, uint8 as many as scales; the maximum of each 256, float32; the mean, float32 [1]."""
    mean = scales.mean()[None]
    blocks = _in_blocks(scales - mean, SCALES_BLOCK)
    most = blocks.abs().amax(1)
    codes = _nearest(dynamic_values(scales.device), blocks / torch.where(most > 0, most, 1.0)[:, None])
    return codes.flatten()[: scales.numel()], most, mean


def decode_scales(codes: Tensor, most: Tensor, mean: Tensor) -> Tensor:
    """The reverse of encode_scales()."""
    found = _in_blocks(dynamic_values(codes.device)[codes.int()], SCALES_BLOCK)
    return (found * most[:, None]).flatten()[: codes.numel()] + mean


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Fill `out`, contiguous with n elements of a float dtype, with what encode() made its codes and scales of."""
    flat, values = out.view(-1), pairs(codes.device)
    for start in range(0, flat.numel(), PIECE):
        end = min(start + PIECE, flat.numel())
        part = scales[start // BLOCK : -(-end // BLOCK)]
        bytes_ = codes[start // 2 : start // 2 + part.numel() * BLOCK // 2]
        found = values.index_select(0, bytes_.int()).view(-1, BLOCK).mul_(part[:, None])
        flat[start:end] = found.view(-1)[: end - start]
    return out
