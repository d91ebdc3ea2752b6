"""Kernels write what they should and nothing past it."""

import pytest
import torch

from megatron_adacc import codecs
from megatron_adacc.codecs.bitmask import BLOCK
from megatron_adacc.codecs.blocks import Blocks
from megatron_adacc.codecs.options import Rounding, Scale
from megatron_adacc.codecs.symmetric import Symmetric
from megatron_adacc.kernels import load

GROUP = 128
GUARD = 300
FORM = Symmetric(4, Scale.SIGNED, Rounding.NEAREST)


class Guarded:
    """Tensors that end where a guard of known bytes begins."""

    def __init__(self) -> None:
        self.guards: list[torch.Tensor] = []

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.full(((numel + GUARD) * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype)
        self.guards.append(whole[numel:].view(torch.uint8))
        return whole[:numel]

    def intact(self) -> bool:
        return all(bool((guard == 0x5A).all()) for guard in self.guards)


@pytest.mark.parametrize("numel", [1, GROUP - 1, GROUP, GROUP + 1, 16 * GROUP, 16 * GROUP + 1, 40 * GROUP - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_formats(numel: int, dtype: torch.dtype) -> None:
    guarded, cut, x = Guarded(), Blocks(numel, GROUP, 2), torch.randn(numel).to(dtype)
    group, affine = load("group", interpret=True), load("affine", interpret=True)
    codes, scales = guarded.tensor(cut.code_bytes, torch.uint8), guarded.tensor(cut.count, torch.float32)
    decoded = guarded.tensor(numel, dtype)
    group.encode(x, codes, scales, cut, FORM, 0)
    group.decode(codes, scales, decoded, cut, FORM)
    assert guarded.intact()
    rounding = float(x.abs().max()) * torch.finfo(dtype).eps
    assert (decoded - x).abs().max() <= scales.abs().max() / 2 * 1.01 + rounding
    bounds = guarded.tensor(2 * cut.count, torch.float32).view(-1, 2)
    affine.encode(x, codes, bounds, cut, False, 0)
    affine.decode(codes, bounds, decoded, cut)
    assert guarded.intact()
    assert (decoded - x).abs().max() <= (bounds[:, 1] - bounds[:, 0]).max() / 30 * 1.01 + rounding


@pytest.mark.parametrize("rows", [1, 127, 128, 129])
@pytest.mark.parametrize("channels", [1, 31, 33])
def test_channel_format(rows: int, channels: int) -> None:
    guarded, cut, x = Guarded(), Blocks(rows, GROUP, 2), torch.randn(rows, channels)
    kernel = load("channel", interpret=True)
    codes = guarded.tensor(cut.code_bytes * channels, torch.uint8)
    scales = guarded.tensor(cut.count * channels, torch.float32)
    decoded = guarded.tensor(rows * channels, torch.float32).view(rows, channels)
    kernel.encode(x, codes, scales, cut, FORM, 0)
    kernel.decode(codes, scales, decoded, cut, FORM)
    assert guarded.intact()
    assert (decoded - x).abs().max() <= scales.abs().max() / 2 * 1.01


@pytest.mark.parametrize("numel", [1, 8, 9, BLOCK - 1, BLOCK + 9])
def test_bitmask(numel: int) -> None:
    guarded, cut = Guarded(), Blocks(numel, BLOCK, 8)
    x = torch.where(torch.rand(numel) < 0.5, 3, 5).to(torch.int32)
    kernel = load("bitmask", interpret=True)
    bits = guarded.tensor(cut.code_bytes, torch.uint8)
    values = guarded.tensor(2 * cut.count, torch.int32).view(-1, 2)
    violations, decoded = torch.zeros(1, dtype=torch.int32), guarded.tensor(numel, torch.int32)
    kernel.encode(x, bits, values, violations, cut, None, False)
    kernel.decode(bits, values, decoded, cut, False)
    assert guarded.intact()
    assert torch.equal(decoded, x)
    assert violations.item() == 0


def test_outlier_block() -> None:
    for channels in (100, 128):
        guarded, rows = Guarded(), 37
        x, cut = torch.randn(rows, channels), Blocks(37 * channels, GROUP, 2)
        slots = torch.full((channels,), -1, dtype=torch.int16)
        slots[5], slots[99] = 0, 1
        kernel = load("outlier", interpret=True)
        codes, scales = guarded.tensor(cut.code_bytes, torch.uint8), guarded.tensor(cut.count, torch.float32)
        block = guarded.tensor(rows * 2, torch.bfloat16).view(rows, 2)
        decoded = guarded.tensor(x.numel(), torch.float32)
        kernel.encode(x.view(-1), codes, scales, slots, block, channels, cut, FORM, 0)
        kernel.decode(codes, scales, slots, block, decoded, channels, cut, FORM)
        assert guarded.intact()
        assert torch.equal(block, x[:, [5, 99]].bfloat16())
        assert torch.equal(decoded.view(rows, channels)[:, [5, 99]], x[:, [5, 99]].bfloat16().float())


def test_an_unaligned_run_is_copied_before_a_launch() -> None:
    aligned = load("launch", interpret=True).aligned
    x = torch.randn(64)
    assert aligned(x).data_ptr() == x.data_ptr()
    assert aligned(x[4:]).data_ptr() == x[4:].data_ptr()
    copy = aligned(x[1:])
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, x[1:])


@pytest.mark.parametrize("name", codecs.names())
def test_encode_and_decode_are_one_launch_each(name: str, monkeypatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[str] = []
    run = InterpretedFunction.run
    monkeypatch.setattr(
        InterpretedFunction,
        "run",
        lambda self, *args, **kwargs: launches.append(self.__name__) or run(self, *args, **kwargs),
    )
    codec = codecs.get(name, implementation="interpret")
    state = codecs.OutlierState.from_channels([3], 100, "cpu") if name.startswith("outlier") else None
    packed = codec.encode((torch.rand(300, 100) < 0.5) * 1.0, state)
    assert launches == ["encode_kernel"]
    codec.decode(packed)
    assert launches == ["encode_kernel", "decode_kernel"]
