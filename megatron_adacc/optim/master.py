"""float32 master weights as the bfloat16 parameter and a 16-bit remainder: the same bits, 2 bytes less.

A bfloat16 number is the upper half of a float32. With w the bits of the master weight, read as an integer,

    parameter = upper half of (w + 0x8000)          remainder = w - (parameter << 16),  in -0x8000 .. 0x7fff
    w = (parameter << 16) + remainder

so the parameter is the master weight rounded to the nearest, ties away from zero: ties to even would need 65537
remainders. NaN becomes the quiet NaN, lest its payload round into another number.
float16 cannot do this: below 2^-17 there are more than 2^16 float32 numbers that round to one float16.
"""

import torch
from torch import Tensor

_QUIET_NAN = 0x7FC00000


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The master weights, float32, of a bfloat16 parameter and an int16 remainder, elementwise."""
    upper = parameter.view(torch.int16).to(torch.int32) << 16
    return (upper + remainder.to(torch.int32)).view(torch.float32)


def split(master: Tensor, parameter: Tensor, remainder: Tensor) -> None:
    """Write float32 master weights into a bfloat16 parameter and an int16 remainder."""
    bits = torch.where(torch.isnan(master), _QUIET_NAN, master.view(torch.int32))
    upper = (bits + 0x8000) >> 16
    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))
    remainder.copy_((bits - (upper << 16)).to(torch.int16))
