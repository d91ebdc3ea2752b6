"""The compiled functions and the interpreted Triton kernels give the reference's bits.

Hypothesis chooses formats, dtypes, shapes, strides and planted values. A compilation takes seconds, so the
compiled formats are few here and their sizes many; interpreted kernels compile nothing and vary in everything.
"""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_adacc import codecs
from megatron_adacc.codecs import OutlierState, Packed, State

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PLANTED = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-40, 3.0e38, -3.0e38, 60000.0, 7.5, -8.0]


def same(first: Tensor, second: Tensor) -> bool:
    """torch.equal, with NaN equal to NaN."""
    if not first.is_floating_point():
        return torch.equal(first, second)
    nan = first.isnan()
    return torch.equal(nan, second.isnan()) and torch.equal(first[~nan], second[~nan])


def assert_agreement(name: str, other: str, x: Tensor, state: State | None, **options) -> Packed:
    """Codes, scales and decoded values of `other` are the reference's."""
    reference = codecs.get(name, implementation="torch", **options)
    candidate = codecs.get(name, implementation=other, **options)
    expected, found = reference.encode(x, state), candidate.encode(x, state)
    assert found.layout == expected.layout
    assert found.tensors.keys() == expected.tensors.keys()
    for part, tensor in expected.tensors.items():
        assert same(tensor, found.tensors[part]), part
    y, z = reference.decode(expected), candidate.decode(found)
    assert (z.shape, z.stride(), z.dtype) == (x.shape, x.stride(), x.dtype)
    assert same(y, z)
    assert found.nbytes == candidate.packed_bytes(x.shape, x.dtype, state)
    return found


@st.composite
def tensors(draw, two_valued: bool = False) -> Tensor:
    """A tensor of any float dtype, up to 4 dimensions, any order of strides, some with holes."""
    last = draw(st.sampled_from([1, 2, 3, 31, 64, 100, 128, 256]))
    sizes = [*draw(st.lists(st.integers(0, 9), max_size=3)), last]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    if two_valued:
        x = torch.where(torch.rand(sizes, generator=generator) < 0.7, 1 / 0.9, 0.0).to(dtype)
    else:
        spread = draw(st.sampled_from([1e-3, 1.0, 300.0]))
        x = (torch.randn(sizes, generator=generator) * spread).to(dtype)
        for value in draw(st.lists(st.sampled_from(PLANTED), max_size=4)):
            if x.numel():
                x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    dims = draw(st.permutations(range(x.dim())))
    x = x.permute(dims)
    return x[..., :: draw(st.sampled_from([1, 1, 2]))]


@st.composite
def states(draw, channels: int) -> OutlierState:
    """An outlier list for so many channels."""
    listed = draw(st.lists(st.integers(0, max(0, channels - 1)), unique=True, max_size=min(4, channels)))
    return OutlierState.from_channels(listed, channels, "cpu")


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_interpreted_kernels(data) -> None:
    name = data.draw(st.sampled_from([name for name in codecs.names() if name != "bitmask"]))
    x = data.draw(tensors())
    options = {
        "rounding": data.draw(st.sampled_from(["nearest", "stochastic"])),
        "group_size": data.draw(st.sampled_from([16, 128, 256, 1024])),
        "seed": data.draw(st.integers(0, 2**64)),
    }
    if not name.startswith("affine"):
        options["scale"] = data.draw(st.sampled_from(["signed", "paper"]))
    state = data.draw(states(x.shape[-1])) if name.startswith("outlier") else None
    with warnings.catch_warnings():
        # NumPy says when float32 overflows to infinity, which decoding clamps.
        warnings.simplefilter("ignore", RuntimeWarning)
        assert_agreement(name, "interpret", x, state, **options)


@given(x=tensors(two_valued=True), repeats=st.sampled_from([1, 1, 40]))
@settings(max_examples=40, deadline=None)
def test_interpreted_bitmask(x: Tensor, repeats: int) -> None:
    x = x.repeat(repeats, *[1] * (x.dim() - 1)) if x.dim() else x
    assert_agreement("bitmask", "interpret", x, None)
    assert_agreement("bitmask", "interpret", x != 0, None)


