"""Speed and correctness of the codecs on a GPU: what `adacc kernels bench` and scripts/gpu_check.py show."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.testing import do_bench

from megatron_adacc import codecs
from megatron_adacc.codecs import Codec, OutlierState, Packed, State

CHANNELS = 4096
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Speed:
    """One direction of one codec.

    Attributes:
        name, dtype: of the codec and the tensor.
        direction: "encode" or "decode".
        gigabytes_per_second: each input read once and each output written once, by the median time.
        share_of_copy: that, divided by the same figure for a copy of the same tensor on the same device.
        largest_difference: of the decoded values from the reference's; 0.0 means equal in every bit compared.
        same_codes: whether codes and scales equal the reference's.
    """

    name: str
    dtype: str
    direction: str
    gigabytes_per_second: float
    share_of_copy: float
    largest_difference: float
    same_codes: bool


def sample(name: str, dtype: torch.dtype, rows: int, device: torch.device) -> tuple[Tensor, State | None]:
    """A tensor [rows, 4096] that `name` is for, and the state it is encoded with."""
    generator = torch.Generator(device).manual_seed(1)
    if name == "bitmask":
        kept = torch.rand(rows, CHANNELS, device=device, generator=generator) < 0.9
        return torch.where(kept, 1 / 0.9, 0.0).to(dtype), codecs.BitmaskState.on(device)
    x = torch.randn(rows, CHANNELS, device=device, generator=generator)
    if name.startswith("affine"):
        return x.softmax(-1).to(dtype), None
    if name.startswith("outlier"):
        channels = list(range(7, CHANNELS, 128))
        x[:, channels] *= 50
        return x.to(dtype), OutlierState.from_channels(channels, CHANNELS, device)
    return x.to(dtype), None


def differences(name: str, dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    """(largest difference of decoded values, whether codes and scales are equal) from the CPU reference."""
    x, state = sample(name, dtype, 257, device)
    host = OutlierState.from_channels(state.channels, CHANNELS, "cpu") if isinstance(state, OutlierState) else None
    return compare(codecs.get(name), x, state, host)


def compare(codec: Codec, x: Tensor, state: State | None, host_state: State | None) -> tuple[float, bool]:
    """The same for one tensor: `codec` on x's device against the reference on the CPU.

    NaN at the same place is no difference; NaN at another place is an infinite one.
    """
    reference = codecs.get(codec.name, **_options(codec), implementation="torch")
    found, expected = codec.encode(x, state), reference.encode(x.cpu(), host_state)
    return _distance(codec.decode(found).cpu(), reference.decode(expected)), _equal(found, expected)


def _options(codec: Codec) -> dict[str, object]:
    names = ("group_size", "rounding", "scale", "seed", "channel_dim")
    return {name: getattr(codec, name) for name in names if hasattr(codec, name)}


def _distance(first: Tensor, second: Tensor) -> float:
    if first.shape != second.shape or not torch.equal(first.isnan(), second.isnan()):
        return float("inf")
    same = (first == second) | first.isnan()
    difference = torch.where(same, 0.0, (first.double() - second.double()).abs())
    return float(difference.max()) if difference.numel() else 0.0


def _equal(found: Packed, expected: Packed) -> bool:
    pairs = zip(found.tensors.values(), expected.tensors.values(), strict=True)
    return all(torch.equal(torch.nan_to_num(a.cpu()), torch.nan_to_num(b)) for a, b in pairs)


def copy_bandwidth(nbytes: int, device: torch.device) -> float:
    """Measured GB/s of a device copy of `nbytes` bytes, read and written."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * nbytes / milliseconds / 1e6


def speeds(device: torch.device, megabytes: int, names: tuple[str, ...], dtypes: tuple[str, ...]) -> Iterator[Speed]:
    """Both directions of each codec on tensors of `megabytes`, with the cache emptied between runs."""
    copy = copy_bandwidth(megabytes << 20, device)
    for name in names:
        for dtype in dtypes:
            codec = codecs.get(name)
            rows = (megabytes << 20) // (CHANNELS * DTYPES[dtype].itemsize)
            x, state = sample(name, DTYPES[dtype], rows, device)
            packed = codec.encode(x, state)
            nbytes = x.numel() * x.element_size() + packed.nbytes
            distance, same_codes = differences(name, DTYPES[dtype], device)
            directions: dict[str, Callable[[], object]] = {
                "encode": functools.partial(codec.encode, x, state),
                "decode": functools.partial(codec.decode, packed),
            }
            for direction, call in directions.items():
                rate = nbytes / do_bench(call, return_mode="median") / 1e6
                yield Speed(name, dtype, direction, rate, rate / copy, distance, same_codes)
