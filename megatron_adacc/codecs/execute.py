"""Running a format's block functions over a run: as plain torch, or compiled for the CPU.

A block function works on blocks of one length and writes into tensors given to it. It is called twice: for the
full blocks, whose number is dynamic so that one compilation serves every size, and for the tail, where the
plain function is fast enough.

Inductor's C++ flags keep the reference's bits: multiplication and addition are not contracted into one
rounding, division is IEEE division, nothing is reassociated.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_adacc.codecs.blocks import Blocks
from megatron_adacc.codecs.options import Implementation
from megatron_adacc.huge_pages import advise

# torch.compile makes a separate version for sizes 0 and 1; such runs are left to the plain functions.
LEAST_BLOCKS = 2

# Parallel loops whatever the first size was (a serial loop made for a small tensor would serve large ones too),
# and no tensors in between that Inductor would make for expressions it finds long.
_INDUCTOR: dict[str, str | int | bool | Callable[..., object]] = {
    "cpp.dynamic_threads": True,
    "realize_opcount_threshold": 10_000,
    "realize_reads_threshold": 10_000,
    "realize_acc_reads_threshold": 10_000,
}

BlockFunction = partial[tuple[Tensor, ...]]


@dataclass(frozen=True)
class EncodeOutputs:
    """Where encoding writes, and what it reads besides the run.

    Attributes:
        codes: uint8 [code bytes].
        by_block: tensors whose first dimension counts blocks (scales, values).
        also: other runs, cut like the run itself.
        shared: what every call gets whole.
        tail_shared: what the tail gets in place of `shared`, if that is something else.
    """

    codes: Tensor
    by_block: tuple[Tensor, ...]
    also: tuple[Tensor, ...] = ()
    shared: tuple[Tensor | None, ...] = ()
    tail_shared: tuple[Tensor | None, ...] | None = None


def encode_run(
    function: BlockFunction,
    implementation: Implementation,
    cut: Blocks,
    run: Tensor,
    outputs: EncodeOutputs,
    *,
    repeat: bool = False,
) -> None:
    """Call function(x [blocks, per, part], codes [blocks, part], *by_block, *also, *shared) for all of the run.

    `repeat`: how the tail is filled up, see Blocks.tail_of.
    """
    if cut.full:
        tensors = (
            cut.full_of(run),
            cut.full_codes(outputs.codes),
            *(tensor[: cut.full] for tensor in outputs.by_block),
            *(cut.full_of(other) for other in outputs.also),
        )
        call(function, implementation, tensors, outputs.shared)
    if cut.tail:
        function(
            cut.tail_of(run, repeat=repeat),
            cut.tail_codes(outputs.codes),
            *(tensor[cut.full :] for tensor in outputs.by_block),
            *(cut.tail_of(other, repeat=repeat) for other in outputs.also),
            *(outputs.shared if outputs.tail_shared is None else outputs.tail_shared),
        )


def empty_run(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory [numel] for what is decoded; on the CPU in huge pages where it is large."""
    run = torch.empty(numel, dtype=dtype, device=device)
    if device.type == "cpu" and type(run) is Tensor:  # a fake tensor has no address
        advise(run.data_ptr(), run.nbytes)
    return run


def decode_run(
    function: BlockFunction,
    implementation: Implementation,
    cut: Blocks,
    codes: Tensor,
    by_block: tuple[Tensor, ...],
    run: Tensor,
) -> None:
    """Call function(codes [blocks, part], *by_block, x [blocks, per, part]) to fill all of the run."""
    if cut.full:
        by_full_block = [tensor[: cut.full] for tensor in by_block]
        call(function, implementation, (cut.full_codes(codes), *by_full_block, cut.full_of(run)))
    if cut.tail:
        tail = torch.empty(cut.tail_shape, dtype=run.dtype, device=run.device)
        function(cut.tail_codes(codes), *(tensor[cut.full :] for tensor in by_block), tail)
        cut.write_tail(run, tail)


def call(
    function: BlockFunction,
    implementation: Implementation,
    by_block: tuple[Tensor, ...],
    shared: tuple[Tensor | None, ...] = (),
) -> None:
    """Call function(*by_block, *shared) for full blocks, compiled if `implementation` says so.

    The first dimension of `by_block`, the number of blocks, is dynamic; all other sizes are fixed.
    """
    blocks = by_block[0].shape[0]
    if implementation is not Implementation.COMPILED or blocks < LEAST_BLOCKS:
        function(*by_block, *shared)
        return
    kinds = tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in by_block)
    for tensor in by_block:
        # Blocks without content (the values of a bool mask) have no first dimension to speak of.
        if tensor.shape[0] == blocks:
            torch._dynamo.mark_dynamic(tensor, 0)
    shared_kinds = tuple(tensor is not None for tensor in shared)
    # Compiled code is tied to the autocast state; it has no operation that autocast would change.
    with torch.autocast("cpu", enabled=False, dtype=torch.bfloat16):
        compiled(function.func, (kinds, shared_kinds), **function.keywords)(*by_block, *shared)


@functools.cache
def compiled(
    function: Callable[..., tuple[Tensor, ...]], kinds: tuple[object, ...], **options: object
) -> Callable[..., tuple[Tensor, ...]]:
    """`function` compiled for one set of options and one kind of arguments (fixed sizes, dtypes, absences).

    Compilations are counted per code object and limited; each set therefore gets a code object of its own.
    Cached, because the result depends on the arguments alone.
    """

    def run(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return function(*tensors, **options)

    name = f"{function.__name__}_{abs(hash((kinds, tuple(options.items()))))}"
    own = types.FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__)
    return torch.compile(own, fullgraph=True, options=_INDUCTOR)
