"""`adacc doctor`: what this machine has, what training will use, and what is wrong with it.

`machine` gathers the facts, `diagnose` judges them (a pure function), the rest shows the result.
"""

import argparse
import dataclasses
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_adacc.machine import Gpu, Machine, Package, State, Torch, Unmet, inspect_machine
from megatron_adacc.outputs import check_folders, write

GIB = 2**30
# Transformer Engine's own minimum, and that of bf16 arithmetic.
AMPERE = (8, 0)
VOLTA = (7, 0)
# What the main job imports whatever its flags are.
NEEDED = ("torch", "megatron-core", "tokenizers", "transformers")
BUILT_FROM_SOURCE = ("apex", "transformer-engine")


class Severity(StrEnum):
    """An error stops the main job, pretrain_gpt.py; a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `part` names its row, `message` says what and the way out."""

    severity: Severity
    part: str
    message: str


@dataclass(frozen=True)
class Row:
    """One line of the table: what it is, what is here, what it will be used for. ``path``: where it is, which stands
    below the table, for a table would break it."""

    part: str
    here: str
    use: str
    path: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What will be used and what is wrong; `transformer_impl` is the value of Megatron's flag."""

    device: str
    backend: str
    transformer_impl: str
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]

    @property
    def main_job_can_run(self) -> bool:
        return all(problem.severity is not Severity.ERROR for problem in self.problems)


def diagnose(machine: Machine) -> Diagnosis:
    """Judge the facts: which device, backend and layers training will use here, and what is wrong."""
    on_cuda = machine.torch is not None and machine.torch.cuda_available
    gpus = machine.torch.gpus if machine.torch is not None else ()
    te = machine.packages["transformer-engine"]
    te_fits = on_cuda and all(gpu.capability >= AMPERE for gpu in gpus)
    transformer_impl = "transformer_engine" if te_fits and te.state is State.WORKS else "local"
    problems = (
        *_requirement_problems(machine),
        *_torch_problems(machine),
        *_gpu_problems(machine),
        *_package_problems(machine, on_cuda),
        *_compiler_problems(machine, on_cuda),
    )
    device, backend = ("cuda", "nccl") if on_cuda else ("cpu", "gloo")
    rows = _rows(machine, on_cuda, device, backend, transformer_impl)
    return Diagnosis(device, backend, transformer_impl, rows, problems)


def _install(machine: Machine, requirement: str) -> str:
    if machine.setup_script is not None:
        return f"run bash {machine.setup_script} --repair"
    return f"run {machine.python_path} -m pip install '{requirement}'"


def _requirement_problems(machine: Machine) -> list[Problem]:
    declared = {unmet.name for unmet in machine.unmet}
    absent = [
        Unmet(package.name, "", None)
        for package in (machine.torch_package, *machine.packages.values())
        if package.state is State.ABSENT and package.name in NEEDED and package.name not in declared
    ]
    return [_requirement_problem(machine, unmet) for unmet in (*machine.unmet, *absent)]


def _requirement_problem(machine: Machine, unmet: Unmet) -> Problem:
    # Only the planner needs OR-Tools; every fixed strategy trains without.
    severity = Severity.WARNING if unmet.name == "ortools" else Severity.ERROR
    if unmet.found is None:
        wrong = f"{unmet.name} is not installed"
    else:
        wrong = f"{unmet.name} is {unmet.found}, and megatron-adacc needs {unmet.wanted}"
    return Problem(severity, unmet.name, f"{wrong}; {_install(machine, unmet.name + unmet.wanted)}.")


def _torch_problems(machine: Machine) -> list[Problem]:
    if machine.torch_package.state is State.BROKEN:
        reason = machine.torch_package.reason
        message = f"torch cannot be used ({reason}); uninstall it and {_install(machine, 'torch>=2.14,<2.15')}."
        return [Problem(Severity.ERROR, "torch", message)]
    if machine.torch is None:
        return []  # absent: an unmet requirement
    if not machine.torch.cuda_available and "gloo" not in machine.torch.backends:
        message = (
            f"torch {machine.torch.version} has no gloo, with which ranks talk on a CPU; "
            "install the official build of torch 2.14."
        )
        return [Problem(Severity.ERROR, "torch", message)]
    if machine.torch.cuda_available and "nccl" not in machine.torch.backends:
        message = (
            f"torch {machine.torch.version} has no NCCL, with which GPUs talk; install the official build "
            "of torch 2.14, or pass --distributed-backend gloo."
        )
        return [Problem(Severity.ERROR, "torch", message)]
    return []


