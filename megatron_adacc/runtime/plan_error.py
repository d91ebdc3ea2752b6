"""The gradient error of one layer under its whole plan, before the plan is used in training."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_adacc.cost.errors import Comparison, beside_exact
from megatron_adacc.cost.rehearsal import Call, Rehearsal
from megatron_adacc.runtime.program import Program
from megatron_adacc.runtime.stash import Stash, unpack


def plan_error(program: Program, module: nn.Module, rehearsal: Rehearsal) -> float:
    """Relative error of the layer's gradients, parameters and inputs, as cost/errors.py defines it; see
    :func:`compare_with_exact`."""
    return compare_with_exact(program, module, rehearsal).error


def compare_with_exact(program: Program, module: nn.Module, rehearsal: Rehearsal) -> Comparison:
    """The layer's gradients under the plan beside exact ones: with everything that the plan compresses and recomputes,
    recomputed from lossy buffers too. A lossless plan is exact and not run.

    The layer runs forward and backward twice beside the training. ``module``: the layer that the rehearsal is of."""

    def planned(call: Call) -> Tensor:
        stash = Stash(program, module, "a rehearsal")
        stash.begin([tensor.detach() for tensor in call.inputs])
        loss = call.forward(stash.pack, unpack)
        stash.finish()
        stash.release()
        return loss

    return Comparison(0.0, 1.0) if program.lossless else beside_exact(program.graph, rehearsal, planned)
