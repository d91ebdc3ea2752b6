"""Compiling kernels for a GPU that is not there, and reading what the compiler made of them."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .catalog import Variant

_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)")


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes.

    Attributes:
        variant: its name in the catalogue.
        target: compute capability times ten, 70 for sm_70.
        registers: a thread.
        shared_bytes: of shared memory, a program.
        spill_bytes: of stack and local memory a thread; these kernels use neither but for spilled registers.
    """

    variant: str
    target: int
    registers: int
    shared_bytes: int
    spill_bytes: int


def compile_for(variant: Variant, target: int) -> Usage:
    """Compile one variant for one target (70 for sm_70). Needs no GPU."""
    source = ASTSource(variant.kernel, variant.full_signature, constexprs=variant.constants, attrs=variant.attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=variant.options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(report)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage for {variant.name} on sm_{target}: {report!r}")
    numbers = {name: int(value) for name, value in found.groupdict().items()}
    shared = max(numbers["shared"], int(binary.metadata.shared))
    return Usage(variant.name, target, numbers["registers"], shared, numbers["stack"] + numbers["local"])
