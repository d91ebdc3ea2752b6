"""Choose and apply the layouts of a whole optimizer under a limit, by what its state says now.

Meant for the iterations at which a monitor looks anyway: importances change over training, and a block's bits with
them. Until Adam's second moment has settled (about 1 / (1 - beta2) steps) it says little of the Hessian.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.errors import UserError
from megatron_adacc.optim.block_adamw import BlockAdamW
from megatron_adacc.optim.blocks import block_count, checked_layout
from megatron_adacc.optim.importance import layout_errors
from megatron_adacc.optim.layout import Choice, choose
from megatron_adacc.optim.memory import choice_bytes
from megatron_adacc.optim.policy import PrecisionPolicy


@dataclass(frozen=True)
class Proposal:
    """Layouts for all parameters, not applied yet.

    Attributes:
        choice: over the blocks of all parameters together.
        layouts: parameter -> bits of its blocks.
    """

    choice: Choice
    layouts: Mapping[Tensor, int | Tensor]


def propose(
    optimizer: BlockAdamW,
    named_parameters: Mapping[str, Tensor],
    limit_bytes: int,
    policy: PrecisionPolicy | None = None,
    diagonals: Mapping[str, Tensor] | None = None,
) -> Proposal:
    """The layouts of least importance-weighted error whose m, v, exponents and layouts stay within the limit.

    Args:
        named_parameters: all parameters of the optimizer. Groups may have different learning rates: errors are
            weighted by their squares, relative to the largest.
        limit_bytes: master weights are not counted: no layout changes them.
        policy: the fewest bits by name; None allows 4 everywhere.
        diagonals: the Hessian's by name; None takes the second moment for all.

    Raises:
        UserError: the limit cannot be met, a rule matches nothing, or named_parameters are not the optimizer's.
    """
    policy = policy or PrecisionPolicy({})
    policy.check_names(named_parameters)
    rates = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    if set(rates) != set(named_parameters.values()):
        raise UserError(
            f"{len(named_parameters)} parameters were named, but the optimizer has {len(rates)}, or others; name all "
            "of them and no more."
        )
    largest_rate = max(rates.values()) or 1.0
    errors, floors = [], []
    for name, parameter in named_parameters.items():
        weight = (rates[parameter] / largest_rate) ** 2 if max(rates.values()) else 1.0
        diagonal = None if diagonals is None else diagonals[name]
        errors.append(layout_errors(optimizer, parameter, diagonal).cpu() * weight)
        floors.append(torch.full((block_count(parameter.numel()),), policy.lowest_bits(name)))
    numels = [parameter.numel() for parameter in named_parameters.values()]
    # A byte a block for the layouts themselves; parameters whose blocks come out alike do not need it.
    blocks = [block_count(numel) for numel in numels]
    choice = choose(torch.cat(errors), choice_bytes(numels), torch.cat(floors), limit_bytes - sum(blocks))
    layouts = {}
    for parameter, bits in zip(named_parameters.values(), choice.bits.split(blocks), strict=True):
        layouts[parameter] = checked_layout(bits.to(parameter.device), parameter.numel()) if len(bits) else 32
    return Proposal(choice, layouts)


def apply(optimizer: BlockAdamW, proposal: Proposal) -> None:
    """Re-encode the state of every parameter whose layout changes, one after the other."""
    for parameter, layout in proposal.layouts.items():
        optimizer.set_layout(parameter, layout)