def _gpu_problems(machine: Machine) -> list[Problem]:
    torch = machine.torch
    if torch is None:
        return []
    if not torch.cuda_available:
        return _unseen_gpu_problems(machine, torch)
    problems = [_no_code_problem(gpu, torch) for gpu in torch.gpus if not gpu.has_code]
    if not torch.gpus:
        message = f"torch finds CUDA but cannot open a GPU ({torch.remark}); see what nvidia-smi says of it."
        problems.append(Problem(Severity.ERROR, "GPU", message))
    return problems


def _unseen_gpu_problems(machine: Machine, torch: Torch) -> list[Problem]:
    if machine.nvidia_driver is None:
        return []
    there = f"The NVIDIA driver {machine.nvidia_driver} is loaded, but"
    if torch.cuda is None:
        message = f"{there} torch {torch.version} is built without CUDA; install a CUDA build of torch 2.14."
    elif machine.visible_devices is not None and machine.visible_devices.strip() in ("", "-1"):
        message = f"{there} CUDA_VISIBLE_DEVICES={machine.visible_devices!r} hides every GPU; unset it to use them."
    else:
        said = f" ({torch.remark})" if torch.remark else ""
        message = (
            f"{there} torch sees no GPU{said}; give the container its GPUs, or install a driver for "
            f"CUDA {torch.cuda} or a torch 2.14 built for an older CUDA."
        )
    return [Problem(Severity.WARNING, "GPU", message)]


def _no_code_problem(gpu: Gpu, torch: Torch) -> Problem:
    if gpu.capability == VOLTA:
        remedy = (
            "install torch 2.14 built for CUDA 12.6, the last build that has sm_70 "
            "(ADACC_PIP_ARGS in scripts/setup.sh --help)"
        )
    else:
        remedy = f"install a build of torch 2.14 that has sm_{gpu.capability[0]}{gpu.capability[1]}"
    message = (
        f"GPU {gpu.index} ({gpu.name}, compute capability {_dotted(gpu.capability)}) cannot run torch "
        f"{torch.version}, whose CUDA {torch.cuda} code is for {', '.join(torch.architectures)} only; "
        f"{remedy}, hide it with CUDA_VISIBLE_DEVICES, or train with --adacc-device cpu."
    )
    return Problem(Severity.ERROR, f"GPU {gpu.index}", message)


def _package_problems(machine: Machine, on_cuda: bool) -> list[Problem]:
    problems = []
    unmet = {requirement.name for requirement in machine.unmet}
    for name, package in machine.packages.items():
        if package.state is not State.BROKEN or name in unmet:
            continue
        if name == "megatron-core" and machine.torch is None:
            continue  # it only repeats what is wrong with torch
        if name in BUILT_FROM_SOURCE:
            remedy = "build it again for this torch and CUDA, or uninstall it, for training does without"
        else:
            remedy = f"uninstall it and {_install(machine, f'{name}=={package.version}')}"
        severity = Severity.ERROR if name in NEEDED else Severity.WARNING
        problems.append(Problem(severity, name, f"{name} cannot be imported ({package.reason}); {remedy}."))
    megatron = machine.packages["megatron-core"]
    if megatron.imported_version and megatron.version and megatron.imported_version != megatron.version:
        message = (
            f"megatron.core {megatron.imported_version} in {megatron.location} comes before the installed "
            f"megatron-core {megatron.version}; take it off PYTHONPATH."
        )
        problems.append(Problem(Severity.ERROR, "megatron-core", message))
    if megatron.state is State.WORKS and not machine.dataset_helper:
        message = (
            "megatron-core has no compiled dataset helper (core/datasets/helpers_cpp) and cannot read data; "
            f"uninstall it and {_install(machine, f'megatron-core=={megatron.version}')}."
        )
        problems.append(Problem(Severity.ERROR, "megatron-core", message))
    if on_cuda and machine.packages["triton"].state is State.ABSENT:
        message = f"Triton is not installed, so nothing is compiled for the GPU; {_install(machine, 'triton')}."
        problems.append(Problem(Severity.WARNING, "triton", message))
    return problems


