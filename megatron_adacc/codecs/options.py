"""The choices a codec is made with: which implementation runs, how codes are rounded, how scales are found."""

import enum
import functools
import logging
import os
import shutil

import torch

from megatron_adacc.errors import UserError

logger = logging.getLogger(__name__)


class Implementation(enum.Enum):
    """Which of the implementations of one format runs. All of them give the same bits."""

    AUTO = "auto"  # CUDA takes triton; the CPU takes compiled, or torch where nothing compiles
    TORCH = "torch"  # plain torch operations, any device: the reference that defines the right answer
    COMPILED = "compiled"  # the same functions through torch.compile, CPU only
    TRITON = "triton"  # the Triton kernels, CUDA only
    INTERPRET = "interpret"  # the Triton kernels run by Triton's interpreter, CPU only, very slow: for tests

    @property
    def is_kernel(self) -> bool:
        """Whether the Triton kernels do the work, on the GPU or interpreted."""
        return self in (Implementation.TRITON, Implementation.INTERPRET)

    def resolve(self, device: torch.device) -> "Implementation":
        """The implementation that will run for tensors on `device`: never AUTO.

        Raises:
            UserError: this implementation cannot run on `device`.
        """
        if self is Implementation.AUTO:
            if device.type == "cuda":
                return Implementation.TRITON
            disabled = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
            if device.type == "cpu" and cpp_compiler_found() and not disabled:
                return Implementation.COMPILED
            return Implementation.TORCH
        if self is Implementation.TRITON and device.type != "cuda":
            raise UserError(
                f"Implementation 'triton' needs a CUDA tensor, but the tensor is on '{device.type}'; "
                "use 'auto', or 'interpret' to run the same kernels on the CPU."
            )
        if self in (Implementation.COMPILED, Implementation.INTERPRET) and device.type != "cpu":
            raise UserError(
                f"Implementation '{self.value}' is for CPU tensors, but the tensor is on '{device.type}'; "
                "use 'auto' or 'triton'."
            )
        return self


class Rounding(enum.Enum):
    """How a quotient x / S becomes an integer code."""

    NEAREST = "nearest"  # to the nearest integer, ties to even
    STOCHASTIC = "stochastic"  # up with the probability of the fraction: unbiased, reproducible from a seed


class Scale(enum.Enum):
    """How the scale of a group follows from its elements."""

    PAPER = "paper"  # S = max|x| / 2**(bits-1); the largest positive element may be clipped by up to S
    SIGNED = "signed"  # the element of largest magnitude gets the lowest code, nothing is clipped


def choice[Choice: enum.Enum](kind: type[Choice], value: Choice | str, option: str) -> Choice:
    """`value` as a member of `kind`; a wrong name is a UserError that lists the right ones."""
    if isinstance(value, kind):
        return value
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(f"'{member.value}'" for member in kind)
        raise UserError(f"Codec option {option}={value!r} is not known; it is one of {names}.") from None


@functools.cache
def cpp_compiler_found() -> bool:
    """Whether torch.compile will find a C++ compiler; says once in the log what its absence costs.

    Cached: the answer cannot change for a process that has already compiled something.
    """
    named = os.environ.get("CXX")
    found = any(shutil.which(name) for name in ([named] if named else ["g++", "clang++", "c++"]))
    if not found:
        logger.warning(
            "No C++ compiler was found (%s), so CPU codecs run as plain torch operations, about 5 to 10 times "
            "slower and with more memory in between; install g++ or set CXX to have them compiled.",
            f"CXX={named} does not exist" if named else "looked for g++, clang++ and c++",
        )
    return found
