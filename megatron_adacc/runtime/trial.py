"""What a plan adds to a layer's step, found by trying it: the sum of its ops' prices does not know that a plan which
holds less also takes fewer new pages from the system, and leaves other things in the caches.

Forward and backward of a rehearsed call, beside the training: with the plan and without it, in turns, so that a
slower second of the machine slows both.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_adacc.cost.rehearsal import Call, Rehearsal
from megatron_adacc.cost.timing import clock_for
from megatron_adacc.runtime.program import Program
from megatron_adacc.runtime.stash import Stash, unpack

LEAST_ROUNDS = 3
MOST_ROUNDS = 9
SECONDS = 2.0


@dataclass(frozen=True)
class Trial:
    """Microseconds of one forward and backward of a layer: ``plain_us`` without a plan, ``added_us`` what the plan
    adds. Medians over ``rounds``, the second one of the differences within a round."""

    plain_us: float
    added_us: float
    rounds: int


def tried(
    program: Program, module: nn.Module, rehearsal: Rehearsal, fixed: bool = False, seconds: float = SECONDS
) -> Trial:
    """Try the plan of ``program`` on the call; ``module``: the layer that the rehearsal is of.

    At least three rounds after one to warm up, more within ``seconds``, unless ``fixed``: ranks whose layers exchange
    tensors must do equally many. Needs the memory of one layer's activations beside what the training holds."""
    device = program.context.device
    pairs: list[tuple[float, float]] = []
    start = time.perf_counter()
    with rehearsal.begin() as call:
        call.drop_parameter_gradients()
        while True:
            began = time.perf_counter()
            pairs.append((_us(call, device), _us(call, device, Stash(program, module, "a rehearsal"))))
            now = time.perf_counter()
            if len(pairs) > MOST_ROUNDS or (len(pairs) > LEAST_ROUNDS and now + (now - began) - start > seconds):
                break
            if fixed and len(pairs) > LEAST_ROUNDS:
                break
    del pairs[0]
    plain = statistics.median(without for without, _ in pairs)
    return Trial(plain, statistics.median(planned - without for without, planned in pairs), len(pairs))


def _us(call: Call, device: torch.device, stash: Stash | None = None) -> float:
    clock = clock_for(device)
    clock.mark()
    if stash is None:
        loss = call.forward(Tensor.detach, lambda tensor: tensor)
    else:
        stash.begin([tensor.detach() for tensor in call.inputs])
        loss = call.forward(stash.pack, unpack)
        stash.finish()
        stash.release()
    loss.backward()
    del loss, stash
    for tensor in call.inputs:
        tensor.grad = None
    clock.mark()
    return sum(clock.intervals_us())
