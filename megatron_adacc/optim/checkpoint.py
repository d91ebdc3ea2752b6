"""State dicts: to torch.optim.AdamW's full precision, and back."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_adacc.errors import UserError
from megatron_adacc.optim.blocks import block_count, checked_layout, empty_state, flat_view
from megatron_adacc.optim.transcode import write

if TYPE_CHECKING:
    from megatron_adacc.optim.block_adamw import BlockAdamW

_ADAMW = {
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_OWN = ("bits", "min_quantized_numel", "master")


def adamw_state(optimizer: "BlockAdamW") -> dict[str, Any]:
    """See BlockAdamW.full_precision_state."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in (*_OWN, "params")}
        numbers = []
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                m, v = optimizer.moments(parameter)
                if optimizer.away is not None:
                    m, v = m.cpu(), v.cpu()  # the device may not have room for all of them
                step = torch.tensor(float(state["step"]), dtype=torch.float32)
                result["state"][number] = {"step": step, "exp_avg": m, "exp_avg_sq": v}
            numbers.append(number)
            number += 1
        result["param_groups"].append({**options, **_ADAMW, "params": numbers})
    return result


def with_own_options(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved parameter groups; what AdamW's do not have is taken from the present ones."""
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        return list(saved)  # Optimizer.load_state_dict says what is wrong
    return [{**{name: own[name] for name in _OWN}, **group} for group, own in zip(saved, groups, strict=True)]


def loaded_state(saved: dict[str, Any], parameter: Tensor, fresh: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter from a saved one, ours or AdamW's, on the parameter's device.

    Args:
        fresh: the parameter's state before any update; AdamW's is written into it.

    Raises:
        UserError: neither ours nor AdamW's, or of a parameter of another size or dtype.
    """
    if "exp_avg" in saved:
        return _from_adamw(saved, parameter, fresh)
    if "layout" not in saved:
        raise UserError(
            f"The saved optimizer state holds {', '.join(map(str, saved)) or 'nothing'}: it is neither BlockAdamW's "
            "nor AdamW's; load it into the optimizer that it came from."
        )
    layout = checked_layout(saved["layout"], parameter.numel()) if _fits(saved["layout"], parameter) else None
    expected = {} if layout is None else empty_state(layout, parameter.numel(), torch.device("meta"))
    extra = {"step", "layout", "remainder", "master"}
    kind = {torch.bfloat16: {"remainder", "master"}, torch.float16: {"master"}}.get(parameter.dtype, set())
    same = all(name in saved and saved[name].shape == like.shape for name, like in expected.items())
    others = set(saved) - set(expected) - (extra - {"remainder", "master"})
    if layout is None or not same or not others <= kind or (bool(kind) and len(others) != 1):
        raise UserError(
            f"The saved optimizer state does not fit a parameter of shape {tuple(parameter.shape)} and "
            f"{parameter.dtype}; load it for the model that it was saved with, or load its full precision state."
        )
    return {
        name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
        for name, value in saved.items()
    }


def _fits(layout: Any, parameter: Tensor) -> bool:
    return not isinstance(layout, Tensor) or layout.shape == (block_count(parameter.numel()),)


def _from_adamw(saved: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    if "max_exp_avg_sq" in saved:
        raise UserError("The saved AdamW state has amsgrad's maxima, which BlockAdamW cannot continue.")
    moments_into(state, parameter, saved["exp_avg"], saved["exp_avg_sq"])
    state["step"] = int(saved["step"])
    return state


def moments_into(state: dict[str, Any], parameter: Tensor, m: Tensor, v: Tensor) -> dict[str, Any]:
    """Write moments of the parameter's shape into its state, in the layout that it has."""
    flat = []
    for name, moment in (("exp_avg", m), ("exp_avg_sq", v)):
        if moment.shape != parameter.shape:
            raise UserError(
                f"The saved {name} has shape {tuple(moment.shape)}, its parameter {tuple(parameter.shape)}; load "
                "the state for the model that it was saved with."
            )
        flat.append(flat_view(moment.to(parameter.device, torch.float32), parameter))
    write(flat[0], flat[1], state, state["layout"], chunk_blocks=1024)
    return state
