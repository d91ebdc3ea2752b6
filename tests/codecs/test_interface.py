"""What holds for every codec: shapes, strides, bytes, options and their refusals."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_adacc import codecs
from megatron_adacc.codecs import Implementation, OutlierState
from megatron_adacc.codecs.layout import Layout
from megatron_adacc.errors import UserError

LOSSY = [name for name in codecs.names() if name != "bitmask"]


def awkward_tensors() -> dict[str, torch.Tensor]:
    """Tensors of every kind of strides, of 0.0 and 1.25, which every codec can encode."""
    base = (torch.rand(6, 10, 14) < 0.5) * 1.25
    return {
        "contiguous": base,
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "slice with holes": base[:, ::2, 1:9],
        "offset": base[2:],
        "expanded": base[:, :1].expand(6, 10, 14),
        "overlapping": base.flatten().unfold(0, 5, 2),
        "scalar": base[0, 0, 0],
        "one element": base[:1, :1, :1],
        "empty": base[:, :0],
        "channels last": torch.rand(2, 3, 4, 5).lt(0.5).mul(1.25).contiguous(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("kind", awkward_tensors())
def test_shape_strides_dtype_and_bytes(name: str, kind: str) -> None:
    codec = codecs.get(name, implementation="torch")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = awkward_tensors()[kind].to(dtype)
        if kind != "channels last" and not x.is_contiguous():
            assert dtype is torch.float32 or x.dtype is dtype
        before = x.clone()
        packed = codec.encode(x)
        y = codec.decode(packed)
        assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
        assert packed.nbytes == codec.packed_bytes(x.shape, dtype)
        assert torch.equal(x, before)
        # Of the values 0 and 1.25, every format but 2 bits with both on one side keeps at least zero exactly.
        assert torch.equal(y == 0, x == 0) or name.endswith("int2")
        if codec.lossless:
            assert torch.equal(x, y)


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    channel=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_layout_gives_every_element_back(sizes: list[int], order, step: int, channel: bool) -> None:
    x = torch.arange(torch.Size(sizes).numel(), dtype=torch.float32).view(sizes)
    dims = list(range(len(sizes)))
    order.shuffle(dims)
    x = x.permute(dims)[..., ::step]
    layout, run = Layout.of(x, -1 if channel else None)
    assert run.is_contiguous()
    assert run.shape == (x.numel(),)
    y = layout.restore(run.clone())
    assert torch.equal(x, y)
    assert y.stride() == x.stride()
    if channel and x.numel():
        assert torch.equal(run.view(-1, x.shape[-1]).sum(0), x.reshape(-1, x.shape[-1]).sum(0))


def test_a_dense_tensor_is_not_copied() -> None:
    x = torch.rand(3, 5, 7).permute(2, 0, 1)
    _, run = Layout.of(x)
    assert run.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("name", codecs.names())
def test_encode_keeps_neither_tensor_nor_gradient(name: str) -> None:
    x = torch.ones(300, requires_grad=True)
    codec = codecs.get(name, implementation="torch")
    packed = codec.encode(x)
    assert all(tensor.untyped_storage()._cdata != x.untyped_storage()._cdata for tensor in packed.tensors.values())
    assert not codec.decode(packed).requires_grad


@pytest.mark.parametrize("name", LOSSY)
def test_stochastic_rounding_touches_no_global_random_state(name: str) -> None:
    codec = codecs.get(name, implementation="torch", rounding="stochastic")
    x = torch.randn(20, 25)
    state = torch.get_rng_state()
    first, second, third = codec.encode(x, seed=1), codec.encode(x, seed=1), codec.encode(x, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.codes, second.codes)
    assert not torch.equal(first.codes, third.codes)


def test_codecs_are_frozen_values() -> None:
    codec = codecs.get("group_int4", group_size=64, rounding="stochastic")
    assert codec == codecs.get("group_int4", group_size=64, rounding=codecs.Rounding.STOCHASTIC)
    assert hash(codec) != hash(codecs.get("group_int4"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.group_size = 32
    assert [name for name in codecs.names() if codecs.get(name).lossless] == ["bitmask"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: codecs.get("int3"), "There is no codec 'int3'; there are "),
        (lambda: codecs.get("group_int4", size=3), "has no option 'size'; it has "),
        (lambda: codecs.get("group_int4", bits=3), "has no option 'bits'"),
        (lambda: codecs.get("group_int4", scale="mine"), "scale='mine' is not known; it is one of 'paper', 'signed'"),
        (lambda: codecs.get("group_int4", group_size=100), "has to be a power of two from 16 to 4096"),
        (lambda: codecs.get("group_int4").encode(torch.ones(3, dtype=torch.int32)), "the tensor is torch.int32"),
        (lambda: codecs.get("group_int4").encode(torch.ones(3), codecs.State()), "takes no state"),
        (lambda: codecs.get("channel_int4").encode(torch.ones(3), codecs.State()), "takes no state"),
        (lambda: codecs.get("affine_int4").encode(torch.ones(3), codecs.State()), "takes no state"),
        (lambda: codecs.get("bitmask").encode(torch.ones(3), codecs.State()), "takes a BitmaskState"),
        (lambda: codecs.get("outlier_int4").encode(torch.ones(3), codecs.State()), "takes an OutlierState"),
        (
            lambda: codecs.get("outlier_int4").encode(torch.ones(3), OutlierState.from_channels([1], 4, "cpu")),
            "is for 4 channels, but dimension -1 of the tensor has 3",
        ),
        (lambda: OutlierState.from_channels([1, 1], 4, "cpu"), "named once"),
        (lambda: OutlierState.from_channels([4], 4, "cpu"), "between 0 and 3"),
        (
            lambda: codecs.get("group_int4", implementation="triton").encode(torch.ones(3)),
            "'triton' needs a CUDA tensor, but the tensor is on 'cpu'",
        ),
        (
            lambda: codecs.get("group_int4").decode(codecs.get("bitmask").encode(torch.ones(3))),
            "'group_int4' was asked to decode what 'bitmask' wrote",
        ),
        (lambda: Implementation.COMPILED.resolve(torch.device("cuda")), "'compiled' is for CPU tensors"),
        (lambda: Implementation.INTERPRET.resolve(torch.device("cuda")), "'interpret' is for CPU tensors"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(call, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert sentence in str(caught.value)


def test_auto_chooses_by_device() -> None:
    assert Implementation.AUTO.resolve(torch.device("cuda")) is Implementation.TRITON
    assert Implementation.AUTO.resolve(torch.device("meta")) is Implementation.TORCH


def test_without_a_compiler_the_log_says_what_it_costs(monkeypatch, caplog) -> None:
    from megatron_adacc.codecs import options

    options.cpp_compiler_found.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        with caplog.at_level("WARNING"):
            assert Implementation.AUTO.resolve(torch.device("cpu")) is Implementation.TORCH
            assert Implementation.AUTO.resolve(torch.device("cpu")) is Implementation.TORCH
    finally:
        options.cpp_compiler_found.cache_clear()
    (record,) = caplog.records
    assert "No C++ compiler was found (CXX=no-such-compiler does not exist)" in record.getMessage()
    assert "install g++ or set CXX" in record.getMessage()