def _compiler_problems(machine: Machine, on_cuda: bool) -> list[Problem]:
    python = "python" + ".".join(machine.python_version.split(".")[:2])
    needs = "torch.compile, and so Megatron's fused functions," + (" and Triton" if on_cuda else "")
    if machine.compiler.path is None:
        message = (
            f"There is no C++ compiler ({machine.compiler.name}), which {needs} need; on Debian and Ubuntu, "
            "apt-get install g++, or name one with CXX."
        )
        return [Problem(Severity.WARNING, "C++ compiler", message)]
    if not machine.compiler.python_headers:
        message = (
            f"The headers of this Python (Python.h) are missing, which {needs} need; on Debian and Ubuntu, "
            f"apt-get install {python}-dev."
        )
        return [Problem(Severity.WARNING, "C++ compiler", message)]
    return []


def _rows(machine: Machine, on_cuda: bool, device: str, backend: str, transformer_impl: str) -> tuple[Row, ...]:
    torch = machine.torch
    packages = machine.packages
    cores = f"{machine.cpu_count} CPU cores, {machine.memory_bytes / GIB:.1f} GiB, {machine.system}"
    if torch is None:
        torch_here, torch_use = _describe(machine.torch_package), "nothing runs without it"
    else:
        build = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
        torch_here, torch_use = f"{torch.version}, {build}", f"device {device}, backend {backend}"
    layers = f"layer implementation {transformer_impl}"
    if on_cuda and transformer_impl == "local":
        layers += " (pass --transformer-impl local)"
    compiler_path = machine.compiler.path or ""
    compiler = machine.compiler.name if compiler_path else "none"
    if compiler_path and not machine.compiler.python_headers:
        compiler += ", without Python.h"
    return (
        Row("megatron-adacc", machine.adacc_version, "this command", machine.adacc_location),
        Row("Python", machine.python_version, "everything here", machine.python_path),
        Row("machine", cores, "training" if not on_cuda else "loading and saving"),
        Row("torch", torch_here, torch_use),
        *_gpu_rows(machine),
        Row("megatron-core", _describe(packages["megatron-core"]), f"the training loop; {layers}"),
        Row(
            "transformer-engine",
            _describe(packages["transformer-engine"]),
            "layers" if transformer_impl == "transformer_engine" else "not used",
        ),
        Row("apex", _describe(packages["apex"]), _apex_use(packages["apex"], on_cuda)),
        Row("triton", _describe(packages["triton"]), "GPU kernels" if on_cuda else "not used without a GPU"),
        Row("C++ compiler", compiler, "torch.compile" if machine.compiler.works else "not used", compiler_path),
        Row("ortools", _describe(packages["ortools"]), "the planner"),
        Row("tokenizers", _describe(packages["tokenizers"]), "prepare-data"),
        Row("transformers", _describe(packages["transformers"]), "Megatron's HuggingFaceTokenizer"),
    )


def _gpu_rows(machine: Machine) -> list[Row]:
    gpus = machine.torch.gpus if machine.torch is not None else ()
    if not gpus:
        return [Row("GPU", "none that torch sees", "not used")]
    return [
        Row(
            f"GPU {gpu.index}",
            f"{gpu.name}, compute capability {_dotted(gpu.capability)}, {gpu.memory_bytes / GIB:.1f} GiB",
            _gpu_use(gpu),
        )
        for gpu in gpus
    ]


