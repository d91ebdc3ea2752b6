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

# torch.compile makes a separate version for sizes 0 and 1; such runs are left to the plain functions.
LEAST_BLOCKS = 2

BlockFunction = partial[None]


@dataclass(frozen=True)
class EncodeOutputs:
    """Where encoding writes.

    Attributes:
        codes: uint8 [code bytes].
        by_block: tensors whose first dimension counts blocks (scales, values).
        shared: tensors that every call gets whole, after the others.
        tail_shared: what the tail gets in place of `shared`, if that is something else.
    """

    codes: Tensor
    by_block: tuple[Tensor, ...]
    shared: tuple[Tensor, ...] = ()
    tail_shared: tuple[Tensor, ...] | None = None


def encode_run(
    function: BlockFunction,
    implementation: Implementation,
    cut: Blocks,
    run: Tensor,
    outputs: EncodeOutputs,
    *,
    repeat: bool = False,
) -> None:
    """Call function(x [blocks, per, part], codes [blocks, part], *by_block, *shared) for all of the run.

    `repeat`: how the tail is filled up, see Blocks.tail_of.
    """
    if cut.full:
        call(
            function,
            implementation,
            cut.full,
            cut.full_of(run),
            cut.full_codes(outputs.codes),
            *(tensor[: cut.full] for tensor in outputs.by_block),
            *outputs.shared,
        )
    if cut.tail:
        function(
            cut.tail_of(run, repeat=repeat),
            cut.tail_codes(outputs.codes),
            *(tensor[cut.full :] for tensor in outputs.by_block),
            *(outputs.shared if outputs.tail_shared is None else outputs.tail_shared),
        )


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
        call(function, implementation, cut.full, cut.full_codes(codes), *by_full_block, cut.full_of(run))
    if cut.tail:
        tail = torch.empty(cut.tail_shape, dtype=run.dtype, device=run.device)
        function(cut.tail_codes(codes), *(tensor[cut.full :] for tensor in by_block), tail)
        cut.write_tail(run, tail)


def call(
    function: BlockFunction, implementation: Implementation, blocks: int, *tensors: Tensor
) -> None:
    """Call function(*tensors) for full blocks, compiled if `implementation` says so.

    Tensors whose first dimension is `blocks` long are dynamic in that dimension, all other sizes are fixed.
    """
    if implementation is not Implementation.COMPILED or blocks < LEAST_BLOCKS:
        function(*tensors)
        return
    fixed = tuple(None if tensor.shape[0] != blocks else tuple(tensor.shape[1:]) for tensor in tensors)
    for tensor, sizes in zip(tensors, fixed, strict=True):
        if sizes is not None:
            torch._dynamo.mark_dynamic(tensor, 0)
    compiled(function.func, fixed, tuple(tensor.dtype for tensor in tensors), **function.keywords)(*tensors)


@functools.cache
def compiled(
    function: Callable[..., None],
    sizes: tuple[tuple[int, ...] | None, ...],
    dtypes: tuple[torch.dtype, ...],
    **options: object,
) -> Callable[..., None]:
    """`function` compiled for one set of options, fixed sizes and dtypes.

    Compilations are counted per code object and limited; each set therefore gets a code object of
    its own. Cached, because the result depends on the arguments alone.
    """

    def run(*tensors: Tensor) -> None:
        function(*tensors, **options)

    name = f"{function.__name__}_{abs(hash((sizes, dtypes, tuple(options.items()))))}"
    own = types.FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__)
    return torch.compile(own, fullgraph=True)
