"""What this machine has, as plain facts; `doctor` judges and shows them.

Nothing here raises because something is missing or broken: that is a fact like the others. Packages are
tried in child processes, so that one that hangs, or takes the interpreter down with it, is reported too.
"""

import concurrent.futures
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

IMPORT_TIMEOUT_S = 120.0

# Distribution -> the import that training does, and the module that knows its version. Importing the
# top package would not be enough: apex and Transformer Engine load their compiled parts, which break
# most often, further down.
PACKAGES: dict[str, tuple[str, str]] = {
    "megatron-core": ("megatron.training", "megatron.core"),
    "apex": ("apex.normalization.fused_layer_norm", "apex"),
    "transformer-engine": ("transformer_engine.pytorch", "transformer_engine"),
    "triton": ("triton.language", "triton"),
    "ortools": ("ortools.math_opt.python.mathopt", "ortools"),
    "tokenizers": ("tokenizers", "tokenizers"),
    "transformers": ("transformers", "transformers"),
}


class State(StrEnum):
    """Whether a package can be used."""

    ABSENT = "absent"
    BROKEN = "broken"
    WORKS = "works"


@dataclass(frozen=True)
class Package:
    """One package.

    `version` is what the installed metadata says, `imported_version` what the imported module says of
    itself, without a local part (Megatron adds the commit of whatever repository it is called in): they
    differ where another copy comes first on the path. `reason` says why the package is broken.
    """

    name: str
    state: State
    version: str | None = None
    imported_version: str | None = None
    location: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device that torch sees; `has_code` says whether this build of torch can run on it."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    has_code: bool


@dataclass(frozen=True)
class Torch:
    """The torch that is imported here.

    `cuda` is the CUDA version that it was built for (None: built without), `architectures` what its
    CUDA code was compiled for, `remark` what torch said when it was asked for the devices.
    """

    version: str
    cuda: str | None
    cuda_available: bool
    architectures: tuple[str, ...]
    backends: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    remark: str = ""


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler that torch.compile calls for the CPU: `path` is None if there is no such command."""

    name: str
    path: str | None
    python_headers: bool

    @property
    def works(self) -> bool:
        """Whether torch.compile can build for the CPU: what it builds includes Python.h."""
        return self.path is not None and self.python_headers


@dataclass(frozen=True)
class Unmet:
    """A requirement of megatron-adacc that this environment does not fulfil; `found` is None if absent."""

    name: str
    wanted: str
    found: str | None


@dataclass(frozen=True)
class Machine:
    """All facts.

    `setup_script` is None where there is no checkout (a wheel); `torch` is None if it cannot be imported,
    and `torch_package` then says why; `dataset_helper` is Megatron's compiled one.
    """

    adacc_version: str
    adacc_location: str
    setup_script: str | None
    python_version: str
    python_path: str
    system: str
    cpu_count: int
    memory_bytes: int
    nvidia_driver: str | None
    visible_devices: str | None
    torch: Torch | None
    torch_package: Package
    packages: Mapping[str, Package]
    unmet: tuple[Unmet, ...]
    dataset_helper: bool
    compiler: Compiler


def has_code_for(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether CUDA code built for `architectures` runs on a device of this compute capability.

    sm_XY is machine code: it runs on the same major version from minor Y on; with the suffix `a` on
    exactly X.Y only, with `f` within its family, taken here as sm_XY. compute_XY is PTX, which any device
    from X.Y on compiles (with `a`, only X.Y itself). Source: CUDA C++ programming guide, compute capability.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        kind, major, minor, suffix = match[1], int(match[2]), int(match[3]), match[4]
        built_for = (major, minor)
        if suffix == "a":
            runs = capability == built_for
        elif kind == "compute" and not suffix:
            runs = capability >= built_for
        else:
            runs = capability[0] == major and capability[1] >= minor
        if runs:
            return True
    return False


def inspect_machine() -> Machine:
    """Gather the facts. It takes seconds: torch is imported here and, beside it in a child, Megatron."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as executor:
        probes = {name: executor.submit(inspect_package, name, *modules) for name, modules in PACKAGES.items()}
        torch_package, torch_facts = _inspect_torch()
        packages = {name: probe.result() for name, probe in probes.items()}
    package_folder = Path(__file__).resolve().parent
    setup_script = package_folder.parent / "scripts" / "setup.sh"
    return Machine(
        adacc_version=_distribution_version("megatron-adacc") or "not installed",
        adacc_location=str(package_folder),
        setup_script=str(setup_script) if setup_script.is_file() else None,
        python_version=platform.python_version(),
        python_path=sys.executable,
        system=platform.platform(),
        cpu_count=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        nvidia_driver=nvidia_driver_version(Path("/proc/driver/nvidia/version")),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch=torch_facts,
        torch_package=torch_package,
        packages=packages,
        unmet=unmet_requirements(),
        dataset_helper=_has_dataset_helper(),
        compiler=find_compiler(),
    )


