"""What --adacc-state-plan leaves to the activations' plan: the bytes of m and v, settled or to be chosen with it.

The forms of the state that are offered are 32, 16, 8 and 4 bits everywhere, and eight mixes between each two of them.
The error of a form is the squared error of Adam's update relative to the update (docs/states.md, the table of
benchmarks/states.py noise), as a mean over the parameters: before the first steps nothing is known of the blocks. Once
the bytes are chosen, the bits of each block come from its importance (state_plan.py).
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.read_job import micro_batches
from megatron_adacc.megatron.state_bytes import moment_bytes
from megatron_adacc.optim.formats import STATE_BITS
from megatron_adacc.planner.joint import StateForm
from megatron_adacc.runtime.state_offer import StateOffer

if TYPE_CHECKING:
    from megatron_adacc.megatron.state_plan import StateAdamW

ERRORS = {32: 0.0, 16: 0.017**2, 8: 0.171**2, 4: 0.820**2}
"""Of the update, relative and squared: python benchmarks/states.py noise."""

CPU_NS = 6.9
"""Nanoseconds a parameter by which the compiled update in 8 bits is longer than AdamW's on a CPU core (docs/states.md).
On CUDA the update was not timed, and counts as no longer."""

MIXES = 8

# Temporaries at 16384 to 2^20 elements: an update 76 bytes an element of its chunk, choosing and changing the bits of a
# parameter 85 an element (importance.py looks at 2^20 at a time), choosing among all blocks 445 a block; rounded up.
_WHOLE, _PART, _PART_ELEMENTS, _BLOCK_BYTES = 16, 72, 2**20, 450


def offer(optimizers: Sequence[StateAdamW], args: Namespace, groups: Sequence[dist.ProcessGroup]) -> StateOffer:
    """For this rank's optimizers; every rank of the groups calls it.

    Raises UserError where the bytes are to be chosen for more than one optimizer."""
    sizes = [p.numel() for one in optimizers for p in one.parameters()]
    exact, workspace = 8 * sum(sizes), workspace_of(sizes)
    waiting = sum(one.delayed_bytes() for one in optimizers)
    if not chosen_jointly(args):
        settled = sum(_settled(one) for one in optimizers) + waiting
        return StateOffer(exact, _largest([StateForm(settled, 0.0)], groups), 0.0, 1, workspace, lambda allowed: None)
    if len(optimizers) > 1:
        raise UserError(
            "--adacc-state-plan auto without --adacc-state-limit is for a rank with one optimizer; this one has "
            f"{len(optimizers)} (experts have their own): give --adacc-state-limit."
        )
    forms = [StateForm(0, 0.0)]
    if optimizers:
        parameters = optimizers[0].parameters()
        given = {bits: [(p.numel(), optimizers[0].bits_of(p, bits)) for p in parameters] for bits in STATE_BITS}
        forms = forms_of(given, waiting, all(p.device.type == "cpu" for p in parameters))

    def allow(allowed: int) -> None:
        for one in optimizers:
            one.allow(allowed - waiting)

    return StateOffer(exact, _largest(forms, groups), args.adacc_state_price, micro_batches(args), workspace, allow)


def _settled(optimizer: StateAdamW) -> int:
    """Bytes of m and v on the device at most, whatever the bits of the blocks become."""
    if optimizer.away is None:
        return optimizer.limit_bytes or optimizer.state_bytes()
    if optimizer.limit_bytes is None:
        return optimizer.most_device_bytes()
    return min(optimizer.limit_bytes, optimizer.exact_device_bytes())


def chosen_jointly(args: Namespace) -> bool:
    """Whether the state's bytes are chosen together with the activations' plan."""
    return args.adacc_state_plan == "auto" and args.adacc_state_limit is None


def workspace_of(sizes: Sequence[int]) -> int:
    """Bytes that the update and a change of form need beside the state of parameters of so many elements."""
    largest, blocks = max(sizes, default=0), layout_bytes(sizes)
    return max(_WHOLE * largest + _PART * min(largest, _PART_ELEMENTS), _BLOCK_BYTES * blocks)


def layout_bytes(sizes: Sequence[int]) -> int:
    """Of the layouts where every parameter's blocks differ."""
    return sum(-(-elements // 256) for elements in sizes)


def forms_of(given: Mapping[int, Sequence[tuple[int, int]]], waiting: int, on_cpu: bool) -> list[StateForm]:
    """What m and v may become.

    Args:
        given: by bits, each parameter's elements and its own bits where all that may have these bits have them.
        waiting: bytes of delayed gradients, which lie beside any form."""
    sizes = [elements for elements, _ in given[STATE_BITS[0]]]
    total = max(1, sum(sizes))
    uniform = []
    for bits in STATE_BITS:
        error = sum(elements * ERRORS[own] for elements, own in given[bits]) / total
        longer_us = CPU_NS / 1000 * sum(elements for elements, own in given[bits] if own < 32) if on_cpu else 0.0
        nbytes = sum(moment_bytes(elements, own) for elements, own in given[bits])
        uniform.append(StateForm(nbytes + waiting, error, longer_us))
    forms = uniform[:1]
    for more, fewer in itertools.pairwise(uniform):
        for step in range(1, MIXES + 1):
            share = step / MIXES
            # Rounded up; the layouts of a mix are a byte a block.
            nbytes = more.bytes - (more.bytes - fewer.bytes) * step // MIXES
            nbytes += layout_bytes(sizes) if step < MIXES else 0
            us = max(more.us, fewer.us) if step < MIXES else fewer.us
            forms.append(StateForm(nbytes, more.error + share * (fewer.error - more.error), us))
    return forms


def _largest(forms: list[StateForm], groups: Sequence[dist.ProcessGroup]) -> list[StateForm]:
    """Each form with the most bytes that a rank of the groups needs for it: shards differ in their small tensors."""
    most = torch.tensor([form.bytes for form in forms], dtype=torch.int64)
    for group in groups:
        if group.size() > 1:
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
            shared = most.to(device)
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
            most = shared.cpu()
    return [
        StateForm(nbytes, form.error, form.us) for nbytes, form in zip(most.tolist(), forms, strict=True)
    ]  # fmt: skip
