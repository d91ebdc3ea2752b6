"""How m and v of Adam are written in 16, 8 and 4 bits a number.

Both are stored as   s = sqrt(v)   and   q = m / s'   where s' is s as it will be read back. A block has one
exponent byte for s and one for q (8 and 4 bits only).

    bits   s                                                  q
    32     v itself, float32                                  m itself, float32
    16     s in bfloat16                                      m itself, bfloat16
     8     e4m3 code of s / 2^e                               e4m3 code of q / 2^e
     4     level j:  v = s^2 = 2^(e-j),  j = 0 .. 14          k / 7 of 2^(e/4),  k = -7 .. 7

Why so. The update is m / sqrt(v): an error of m matters relative to the s of the same element, and one scale a
block suits q, which is of order one everywhere, where it would not suit m. A small s must not become 0, or the
update would be m / eps: s > 0 is never read back as 0 (8 bits: at least the smallest code; 4 bits: at least
2^-7 of the block's largest). Squares halve the exponents, so sqrt(v) in e4m3 spans 10 decades of v.

v changes by a thousandth in a step (1 - beta2), far below the distance of two codes: rounded to the nearest it
would never move. Stochastic rounding is unbiased in v (not in s), m's in m. The exponents make the levels of s
the same numbers whatever the block's largest element is, so a new exponent moves no element.

inf and NaN: q holds NaN (e4m3's NaN; code -8), s holds inf (e4m3's NaN; level 15), which is what AdamW's m and v
become; NaN in v alone does not occur. A v that has become inf keeps m at 0: AdamW's update m / inf.

The arithmetic is written for vector units, to which torch.compile gives it: a number is rounded on its float32
pattern, where adding random bits below the last kept one and cutting them off rounds up with the right chance. 4-bit
levels are powers of two in v, so they are v's own exponent.
"""

import torch
from torch import Tensor

BLOCK = 256
"""Elements in a block."""

STATE_BITS = (32, 16, 8, 4)
"""The precisions of a block, highest first."""

_E4M3_NAN = 0x7F
_E4M3_TOP = 0x7E  # 448
_SMALLEST_NORMAL = 2.0**-6  # of e4m3; below it codes are 2^-9 apart, as they are in the binade above it
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
        q = _e4m3_values(m) * _power_of_two(m_exponent)
        whole = s == s
        value = torch.where(whole, s, 0.0)
        return q * value, torch.where(whole, s * s, torch.inf)
    level, code = _unpack(v, width), (_unpack(m, width) ^ 8) - 8
    value = _power_of_two_of(v_exponent.to(torch.int32).unsqueeze(1) - level)
    value = torch.where((v_exponent == ZERO_BLOCK).unsqueeze(1), 0.0, value)
    q = code.to(torch.float32) * (torch.exp2(m_exponent.to(torch.float32) * 0.25) * (1.0 / 7.0)).unsqueeze(1)
    known = level != _INF_LEVEL
    q = torch.where(code == _NAN_CODE, torch.nan, q) * torch.where(known, torch.sqrt(value), 0.0)
    return q, torch.where(known, value, torch.inf)


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
    found = _encode_8(m_value, s, m_word, v_word) if bits == 8 else _encode_4(m_value, v_value, m_word, v_word)
    for target, value in zip((m, v, m_exponent, v_exponent), found, strict=True):
        target.copy_(value)