def find_compiler() -> Compiler:
    """The compiler that torch.compile would take (CXX, else g++, and no other), without importing torch."""
    name = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return Compiler(name, shutil.which(name), headers.is_file())


def inspect_package(name: str, module: str, version_module: str) -> Package:
    """Whether `module`, which the distribution `name` provides, is here and can be imported."""
    version = _distribution_version(name)
    locations = _locations(module.partition(".")[0])
    if not locations:
        if version is None:
            return Package(name, State.ABSENT)
        return Package(
            name, State.BROKEN, version, reason=f"it is installed, but there is no module {module} to import"
        )
    code = f"import sys, {module}; print(getattr(sys.modules[{version_module!r}], '__version__', ''))"
    # -P: the folder that the command is called in must not decide what is found.
    command = [sys.executable, "-W", "ignore", "-P", "-c", code]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        reason = f"import {module} did not end within {IMPORT_TIMEOUT_S:.0f} s"
        return Package(name, State.BROKEN, version, location=locations[0], reason=reason)
    if child.returncode == 0:
        imported_version = child.stdout.splitlines()[-1].partition("+")[0] or None
        return Package(name, State.WORKS, version, imported_version, locations[0])
    if child.returncode < 0:
        reason = f"import {module} was ended by signal {-child.returncode}"
    else:
        lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"import {module} ended with exit code {child.returncode}"
    return Package(name, State.BROKEN, version, location=locations[0], reason=reason)


def _locations(top_package: str) -> list[str]:
    """The folders (or the file) that `import top_package` would use; several for a namespace package."""
    spec = importlib.util.find_spec(top_package)
    if spec is None:
        return []
    return list(spec.submodule_search_locations or [spec.origin or top_package])


def _inspect_torch() -> tuple[Package, Torch | None]:
    version = _distribution_version("torch")
    if version is None and not _locations("torch"):
        return Package("torch", State.ABSENT), None
    try:
        torch: Any = importlib.import_module("torch")
        facts = _torch_facts(torch)
    except Exception as error:  # a broken installation can raise anything: OSError, AttributeError, ...
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Package("torch", State.BROKEN, version, reason=reason), None
    return Package("torch", State.WORKS, facts.version, location=str(Path(torch.__file__).parent)), facts


def _torch_facts(torch: Any) -> Torch:
    distributed = torch.distributed
    backends = tuple(
        name
        for name in ("gloo", "nccl")
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    )
    gpus: list[Gpu] = []
    architectures: tuple[str, ...] = ()
    remarks: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        try:
            if available:
                architectures = tuple(torch.cuda.get_arch_list())
                for index in range(torch.cuda.device_count()):
                    properties = torch.cuda.get_device_properties(index)
                    capability = (properties.major, properties.minor)
                    has_code = has_code_for(capability, architectures)
                    gpus.append(Gpu(index, properties.name, capability, properties.total_memory, has_code))
        except RuntimeError as error:  # CUDA errors, such as a device in exclusive use
            remarks.append(str(error))
    remarks.extend(str(warning.message) for warning in caught)
    remark = next((" ".join(text.split()) for text in remarks), "")
    return Torch(str(torch.__version__), torch.version.cuda, available, architectures, backends, tuple(gpus), remark)


def nvidia_driver_version(path: Path) -> str | None:
    """The version in the kernel driver's own file, or None where no NVIDIA driver is loaded."""
    try:
        text = path.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text)
    return match[1] if match else None


def unmet_requirements() -> tuple[Unmet, ...]:
    """The declared dependencies (not the extras) that are missing here or have another version."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return (Unmet("packaging", "", None),)
    try:
        texts = importlib.metadata.requires("megatron-adacc") or []
    except importlib.metadata.PackageNotFoundError:
        return (Unmet("megatron-adacc", "", None),)
    unmet = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _distribution_version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            unmet.append(Unmet(requirement.name, str(requirement.specifier), found))
    return tuple(unmet)


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_dataset_helper() -> bool:
    """Whether Megatron's compiled dataset helper is here, or the Makefile with which Megatron compiles it."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    for location in _locations("megatron"):
        datasets = Path(location) / "core" / "datasets"
        if (datasets / "Makefile").is_file():
            return True
        if any(path.name.endswith(suffixes) for path in datasets.glob("helpers_cpp*")):
            return True
    return False