def _gpu_use(gpu: Gpu) -> str:
    if not gpu.has_code:
        return "not usable: this torch has no code for it"
    return "training in bf16 or fp16" if gpu.capability >= AMPERE else "training in fp16 (it has no bf16)"


def _apex_use(apex: Package, on_cuda: bool) -> str:
    return "fused layer norm" if on_cuda and apex.state is State.WORKS else "not used: torch's LayerNorm"


def _describe(package: Package) -> str:
    version = package.imported_version or package.version or "unknown version"
    if package.state is State.ABSENT:
        return "not installed"
    return version if package.state is State.WORKS else f"{version}, broken"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def as_json(machine: Machine, diagnosis: Diagnosis) -> str:
    """The facts and the judgement as one JSON object: ok, will_use, problems, machine."""
    content = {
        "ok": diagnosis.main_job_can_run,
        "will_use": {
            "device": diagnosis.device,
            "backend": diagnosis.backend,
            "transformer_impl": diagnosis.transformer_impl,
        },
        "problems": [dataclasses.asdict(problem) for problem in diagnosis.problems],
        "machine": dataclasses.asdict(machine),
    }
    return json.dumps(content, indent=2) + "\n"


def _show(diagnosis: Diagnosis) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except Exception:
        # What finds out that something is missing or broken must work when that is what draws its table.
        for row in diagnosis.rows:
            sys.stdout.write(f"{row.part}: {row.here}; {row.use}\n")
        for line in (*_places(diagnosis), *_conclusion(diagnosis)):
            sys.stdout.write(line + "\n")
        return

    colours = {Severity.ERROR: "red", Severity.WARNING: "yellow"}
    # "error" sorts before "warning": a row shows the worst of its problems.
    worst = {problem.part: problem.severity for problem in sorted(diagnosis.problems, key=lambda p: p.severity)[::-1]}
    table = Table("part", "here", "used for", *(["problem"] if worst else []), title="adacc doctor")
    for row in diagnosis.rows:
        mark = worst.get(row.part)
        problem = [Text(mark.value, colours[mark]) if mark else Text()] if worst else []
        table.add_row(Text(row.part), Text(row.here, overflow="fold"), Text(row.use), *problem)
    console = Console()
    console.print(table)
    for line in (*_places(diagnosis), *_conclusion(diagnosis)):
        console.print(Text(line), soft_wrap=True)


def _places(diagnosis: Diagnosis) -> list[str]:
    return [f"{row.part}: {row.path}" for row in diagnosis.rows if row.path]


def _conclusion(diagnosis: Diagnosis) -> list[str]:
    lines = [f"{problem.severity.value}: {problem.message}" for problem in diagnosis.problems]
    if diagnosis.main_job_can_run:
        lines.append(f"pretrain_gpt.py can run here, on {diagnosis.device} with {diagnosis.backend}.")
    else:
        lines.append("pretrain_gpt.py cannot run here until the errors above are mended.")
    return lines


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `adacc doctor` to `parser`."""
    parser.description = (
        "Says what this machine has for training, what will be used and what is wrong. "
        "The exit code is 1 if pretrain_gpt.py cannot run here."
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the same as JSON to FILE; with - to the standard output, in place of the table",
    )


def run(args: argparse.Namespace) -> int:
    """Look, judge and report; 0 if pretrain_gpt.py can run here, else 1."""
    check_folders(or_printed=args.json)
    with _waiting():
        machine = inspect_machine()
    diagnosis = diagnose(machine)
    if args.json == "-":
        sys.stdout.write(as_json(machine, diagnosis))
    else:
        _show(diagnosis)
        if args.json is not None:
            write(args.json, as_json(machine, diagnosis))
    return 0 if diagnosis.main_job_can_run else 1


def _waiting() -> AbstractContextManager[Any]:
    """Inside, a terminal says on stderr what is being done."""
    words = "importing what training imports, which takes some seconds"
    if not sys.stderr.isatty():
        return nullcontext()
    try:
        from rich.console import Console
    except Exception:  # as in _show
        sys.stderr.write(f"adacc doctor: {words}\n")
        return nullcontext()
    return Console(stderr=True).status(words)
