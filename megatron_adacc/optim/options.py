"""What BlockAdamW's options may be."""

import enum
from typing import Any

import torch

from megatron_adacc.errors import UserError
from megatron_adacc.optim.blocks import checked_layout, flat_view

MASTERS = ("auto", "remainder", "float32")


def option[Option: enum.Enum](name: str, value: Option | str, known: tuple[Option, ...]) -> Option:
    """The member that a value or its name means. Raises UserError where it is none of the known ones."""
    for member in known:
        if value in (member, member.value):
            return member
    names = ", ".join(f"'{member.value}'" for member in known)
    raise UserError(f"BlockAdamW has no {name} {value!r}; it is one of {names}.")


def check_group(group: dict[str, Any]) -> None:
    """Raises UserError for an option of a parameter group, or a parameter in it, that BlockAdamW cannot serve."""
    if group["amsgrad"]:
        raise UserError("BlockAdamW has no amsgrad: its maximum of v would be a third state; leave amsgrad False.")
    checked_layout(group["bits"], 1)
    if group["master"] not in MASTERS:
        raise UserError(f"Master weights {group['master']!r} are not known; they are 'auto', 'remainder' or 'float32'.")
    for name, low, high in (("lr", 0.0, torch.inf), ("eps", 0.0, torch.inf), ("weight_decay", 0.0, torch.inf)):
        if not low <= float(group[name]) <= high:
            raise UserError(f"BlockAdamW needs {name} >= 0, but it is {float(group[name])}.")
    for name, beta in zip(("beta1", "beta2"), group["betas"], strict=True):
        if not 0.0 <= float(beta) < 1.0:
            raise UserError(f"BlockAdamW needs {name} in [0, 1), but it is {float(beta)}.")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"BlockAdamW has no update for {parameter.dtype}: parameters are float32 or 16-bit floats.")
        if parameter.dtype is torch.float16 and group["master"] == "remainder":
            raise UserError(
                "A 16-bit remainder cannot make float32 of a float16 parameter: below 2^-17 more than 2^16 float32 "
                "numbers round to one float16. Use master='float32', or bfloat16 parameters."
            )
        flat_view(parameter.detach())