def _encode_8(
    m_value: Tensor, s: Tensor, m_word: Tensor | None, v_word: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of m and v, and their exponents, of m and sqrt(v)."""
    exponent = _e4m3_exponent(_largest(s))
    scaled = torch.where(s < torch.inf, s, 0.0) * _power_of_two(-exponent)
    codes = _e4m3_codes(scaled, v_word, root=True).clamp_max(_E4M3_TOP)
    codes = torch.maximum(codes, (s > 0.0).to(torch.int32))
    back = _e4m3_values(codes.to(torch.uint8)) * _power_of_two(exponent)
    # Where s is 0, m is 0 or so small that AdamW's eps drowns it; inf and NaN times 0 are NaN, as they should be.
    q = m_value * torch.where((s > 0.0) & (s < torch.inf), 1.0 / back, 0.0)
    # s' > s / 2, however s was rounded: with room for twice the largest m / s no q can leave the range, and its largest
    # need not be known. To the nearest it is, so that what was decoded gets its codes again.
    q_exponent = _e4m3_exponent(_largest(q) if m_word is None else 2.0 * _largest(m_value / s))
    magnitude = q.abs() * _power_of_two(-q_exponent)
    q_codes = _e4m3_codes(magnitude.clamp_max(448.0), m_word, root=False).clamp_max(_E4M3_TOP)
    q_codes = torch.where(magnitude < torch.inf, q_codes, _E4M3_NAN)
    q_codes = q_codes | ((q < 0.0).to(torch.int32) << 7)
    codes = torch.where(s < torch.inf, codes, _E4M3_NAN)
    return q_codes.to(torch.uint8), codes.to(torch.uint8), q_exponent, exponent


def _encode_4(
    m_value: Tensor, v_value: Tensor, m_word: Tensor | None, v_word: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed codes of m and v, and their exponents."""
    levels, exponents = _encode_levels(v_value, v_word)
    back = torch.sqrt(_power_of_two_of(exponents.unsqueeze(1) - levels))
    q = m_value * torch.where((v_value > 0.0) & (v_value < torch.inf), 1.0 / back, 0.0)
    q = torch.where(q.abs() < torch.inf, q.clamp(-_LARGEST_Q, _LARGEST_Q), torch.nan)
    codes, q_exponents = _encode_linear(q, m_word)
    return _pack(codes), _pack(levels), q_exponents, exponents


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
    """2^exponent, float32 [blocks, 1], for int8 or int32 exponents [blocks] >= -126."""
    return _power_of_two_of(exponent.to(torch.int32).clamp_min(-126)).unsqueeze(1)


def _power_of_two_of(exponent: Tensor) -> Tensor:
    """2^exponent, float32, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def _e4m3_values(codes: Tensor) -> Tensor:
    """float32 of e4m3 codes, uint8 (OCP 8-bit floating point: bias 7, no inf); the NaN codes give NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _e4m3_exponent(largest: Tensor) -> Tensor:
    """int32 exponents e [blocks] so that the largest element of a block, float32 [blocks], is in (224, 448] 2^e."""
    pattern = largest.view(torch.int32)
    exponent = (pattern >> 23) - 135 + ((pattern & 0x7FFFFF) > 0x600000).to(torch.int32)
    return exponent.clamp(-100, 100)


def _e4m3_codes(x: Tensor, word: Tensor | None, *, root: bool) -> Tensor:
    """int32 codes of x [blocks, width], 0 <= x <= 448. `root`: x is a square root, and unbiased its square."""
    if word is None:
        return x.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
    subnormal = x < _SMALLEST_NORMAL
    shifted = torch.where(subnormal, x + _SMALLEST_NORMAL, x)
    pattern = shifted.view(torch.int32)
    zero = torch.where(subnormal, 121 << 3, 120 << 3)  # what a pattern without its last 20 bits has too much
    if not root:
        return ((pattern + ((word << 4) | 8)) >> 20) - zero
    # In distances of codes x lies `share` above `whole`; x^2 has the share s (2 w + s) / (2 w + 1) of its distance.
    steps = ((pattern & 0x7FFFFF) | 0x41000000).view(torch.float32)
    whole = torch.floor(steps)
    share = steps - whole
    twice = 2.0 * whole - torch.where(subnormal, 16.0, 0.0)
    up = _unit(word) * (twice + 1.0) < share * (twice + share)
    return (pattern >> 20) - zero + up.to(torch.int32)


def _encode_levels(v: Tensor, word: Tensor | None) -> tuple[Tensor, Tensor]:
    """int32 levels [blocks, width] of v >= 0 and int32 exponents [blocks], ZERO_BLOCK where all is zero."""
    finite = v < torch.inf
    pattern = v.view(torch.int32)
    top = torch.where(finite, pattern, 0).amax(1)
    exponent = (((top + 0x7FFFFF) >> 23) - 127).clamp(-96, 127)
    # v is 2^k (1 + f): unbiased if 2^(k + 1) has the chance f; the nearest s, by ratio, if 1 + f is above sqrt(2).
    added = 0x800000 - 0x3504F4 if word is None else (word << 7) | 64
    level = exponent.unsqueeze(1) + 127 - ((pattern + added) >> 23)
    level = torch.where(finite, level.clamp(0, _LAST_LEVEL), _INF_LEVEL)
    empty = (top == 0) & (torch.where(v == torch.inf, 1, 0).amax(1) == 0)
    return level, torch.where(empty, ZERO_BLOCK, exponent)


def _encode_linear(q: Tensor, word: Tensor | None) -> tuple[Tensor, Tensor]:
    """int32 codes [blocks, width] from -7 to 7, and int32 exponents [blocks]."""
    # What log2 is off by must not lift the exponent of a block whose largest element is code 7.
    exponent = torch.ceil(torch.log2(_largest(q).clamp_min(2.0**-30)) * 4.0 - 1e-3).clamp_max(120.0)
    finite = q.abs() < torch.inf
    whole = torch.where(finite, q, 0.0)
    if word is None:
        # Rounded up or down, a block's largest code may have become 5: what was decoded gets its exponent again.
        least = exponent
        for more in (2.0, 1.0, 0.0):
            trial = whole * (7.0 / torch.exp2((least + more) * 0.25)).unsqueeze(1)
            exponent = torch.where(((trial - torch.round(trial)).abs() < 1e-4).all(1), least + more, exponent)
        exponent = exponent.clamp_max(120.0)
    y = whole * (7.0 / torch.exp2(exponent * 0.25)).unsqueeze(1)
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
    # A shift that depends on the half, not a concatenation: compiled, that asks for each element which half it is in.
    shift = torch.arange(2, dtype=torch.int32, device=packed.device).view(1, 2, 1) * 4
    return ((packed.to(torch.int32).unsqueeze(1) >> shift) & 15).flatten(1)[:, :width]
