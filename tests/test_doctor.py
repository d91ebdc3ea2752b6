"""`adacc doctor`: its judgement on made-up machines, and the command on this and on crippled ones."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys

import pytest

from megatron_adacc import doctor, machine
from megatron_adacc.machine import Compiler, Gpu, Package, State, Torch, Unmet

CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CUDA_12_6 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
GIB = 2**30

CPU_MACHINE = machine.Machine(
    adacc_version="0.1.0",
    adacc_location="/site/megatron_adacc",
    setup_script=None,
    python_version="3.12.1",
    python_path="/venv/bin/python",
    system="Linux",
    cpu_count=2,
    memory_bytes=16 * GIB,
    nvidia_driver=None,
    visible_devices=None,
    torch=Torch("2.14.1+cu130", "13.0", False, (), ("gloo", "nccl"), ()),
    torch_package=Package("torch", State.WORKS, "2.14.1"),
    packages={
        "megatron-core": Package("megatron-core", State.WORKS, "0.19.2", "0.19.2", "/site/megatron"),
        "apex": Package("apex", State.ABSENT),
        "transformer-engine": Package("transformer-engine", State.ABSENT),
        "triton": Package("triton", State.WORKS, "3.8.0"),
        "ortools": Package("ortools", State.WORKS, "9.15"),
        "tokenizers": Package("tokenizers", State.WORKS, "0.23.3"),
        "transformers": Package("transformers", State.WORKS, "5.24.0"),
    },
    unmet=(),
    dataset_helper=True,
    compiler=Compiler("g++", "/usr/bin/g++", True),
)


def change(**fields) -> machine.Machine:
    return dataclasses.replace(CPU_MACHINE, **fields)


def change_torch(**fields) -> machine.Machine:
    return change(torch=dataclasses.replace(CPU_MACHINE.torch, **fields))


def change_package(name: str, state: State, **fields) -> machine.Machine:
    fields.setdefault("version", "1.0" if state is State.BROKEN else None)
    return change(packages=CPU_MACHINE.packages | {name: Package(name, state, **fields)})


def gpu_machine(name: str, capability: tuple[int, int], cuda: str, architectures: tuple[str, ...], **fields):
    has_code = machine.has_code_for(capability, architectures)
    gpu = Gpu(0, name, capability, 32 * GIB, has_code)
    torch = Torch(f"2.14.1+cu{cuda.replace('.', '')}", cuda, True, architectures, ("gloo", "nccl"), (gpu,))
    return change(torch=torch, nvidia_driver="580.95", **fields)


V100_CUDA_13 = gpu_machine("Tesla V100-SXM2-32GB", (7, 0), "13.0", CUDA_13)
V100_CUDA_12_6 = gpu_machine("Tesla V100-SXM2-32GB", (7, 0), "12.6", CUDA_12_6)
H200 = gpu_machine("NVIDIA H200", (9, 0), "13.0", CUDA_13)


def test_a_machine_without_gpu_trains_on_the_cpu():
    diagnosis = doctor.diagnose(CPU_MACHINE)
    assert diagnosis.problems == ()
    assert diagnosis.main_job_can_run
    assert (diagnosis.device, diagnosis.backend, diagnosis.transformer_impl) == ("cpu", "gloo", "local")


def test_a_v100_with_a_cuda_13_build_is_told_which_build_it_needs():
    diagnosis = doctor.diagnose(V100_CUDA_13)
    assert not diagnosis.main_job_can_run
    assert [(problem.severity, problem.part) for problem in diagnosis.problems] == [("error", "GPU 0")]
    assert diagnosis.problems[0].message == (
        "GPU 0 (Tesla V100-SXM2-32GB, compute capability 7.0) cannot run torch 2.14.1+cu130, whose CUDA 13.0 "
        "code is for sm_75, sm_80, sm_86, sm_90, sm_100, sm_120 only; install torch 2.14 built for CUDA 12.6, "
        "the last build that has sm_70 (ADACC_PIP_ARGS in scripts/setup.sh --help), hide it with "
        "CUDA_VISIBLE_DEVICES, or train with --adacc-device cpu."
    )


def test_a_v100_with_a_cuda_12_6_build_trains_in_fp16_with_local_layers():
    diagnosis = doctor.diagnose(V100_CUDA_12_6)
    assert diagnosis.problems == ()
    assert (diagnosis.device, diagnosis.backend, diagnosis.transformer_impl) == ("cuda", "nccl", "local")
    assert [row.use for row in diagnosis.rows if row.part == "GPU 0"] == ["training in fp16 (it has no bf16)"]


def test_transformer_engine_is_used_from_compute_capability_8_0_on():
    te = {"transformer-engine": Package("transformer-engine", State.WORKS, "2.9")}
    packages = CPU_MACHINE.packages | te
    for facts, transformer_impl in (
        (H200, "transformer_engine"),
        (V100_CUDA_12_6, "local"),
        (CPU_MACHINE, "local"),
    ):
        diagnosis = doctor.diagnose(dataclasses.replace(facts, packages=packages))
        assert diagnosis.transformer_impl == transformer_impl


@pytest.mark.parametrize(
    ("facts", "severity", "sentence"),
    [
        (
            change(torch=None, torch_package=Package("torch", State.BROKEN, "2.14.1", reason="OSError: no libc")),
            "error",
            "torch cannot be used (OSError: no libc); uninstall it and run /venv/bin/python -m pip install "
            "'torch>=2.14,<2.15'.",
        ),
        (
            change(torch=None, torch_package=Package("torch", State.ABSENT)),
            "error",
            "torch is not installed; run /venv/bin/python -m pip install 'torch'.",
        ),
        (
            change(unmet=(Unmet("torch", ">=2.14,<2.15", "2.9.0"),), setup_script="/clone/scripts/setup.sh"),
            "error",
            "torch is 2.9.0, and megatron-adacc needs >=2.14,<2.15; run bash /clone/scripts/setup.sh --repair.",
        ),
        (
            change(unmet=(Unmet("ortools", ">=9.15", None),)),
            "warning",
            "ortools is not installed; run /venv/bin/python -m pip install 'ortools>=9.15'.",
        ),
        (
            change_torch(backends=()),
            "error",
            "torch 2.14.1+cu130 has no gloo, with which ranks talk on a CPU; install the official build of torch 2.14.",
        ),
        (
            dataclasses.replace(H200, torch=dataclasses.replace(H200.torch, backends=("gloo",))),
            "error",
            "torch 2.14.1+cu130 has no NCCL, with which GPUs talk; install the official build of torch 2.14, or "
            "pass --distributed-backend gloo.",
        ),
        (
            dataclasses.replace(H200, torch=dataclasses.replace(H200.torch, gpus=(), remark="CUDA error: busy")),
            "error",
            "torch finds CUDA but cannot open a GPU (CUDA error: busy); see what nvidia-smi says of it.",
        ),
        (
            gpu_machine("Tesla P100", (6, 0), "13.0", CUDA_13),
            "error",
            "GPU 0 (Tesla P100, compute capability 6.0) cannot run torch 2.14.1+cu130, whose CUDA 13.0 code is for "
            "sm_75, sm_80, sm_86, sm_90, sm_100, sm_120 only; install a build of torch 2.14 that has sm_60, hide it "
            "with CUDA_VISIBLE_DEVICES, or train with --adacc-device cpu.",
        ),
        (
            dataclasses.replace(change_torch(version="2.14.1+cpu", cuda=None), nvidia_driver="580.95"),
            "warning",
            "The NVIDIA driver 580.95 is loaded, but torch 2.14.1+cpu is built without CUDA; install a CUDA build "
            "of torch 2.14.",
        ),
        (
            change(nvidia_driver="580.95", visible_devices=""),
            "warning",
            "The NVIDIA driver 580.95 is loaded, but CUDA_VISIBLE_DEVICES='' hides every GPU; unset it to use them.",
        ),
        (
            dataclasses.replace(change_torch(remark="driver too old"), nvidia_driver="470.1"),
            "warning",
            "The NVIDIA driver 470.1 is loaded, but torch sees no GPU (driver too old); give the container its "
            "GPUs, or install a driver for CUDA 13.0 or a torch 2.14 built for an older CUDA.",
        ),
        (
            change_package("megatron-core", State.BROKEN, version="0.19.2", reason="ImportError: x"),
            "error",
            "megatron-core cannot be imported (ImportError: x); uninstall it and run /venv/bin/python -m pip install "
            "'megatron-core==0.19.2'.",
        ),
        (
            change_package("transformers", State.ABSENT),
            "error",
            "transformers is not installed; run /venv/bin/python -m pip install 'transformers'.",
        ),
        (
            change_package("ortools", State.BROKEN, reason="ImportError: y"),
            "warning",
            "ortools cannot be imported (ImportError: y); uninstall it and run /venv/bin/python -m pip install "
            "'ortools==1.0'.",
        ),
        (
            change_package("apex", State.BROKEN, reason="ImportError: undefined symbol"),
            "warning",
            "apex cannot be imported (ImportError: undefined symbol); build it again for this torch and CUDA, or "
            "uninstall it, for training does without.",
        ),
        (
            change_package(
                "megatron-core",
                State.WORKS,
                version="0.19.2",
                imported_version="0.15.0",
                location="/src/Megatron-LM/megatron",
            ),
            "error",
            "megatron.core 0.15.0 in /src/Megatron-LM/megatron comes before the installed megatron-core 0.19.2; "
            "take it off PYTHONPATH.",
        ),
        (
            change(dataset_helper=False),
            "error",
            "megatron-core has no compiled dataset helper (core/datasets/helpers_cpp) and cannot read data; "
            "uninstall it and run /venv/bin/python -m pip install 'megatron-core==0.19.2'.",
        ),
        (
            dataclasses.replace(H200, packages=CPU_MACHINE.packages | {"triton": Package("triton", State.ABSENT)}),
            "warning",
            "Triton is not installed, so nothing is compiled for the GPU; run /venv/bin/python -m pip install "
            "'triton'.",
        ),
        (
            change(compiler=Compiler("c++-99", None, True)),
            "warning",
            "There is no C++ compiler (c++-99), which torch.compile, and so Megatron's fused functions, need; on "
            "Debian and Ubuntu, apt-get install g++, or name one with CXX.",
        ),
        (
            dataclasses.replace(H200, compiler=Compiler("g++", "/usr/bin/g++", False)),
            "warning",
            "The headers of this Python (Python.h) are missing, which torch.compile, and so Megatron's fused "
            "functions, and Triton need; on Debian and Ubuntu, apt-get install python3.12-dev.",
        ),
    ],
)
def test_each_problem_is_one_sentence_with_a_way_out(facts, severity, sentence):
    diagnosis = doctor.diagnose(facts)
    assert [(problem.severity, problem.message) for problem in diagnosis.problems] == [(severity, sentence)]
    assert diagnosis.main_job_can_run is (severity == "warning")


def test_a_broken_torch_is_not_reported_a_second_time_as_a_broken_megatron():
    facts = change_package("megatron-core", State.BROKEN, reason="ImportError: torch")
    broken = Package("torch", State.BROKEN, "2.14.1", reason="ImportError: torch")
    diagnosis = doctor.diagnose(dataclasses.replace(facts, torch=None, torch_package=broken))
    assert [problem.part for problem in diagnosis.problems] == ["torch"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run `adacc doctor --json FILE` once as it is: (exit code, printed text, parsed JSON)."""
    path = tmp_path_factory.mktemp("doctor") / "report.json"
    result = run_doctor("--json", str(path))
    return result.returncode, result.stdout, json.loads(path.read_text())


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_adacc.cli", "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"} | environment
    )


