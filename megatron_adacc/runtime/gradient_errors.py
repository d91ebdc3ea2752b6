"""What a plan costs in gradients: the same inputs and random numbers, with the plan and without it.

error(p) = |g_plan - g_exact| / |g_exact|           (Euclidean norms over the elements of parameter p)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import format_table
from megatron_adacc.graph.storages import has_plain_storage


def named_parameters(layers: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Trained parameters of layers by ``layer.path``, each once under its first name."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for place, layer in sorted(layers.items()):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{place}.{name}"] = parameter
    return found


def gradients(loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Gradients of ``loss()``, with the default random generators as they were before and put back after. No
    parameter's own .grad changes.

    Raises UserError where loss() gives no scalar that the parameters contributed to."""
    with torch.random.fork_rng(), torch.enable_grad():
        value = loss()
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise UserError(
                "gradient_errors() needs a function that runs the model and returns its loss, one number with a "
                f"gradient; it returned {_described(value)}."
            )
        found = torch.autograd.grad(value, parameters, allow_unused=True)
    if all(g is None for g in found):
        if not all(has_plain_storage(p) for p in parameters):
            raise UserError(
                "gradient_errors() finds no gradients of parameters that are sharded (FSDP): call it on a model that "
                "is not, or use enable_memory_optim() with check_gradients_every, which compares layer by layer."
            )
        raise UserError("gradient_errors(): the loss does not depend on any parameter of the attached layers.")
    return list(found)


def relative_error(measured: Tensor, exact: Tensor) -> float:
    """|measured - exact| / |exact|, computed in float64; 0 for equal tensors, infinite where only ``exact`` is 0."""
    if torch.equal(measured, exact):
        return 0.0
    difference, size = (measured.double() - exact.double()).norm(), exact.double().norm()
    return float(difference / size)


def error_table(errors: Mapping[str, float]) -> str:
    """The errors as a table under a line with the largest."""
    worst = max(errors, key=lambda name: errors[name])
    heading = f"gradient errors of the plan, relative, by parameter; largest {errors[worst]:.3g} ({worst})"
    rows = [("parameter", "error"), *((name, f"{error:.3g}") for name, error in errors.items())]
    return heading + "\n" + format_table(rows)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    return f"a {type(value).__name__}"
