"""How m and v of Adam are written in 16, 8 and 4 bits a number.

Both are stored as   s = sqrt(v)   and   q = m / s'   where s' is s as it will be read back. A block has one
exponent byte for s and one for q (8 and 4 bits only).

    bits   s                                                  q
    32     v itself, float32                                  m itself, float32
    16     s in bfloat16                                      m itself, bfloat16
     8     e4m3 code of s / 2^e                               e4m3 code of q / 2^e
     4     level j:  s = 2^(e/2) 2^(-j/2),  j = 0 .. 14       k / 7 of 2^(e/4),  k = -7 .. 7

Why so. The update is m / sqrt(v): an error of m matters relative to the s of the same element, and one scale a
block suits q, which is of order one everywhere, where it would not suit m. A small s must not become 0, or the
update would be m / eps: s > 0 is never read back as 0 (8 bits: at least the smallest code; 4 bits: at least
2^-7 of the block's largest). Squares halve the exponents, so sqrt(v) in e4m3 spans 10 decades of v.

v changes by a thousandth in a step (1 - beta2), far below the distance of two codes: rounded to the nearest it
would never move. Stochastic rounding is unbiased in v (not in s), m's in m. The exponents make the levels of s
the same numbers whatever the block's largest element is, so a new exponent moves no element.

inf and NaN: q holds NaN (e4m3's NaN; code -8), s holds inf (e4m3's NaN; level 15), which is what AdamW's m and v
become; NaN in v alone does not occur. A v that has become inf keeps m at 0: AdamW's update m / inf.
"""

import torch
from torch import Tensor

BLOCK = 256
"""Elements in a block."""

STATE_BITS = (32, 16, 8, 4)
"""The precisions of a block, highest first."""

_E4M3_NAN = 0x7F
_E4M3_TOP = 0x7E  # 448
_LOWEST_BINADE = 121  # 2^-6 as float32's exponent bits say it
ZERO_BLOCK = -128  # exponent of a 4-bit block of s that is all zero
_LAST_LEVEL = 14
_INF_LEVEL = 15
_NAN_CODE = -8
_LARGEST_Q = 2.0**30  # beta1 and beta2 bound |q| by (1 - beta1) / sqrt(1 - beta2) or so; a state of others may not