def test_interpreted_literal_channel_scale() -> None:
    x = torch.randn(700, 40)
    x[300, 3] = float("inf")
    for rows in (16, 128, 1024, 2**20):
        assert_agreement("channel_int4", "interpret", x, None, group_size=rows)


# One compilation a direction, dtype and entry: a few seconds each.
COMPILED = [
    ("group_int4", "float32", {}),
    ("group_int4", "bfloat16", {"rounding": "stochastic"}),
    ("group_int8", "float16", {"scale": "paper"}),
    ("group_int2", "float32", {"group_size": 64}),
    ("outlier_int4", "float32", {}),
    ("channel_int4", "bfloat16", {}),
    ("affine_int4", "float32", {}),
]


@pytest.mark.parametrize(("name", "dtype", "options"), COMPILED)
def test_compiled(name: str, dtype: str, options: dict) -> None:
    generator = torch.Generator().manual_seed(3)

    # The last shape has channels that 128 does not divide: another function for the outlier format, so only there.
    shapes = [(2, 128), (9, 256), (3, 7, 128), (131, 256), (640, 128), (1, 128), (0, 128)]
    if name.startswith(("group", "affine")):
        shapes += [(1,), (127,), (129,), (1000, 33)]

    @given(shape=st.sampled_from(shapes), plant=st.lists(st.sampled_from(PLANTED), max_size=5), data=st.data())
    @settings(max_examples=25, deadline=None)
    def agrees(shape: tuple[int, ...], plant: list[float], data) -> None:
        x = torch.randn(shape, generator=generator).to(DTYPES[dtype])
        for value in plant:
            if x.numel():
                x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = value
        channels = [0, 77] if name.startswith("outlier") else []
        state = OutlierState.from_channels(channels, shape[-1], "cpu") if channels else None
        if name == "channel_int4":
            x = x.view(-1, 128)
        assert_agreement(name, "compiled", x, state, **options)

    agrees()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_compiled_bitmask(dtype: torch.dtype) -> None:
    for numel in (0, 1, 16384, 2 * 16384, 5 * 16384 + 77, 100 * 16384 + 1):
        x = (torch.rand(numel) < 0.9).to(dtype)
        assert_agreement("bitmask", "compiled", x if dtype is torch.bool else x / 0.9, None)


def test_compiled_unaligned_outliers() -> None:
    x = torch.randn(300, 100)
    x[:, 5] *= 100
    assert_agreement("outlier_int4", "compiled", x, OutlierState.from_channels([5], 100, "cpu"))


def test_one_compilation_serves_all_sizes() -> None:
    from torch._dynamo.utils import counters

    codec = codecs.get("group_int4", implementation="compiled", group_size=32)
    codec.warm_up(torch.float32, "cpu")
    before = counters["stats"]["unique_graphs"]
    for numel in (64, 65, 100, 4096, 1 << 20, 33 * 32 + 5):
        for x in (torch.randn(numel), torch.randn(numel + 1)[1:]):
            with torch.enable_grad():
                codec.decode(codec.encode(x))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            codec.decode(codec.encode(torch.randn(5000)))
    assert counters["stats"]["unique_graphs"] == before
    assert before > 0


def test_interpreted_statistics() -> None:
    from megatron_adacc.codecs import ChannelStatistics, Implementation

    for dtype in DTYPES.values():
        x = torch.randn(1100, 130).to(dtype)
        x[3, 4], x[5, 6] = float("inf"), float("nan")
        sums = []
        for implementation in (Implementation.TORCH, Implementation.INTERPRET):
            statistics = ChannelStatistics(130, "cpu", implementation=implementation)
            statistics.update(x)
            statistics.update(x[:7])
            sums.append(statistics.sums)
        assert sums[0].isfinite().all()
        assert torch.allclose(sums[0], sums[1], rtol=1e-5)
