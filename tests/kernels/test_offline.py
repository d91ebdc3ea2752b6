"""Every kernel compiles for every target, without a GPU and without spilling; `adacc kernels` says so."""

import re
import subprocess
import sys

import pytest

from megatron_adacc import cli
from megatron_adacc.kernels import load
from megatron_adacc.kernels.tool import TARGETS, parse_targets


@pytest.mark.parametrize("targets", [(70,), TARGETS], ids=["sm_70", "all"])
def test_every_kernel_compiles(targets, capsys, monkeypatch) -> None:
    """For the oldest and, marked slow, for every target."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.main(["kernels", "check", "--targets", ",".join(f"sm_{target}" for target in targets)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[2:-1]
    names = [variant.name for variant in load("catalog", interpret=False).variants()]
    assert [line[:38].rstrip() for line in rows] == names
    for line in rows:
        cells = re.findall(r"(\d+) / (\d+) / (\d+)", line[38:])
        assert len(cells) == len(targets)
        for registers, shared, spilled in cells:
            assert 8 <= int(registers) <= 168
            # The least that a program may have on any of the targets.
            assert int(shared) <= 48 * 1024
            assert int(spilled) == 0
    assert lines[-1] == f"{len(names)} kernels compiled for {len(targets)} targets, 0 with spilled registers"


def test_every_kernel_is_in_the_catalogue() -> None:
    from triton.runtime.jit import JITFunction

    kernels = set()
    for stem in ("affine", "bitmask", "channel", "group", "outlier", "statistics"):
        module = load(stem, interpret=False)
        kernels |= {value.fn for name, value in vars(module).items() if name.endswith("_kernel")}
        assert all(isinstance(value, JITFunction) for name, value in vars(module).items() if name.endswith("_kernel"))
    assert len(kernels) == 11
    assert {variant.kernel.fn for variant in load("catalog", interpret=False).variants()} == kernels


def test_catalogue_arguments_are_those_of_the_kernels() -> None:
    for variant in load("catalog", interpret=False).variants():
        arguments = variant.kernel.arg_names
        # Divisibility is told by position, so what is no constant comes first, in the kernel's order.
        assert list(variant.signature) == arguments[: len(variant.signature)]
        assert set(variant.full_signature) == set(arguments)


def test_both_kinds_of_kernels_live_side_by_side() -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    assert isinstance(load("group", interpret=True).encode_kernel, InterpretedFunction)
    assert isinstance(load("group", interpret=False).encode_kernel, JITFunction)


def test_importing_kernels_imports_no_triton() -> None:
    code = (
        "import sys; from megatron_adacc import codecs, kernels; from megatron_adacc.kernels import tool;"
        "codecs.get('group_int4');"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(("text", "targets"), [("sm_70", (70,)), ("sm_80, sm_100", (80, 100))])
def test_targets(text: str, targets: tuple[int, ...]) -> None:
    assert parse_targets(text) == targets


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["check", "--targets", "sm_60"], {}, "Target 'sm_60' is not known; name GPU architectures from sm_70 on"),
        (["check", "--targets", "V100"], {}, "Target 'V100' is not known"),
        (["check", "--targets", "sm_70"], {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
    ],
)
def test_mistakes(arguments, environment, sentence, capsys, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["kernels", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_bench_says_that_it_needs_a_gpu(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["kernels", "bench"]) == 2
    assert "needs a CUDA GPU, and torch sees none here; 'adacc kernels check' compiles" in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_on_a_gpu(capsys) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert cli.main(["kernels", "bench", "--megabytes", "64"]) == 0
    assert "bitmask" in capsys.readouterr().out
