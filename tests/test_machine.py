"""The facts that `adacc doctor` judges."""

import pytest

from megatron_adacc import machine
from megatron_adacc.machine import Compiler, State

CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CUDA_12_6 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), CUDA_13, False),
        ((7, 0), CUDA_12_6, True),
        ((7, 5), CUDA_13, True),
        ((8, 6), ("sm_80",), True),  # machine code runs on a later minor version,
        ((8, 0), ("sm_86",), False),  # not on an earlier one,
        ((9, 0), ("sm_80", "sm_86"), False),  # nor on another major version;
        ((9, 0), ("sm_80", "compute_80"), True),  # PTX runs on all later ones
        ((7, 0), ("compute_80",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100",), True),
        ((10, 3), ("sm_100a",), False),
        ((10, 3), ("sm_100f",), True),
        ((12, 0), ("sm_100f",), False),
        ((12, 0), ("compute_100a",), False),
        ((12, 0), ("gfx942",), False),
        ((12, 0), (), False),
    ],
)
def test_has_code_for(capability, architectures, runs):
    assert machine.has_code_for(capability, architectures) is runs


def test_driver_version_is_read_from_the_kernels_file(tmp_path):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    assert machine.nvidia_driver_version(version) == "550.54.15"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\n")
    assert machine.nvidia_driver_version(version) == "580.95.05"
    assert machine.nvidia_driver_version(tmp_path / "absent") is None


def test_the_compiler_is_the_one_that_torch_compile_takes(tmp_path, monkeypatch):
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine.find_compiler().path is None  # torch.compile does not look for clang++ by itself
    monkeypatch.setenv("CXX", "clang++")
    assert (machine.find_compiler().name, machine.find_compiler().path) == ("clang++", str(compiler))


def test_a_compiler_without_the_headers_of_python_does_not_work():
    assert Compiler("g++", "/usr/bin/g++", True).works
    assert not Compiler("g++", "/usr/bin/g++", False).works
    assert not Compiler("g++", None, True).works


def test_a_package_that_kills_the_interpreter_is_reported(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os; os.kill(os.getpid(), 11)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    package = machine.inspect_package("deadly", "deadly", "deadly")
    assert (package.state, package.reason) == (State.BROKEN, "import deadly was ended by signal 11")


def test_a_package_that_hangs_is_reported(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text("import time; time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine, "IMPORT_TIMEOUT_S", 1.0)
    package = machine.inspect_package("endless", "endless", "endless")
    assert (package.state, package.reason) == (State.BROKEN, "import endless did not end within 1 s")


def test_an_absent_package_is_not_an_error():
    assert machine.inspect_package("no-such-thing", "no_such_thing", "no_such_thing").state is State.ABSENT


def test_a_requirement_that_is_met_is_not_reported():
    assert machine.unmet_requirements() == ()


@pytest.mark.parametrize(
    ("version", "unmet"),
    [("2.14.1", ()), ("2.14.1+cu126", ()), ("2.15.0", ("2.15.0",)), ("2.13.1", ("2.13.1",)), (None, (None,))],
)
def test_a_requirement_is_met_by_the_versions_that_it_names(version, unmet, monkeypatch):
    real = machine.importlib.metadata.version

    def pretend(name):
        if name != "torch":
            return real(name)
        if version is None:
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(machine.importlib.metadata, "version", pretend)
    found = machine.unmet_requirements()
    assert tuple((requirement.name, requirement.found) for requirement in found) == tuple(
        ("torch", wrong) for wrong in unmet
    )