def test_the_environment_of_the_tests_is_healthy(reports):
    code, text, report = reports
    errors = [problem for problem in report["problems"] if problem["severity"] == "error"]
    assert (code, report["ok"], errors) == (0, True, [])
    assert report["machine"]["packages"]["megatron-core"]["imported_version"] == "0.19.2"
    device, backend = report["will_use"]["device"], report["will_use"]["backend"]
    assert (device, backend) in (("cpu", "gloo"), ("cuda", "nccl"))
    assert f"pretrain_gpt.py can run here, on {device} with {backend}." in text


def test_the_table_has_a_row_for_every_part(reports):
    _, text, report = reports
    for part in ("Python", "torch", "GPU", "C++ compiler", *report["machine"]["packages"]):
        assert part in text
    assert report["machine"]["python_version"] in text
    assert report["machine"]["torch"]["version"] in text


BROKEN = "raise OSError('libmissing.so: cannot open shared object file')\n"


def write_modules(folder, *names: str) -> str:
    """Packages that break when they are imported, in a folder for PYTHONPATH."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(BROKEN)
    return str(folder)


def test_a_broken_torch_is_exit_code_1_without_a_traceback(tmp_path):
    result = run_doctor("--json", "-", PYTHONPATH=write_modules(tmp_path, "torch"))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert report["machine"]["torch"] is None
    messages = [problem["message"] for problem in report["problems"] if problem["part"] == "torch"]
    assert len(messages) == 1
    assert messages[0].startswith("torch cannot be used (OSError: libmissing.so: cannot open shared object file); ")


def test_every_other_package_broken_is_reported_by_name(tmp_path):
    modules = {
        "megatron": "megatron-core",
        "apex": "apex",
        "transformer_engine": "transformer-engine",
        "triton": "triton",
        "ortools": "ortools",
        "tokenizers": "tokenizers",
        "transformers": "transformers",
    }
    path = tmp_path / "report.json"
    folder = write_modules(tmp_path, *modules, "rich")
    result = run_doctor("--json", str(path), PYTHONPATH=folder)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    severities = {problem["part"]: problem["severity"] for problem in json.loads(path.read_text())["problems"]}
    for name in modules.values():
        needed = name in ("megatron-core", "tokenizers", "transformers")
        assert severities[name] == ("error" if needed else "warning")
        # rich is broken too, so these are plain lines.
        assert f": {name} cannot be imported (OSError: libmissing.so: " in result.stdout


def test_the_report_is_readable_when_the_table_library_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(doctor, "inspect_machine", lambda: V100_CUDA_13)
    assert doctor.run(argparse.Namespace(json=None)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "torch: 2.14.1+cu130, built for CUDA 13.0; device cuda, backend nccl" in lines
    assert lines[-2].startswith("error: GPU 0 (Tesla V100-SXM2-32GB, compute capability 7.0) cannot run")
    assert lines[-1] == "pretrain_gpt.py cannot run here until the errors above are mended."


def test_json_into_a_missing_folder_is_refused_before_anything_is_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "inspect_machine", lambda: pytest.fail("it looked at the machine"))
    from megatron_adacc import cli

    path = tmp_path / "missing" / "report.json"
    assert cli.main(["doctor", "--json", str(path)]) == 2
    assert capsys.readouterr().err == (f"adacc doctor: error: {path} cannot be written: its folder does not exist.\n")


def test_the_table_breaks_no_path_and_has_a_heading_over_each_column(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    far = "/home/somebody/" + "a-long-name/" * 8 + "bin/python"
    facts = dataclasses.replace(V100_CUDA_13, python_path=far)
    monkeypatch.setattr(doctor, "inspect_machine", lambda: facts)
    assert doctor.run(argparse.Namespace(json=None)) == 1
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert f"Python: {far}" in lines
    assert [cell.strip() for cell in lines[2].strip("┃").split("┃")] == ["part", "here", "used for", "problem"]
    monkeypatch.setattr(doctor, "inspect_machine", lambda: CPU_MACHINE)
    assert doctor.run(argparse.Namespace(json=None)) == 0
    assert "problem" not in capsys.readouterr().out