def codes_per_block(bits: int, width: int) -> int:
    """Elements of the code tensor of one of m and v that a block of `width` elements takes."""
    return -(-width // 2) if bits == 4 else width


def width_bytes(width: int, bits: int) -> int:
    """Bytes of the codes of one of m and v, in a block of `width` elements."""
    return codes_per_block(bits, width) * state_dtype(bits).itemsize


def exponent_bytes(bits: int) -> int:
    """Bytes a block of one of m and v has beside its codes."""
    return 1 if bits in (8, 4) else 0


def block_bytes(width: int, bits: int) -> int:
    """Bytes of m and v together in a block of `width` elements."""
    return 2 * (width_bytes(width, bits) + exponent_bytes(bits))


def state_dtype(bits: int) -> torch.dtype:
    """The dtype that codes of this precision are held in."""
    return {32: torch.float32, 16: torch.bfloat16, 8: torch.uint8, 4: torch.uint8}[bits]


def decode(
    bits: int, m: Tensor, v: Tensor, m_exponent: Tensor | None, v_exponent: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """m and v, float32 [blocks, width], of codes [blocks, bytes] and exponents int8 [blocks]."""
    if bits == 32:
        return m, v
    if bits == 16:
        s = v.to(torch.float32)
        return m.to(torch.float32), s * s
    assert m_exponent is not None
    assert v_exponent is not None
    if bits == 8:
        s = _e4m3_values(v) * _power_of_two(v_exponent)
        s = torch.where((v & 0x7F) == _E4M3_NAN, torch.inf, s)
        q = _e4m3_values(m) * _power_of_two(m_exponent)
        spoiled = (m & 0x7F) == _E4M3_NAN
    else:
        level = _unpack(v, width)
        s = torch.exp2((v_exponent.to(torch.float32).unsqueeze(1) - level.to(torch.float32)) * 0.5)
        s = torch.where((v_exponent == ZERO_BLOCK).unsqueeze(1), 0.0, s)
        s = torch.where(level == _INF_LEVEL, torch.inf, s)
        code = (_unpack(m, width) ^ 8) - 8
        q = code.to(torch.float32) * (torch.exp2(m_exponent.to(torch.float32) * 0.25) * (1.0 / 7.0)).unsqueeze(1)
        spoiled = code == _NAN_CODE
    value = torch.where(spoiled, torch.nan, torch.where(s == torch.inf, 0.0, q * s))
    return value, s * s


def encode(
    bits: int,
    m_value: Tensor,
    v_value: Tensor,
    m: Tensor,
    v: Tensor,
    m_exponent: Tensor | None,
    v_exponent: Tensor | None,
    words: Tensor | None,
) -> None:
    """Write float32 m_value and v_value [blocks, width] into codes and exponents.

    `words`: random int32 [blocks, width] for stochastic rounding, the lower half for m, the upper for v. None: to the
    nearest.
    """
    if bits == 32:
        m.copy_(m_value)
        v.copy_(v_value)
        return
    s = torch.sqrt(v_value)
    m_word = None if words is None else words & 0xFFFF
    v_word = None if words is None else (words >> 16) & 0xFFFF
    if bits == 16:
        m.copy_(_bfloat16(m_value, m_word))
        v.copy_(_bfloat16(s, v_word))
        return
    assert m_exponent is not None
    assert v_exponent is not None
    if bits == 8:
        v_codes, exponents = _encode_e4m3(s, v_word, root=True)
        read_back = _e4m3_values(v_codes) * _power_of_two(exponents)
    else:
        v_codes, exponents = _encode_levels(s, v_word)
        read_back = torch.exp2((exponents.to(torch.float32).unsqueeze(1) - v_codes.to(torch.float32)) * 0.5)
    v_exponent.copy_(exponents)
    # Where s is 0, m is 0 or so small that AdamW's eps drowns it; inf and NaN times 0 are NaN, as they should be.
    known = (v_value > 0.0) & (v_value < torch.inf) & (read_back > 0.0)
    q = torch.where(known, (m_value / read_back).clamp(-_LARGEST_Q, _LARGEST_Q), m_value * 0.0)
    if bits == 8:
        m_codes, exponents = _encode_e4m3(q, m_word, root=False)
        m.copy_(m_codes.to(torch.uint8))
        v.copy_(v_codes.to(torch.uint8))
    else:
        m_codes, exponents = _encode_linear(q, m_word)
        m.copy_(_pack(m_codes))
        v.copy_(_pack(v_codes))
    m_exponent.copy_(exponents)


def _unit(word: Tensor) -> Tensor:
    """A uniform number in (0, 1) from 16 random bits."""
    return (word.to(torch.float32) + 0.5) * 2.0**-16


def _bfloat16(x: Tensor, word: Tensor | None) -> Tensor:
    if word is None:
        return x.to(torch.bfloat16)
    bits = x.view(torch.int32)
    # Adding to the magnitude bits of a finite float32 reaches inf at most; nothing wraps.
    up = ((bits + word) & -0x10000).view(torch.float32)
    return torch.where(x.abs() < torch.inf, up, x).to(torch.bfloat16)


def _largest(x: Tensor) -> Tensor:
    magnitude = x.abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).amax(1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, float32 [blocks, 1], for int8 or int32 exponents >= -126."""
    return ((exponent.to(torch.int32).clamp_min(-126) + 127) << 23).view(torch.float32).unsqueeze(1)


def _e4m3_values(codes: Tensor) -> Tensor:
    """float32 of e4m3 codes (OCP 8-bit floating point: bias 7, no inf); the NaN codes give 480."""
    code = codes.to(torch.int32)
    magnitude = code & 0x7F
    normal = ((magnitude + 960) << 20).view(torch.float32)
    value = torch.where(magnitude < 8, magnitude.to(torch.float32) * 2.0**-9, normal)
    return torch.where(code > 0x7F, -value, value)


def _encode_e4m3(x: Tensor, word: Tensor | None, *, root: bool) -> tuple[Tensor, Tensor]:
    """int32 codes [blocks, width] and int32 exponents [blocks]; the largest element lies in (224, 448] 2^e.

    `root`: x is a square root: rounding is unbiased in its square, and what is not zero gets a code that is not.
    """
    pattern = _largest(x).view(torch.int32)
    exponent = (pattern >> 23) - 135 + ((pattern & 0x7FFFFF) > 0x600000).to(torch.int32)
    exponent = exponent.clamp(-100, 100)
    finite = x.abs() < torch.inf
    y = torch.where(finite, x.abs(), 0.0) / _power_of_two(exponent)
    # float32's exponent, no lower than that of e4m3's subnormals; y counts `steps` of that binade's distance of codes.
    binade = (y.view(torch.int32) >> 23).clamp_min(_LOWEST_BINADE)
    steps = y * ((257 - binade) << 23).view(torch.float32)
    whole = torch.floor(steps)
    share = steps - whole
    if word is None:
        odd = (whole.to(torch.int32) & 1) == 1
        up = (share > 0.5) | ((share == 0.5) & odd)
    else:
        # Unbiased in the square: the share of y^2 between whole^2 and (whole + 1)^2.
        up = _unit(word) < (share * (2.0 * whole + share) / (2.0 * whole + 1.0) if root else share)
    code = ((binade - _LOWEST_BINADE) << 3) + whole.to(torch.int32) + up.to(torch.int32)
    code = code.clamp_max(_E4M3_TOP)
    if root:
        code = torch.where(y > 0.0, code.clamp_min(1), code)
    code = torch.where(finite, code, _E4M3_NAN)
    return torch.where(x < 0.0, code | 0x80, code), exponent


def _encode_levels(s: Tensor, word: Tensor | None) -> tuple[Tensor, Tensor]:
    """int32 levels [blocks, width] of s >= 0 and int32 exponents [blocks], ZERO_BLOCK where all is zero."""
    largest = _largest(s)
    # What log2 is off by must not lift the exponent of a block whose largest element is on a level.
    exponent = torch.ceil(torch.log2(largest.clamp_min(2.0**-48)) * 2.0 - 1e-3).clamp_max(127.0)
    depth = exponent.unsqueeze(1) - 2.0 * torch.log2(s.clamp_min(2.0**-126))
    depth = depth.clamp(0.0, 1.0 * _LAST_LEVEL)
    above = torch.floor(depth)
    share = depth - above
    # v is 2^-share between the levels 1 and 1/2: unbiased in v if the upper one has chance 2 2^-share - 1.
    down = share > 0.5 if word is None else _unit(word) > torch.exp2(1.0 - share) - 1.0
    level = (above.to(torch.int32) + down.to(torch.int32)).clamp_max(_LAST_LEVEL)
    level = torch.where(s < torch.inf, level, _INF_LEVEL)
    empty = (largest == 0.0) & (torch.where(s == torch.inf, 1.0, 0.0).amax(1) == 0.0)
    return level, torch.where(empty, ZERO_BLOCK, exponent.to(torch.int32))


def _encode_linear(q: Tensor, word: Tensor | None) -> tuple[Tensor, Tensor]:
    """int32 codes [blocks, width] from -7 to 7, and int32 exponents [blocks]."""
    exponent = torch.ceil(torch.log2(_largest(q).clamp_min(2.0**-30)) * 4.0).clamp_max(120.0)
    finite = q.abs() < torch.inf
    y = torch.where(finite, q, 0.0) * (7.0 / torch.exp2(exponent * 0.25)).unsqueeze(1)
    rounded = torch.round(y) if word is None else torch.floor(y + _unit(word))
    code = rounded.clamp(-7.0, 7.0).to(torch.int32)
    return torch.where(finite, code, _NAN_CODE), exponent.to(torch.int32)


def _pack(codes: Tensor) -> Tensor:
    """uint8 [blocks, ceil(width / 2)]: byte j holds elements j and j + ceil(width / 2), the first in its low bits."""
    width = codes.shape[1]
    half = -(-width // 2)
    low, high = codes[:, :half] & 15, codes[:, half:] & 15
    if width % 2:
        high = torch.nn.functional.pad(high, (0, 1))
    return (low | (high << 4)).to(torch.uint8)


def _unpack(packed: Tensor, width: int) -> Tensor:
    """The unsigned codes, int32 [blocks, width]."""
    code = packed.to(torch.int32)
    return torch.cat([code & 15, code >> 4], 1)[:, :width]
