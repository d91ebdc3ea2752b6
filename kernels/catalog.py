"""Every kernel in the variants that are compiled offline by `adacc kernels check`.

A variant names a kernel, the types of its arguments and its compile-time constants, as a launch on a GPU would
give them: pointers are divisible by 16, as PyTorch's allocations are.
"""

from dataclasses import dataclass
from typing import Any

from megatron_adacc.codecs.options import Rounding, Scale
from megatron_adacc.codecs.symmetric import Symmetric

from . import affine, bitmask, channel, group, outlier, statistics
from .launch import TILE, constants_of

GROUP = 128


@dataclass(frozen=True)
class Variant:
    """One compilation: `name`, the jit function, its signature, constants and launch options."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    divisible: tuple[str, ...] = ()

    @property
    def full_signature(self) -> dict[str, str]:
        """The signature with the constants marked, in the order of the arguments."""
        return {argument: self.signature.get(argument, "constexpr") for argument in (*self.signature, *self.constants)}

    @property
    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """Divisibility of the pointers and of the integers in `divisible`, by position."""
        positions = [
            place
            for place, (argument, kind) in enumerate(self.signature.items())
            if kind.startswith("*") or argument in self.divisible
        ]
        return {(place,): [["tt.divisibility", 16]] for place in positions}


_KEYS = {"key_0": "i32", "key_1": "i32"}
_EXACT = {"num_warps": 4, "enable_fp_fusion": False}


def _types(text: str) -> dict[str, str]:
    return dict(part.split(":") for part in text.split())


def _grouped(bits: int, value: str, stochastic: bool = False) -> list[Variant]:
    form = Symmetric(bits, Scale.SIGNED, Rounding.STOCHASTIC if stochastic else Rounding.NEAREST)
    tile = {"GROUP": GROUP, "GROUPS": TILE // GROUP, "BF16": value == "i16"}
    decode = {"BITS": bits, **tile, "LIMIT": 65504.0}
    name = f"group_int{bits} {value}"
    encode_types = _types(f"x:*{value} codes:*u8 scales:*fp32 numel:i32") | _KEYS
    decode_types = _types(f"codes:*u8 scales:*fp32 x:*{value} numel:i32")
    encode = Variant(
        f"{name} encode{' stochastic' if stochastic else ''}",
        group.encode_kernel, encode_types, {**constants_of(form), **tile}, _EXACT,
    )  # fmt: skip
    return [encode, Variant(f"{name} decode", group.decode_kernel, decode_types, decode, _EXACT)][: 2 - stochastic]


def _outlier(value: str, aligned: bool) -> list[Variant]:
    form = Symmetric(4, Scale.SIGNED, Rounding.NEAREST)
    tile = {"GROUP": GROUP, "GROUPS": TILE // GROUP, "BF16": value == "i16", "ALIGNED": aligned}
    kept = "fp16" if value == "fp16" else "i16"
    sizes = "numel:i32 channels:i32 columns:i32"
    encode_types = _types(f"x:*{value} codes:*u8 scales:*fp32 slots:*i16 outliers:*{kept} {sizes}") | _KEYS
    decode_types = _types(f"codes:*u8 scales:*fp32 slots:*i16 outliers:*{kept} x:*{value} {sizes}")
    name = f"outlier_int4 {value}{'' if aligned else ' unaligned'}"
    options = {**_EXACT, "num_warps": outlier.WARPS}
    decode = {"BITS": 4, **tile, "LIMIT": 65504.0}
    return [
        Variant(f"{name} encode", outlier.encode_kernel, encode_types, {**constants_of(form), **tile}, options),
        Variant(f"{name} decode", outlier.decode_kernel, decode_types, decode, options),
    ]


def _channel(value: str, block: int) -> list[Variant]:
    form = Symmetric(4, Scale.SIGNED, Rounding.NEAREST)
    rows = min(block // 2, channel.MOST_ROWS)
    tile = {"BLOCK": block, "ROWS": rows, "CHANNELS": channel.CHANNELS, "BF16": value == "i16"}
    encode_types = _types(f"x:*{value} codes:*u8 scales:*fp32 rows:i32 channels:i32") | _KEYS
    decode_types = _types(f"codes:*u8 scales:*fp32 x:*{value} rows:i32 channels:i32")
    name = f"channel_int4 {value}{'' if block == GROUP else f' {block} rows'}"
    options = {**_EXACT, "num_warps": channel.WARPS}
    decode = {"BITS": 4, **tile, "LIMIT": 65504.0}
    return [
        Variant(
            f"{name} encode",
            channel.encode_kernel,
            encode_types,
            {**constants_of(form), **tile},
            options,
            ("channels",),
        ),
        Variant(f"{name} decode", channel.decode_kernel, decode_types, decode, options, ("channels",)),
    ]


def _affine(value: str) -> list[Variant]:
    tile = {"GROUP": GROUP, "GROUPS": TILE // GROUP, "BF16": value == "i16"}
    encode_types = _types(f"x:*{value} codes:*u8 bounds:*fp32 numel:i32") | _KEYS
    decode_types = _types(f"codes:*u8 bounds:*fp32 x:*{value} numel:i32")
    nearest = {**tile, "STOCHASTIC": False}
    return [
        Variant(f"affine_int4 {value} encode", affine.encode_kernel, encode_types, nearest, _EXACT),
        Variant(f"affine_int4 {value} decode", affine.decode_kernel, decode_types, tile, _EXACT),
    ]


def _bitmask(value: str, is_bool: bool) -> list[Variant]:
    part = bitmask.BLOCK // 8
    has_nan = value != "i8"
    name = "bitmask bool" if is_bool else f"bitmask {value}"
    encode_types = _types(f"x:*{value} bits:*u8 values:*{value} violations:*i32 numel:i32")
    decode_types = _types(f"bits:*u8 values:*{value} x:*{value} numel:i32")
    constants = {"IS_BOOL": is_bool, "PART": part}
    nan = {"NAN_BITS": 0x7E00 if has_nan else 0, "HAS_NAN": has_nan}
    options = {"num_warps": bitmask.WARPS}
    return [
        Variant(f"{name} encode", bitmask.encode_kernel, encode_types, {**nan, **constants}, options),
        Variant(f"{name} decode", bitmask.decode_kernel, decode_types, constants, options),
    ]


def _statistics(value: str) -> list[Variant]:
    types = _types(f"x:*{value} partial:*fp32 rows:i32 channels:i32")
    constants = {
        "BF16": value == "i16",
        "CHUNK": statistics.ROWS_A_CHUNK,
        "ROWS": statistics.ROWS_AT_ONCE,
        "CHANNELS": statistics.CHANNELS,
    }
    name = f"channel statistics {value}"
    return [Variant(name, statistics.partial_sums_kernel, types, constants, {"num_warps": 4})]


def variants() -> list[Variant]:
    """All of them: each kernel for bfloat16 (as int16), and the paths that only other dtypes take."""
    return [
        *_bitmask("i8", True),
        *_bitmask("i16", False),
        *_bitmask("i32", False),
        *_grouped(4, "i16"),
        *_grouped(4, "fp16"),
        *_grouped(4, "fp32"),
        *_grouped(4, "fp16", stochastic=True),
        *_grouped(8, "i16"),
        *_grouped(2, "i16"),
        *_outlier("i16", True),
        *_outlier("fp32", False),
        *_channel("i16", GROUP),
        *_channel("fp16", 4096),
        *_affine("i16"),
        *_affine("fp32"),
        *_statistics("i16"),
    ]
