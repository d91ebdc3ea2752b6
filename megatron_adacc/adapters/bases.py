"""Frozen linear layers whose weights have fewer bits (formats: adapters/frozen.py).

A layer changes where it stands: its class becomes one that multiplies by a FrozenWeight, which takes the place of its
parameter `weight`; the parameter is gone. Adapters go beside such a layer as beside any other, before or after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_adacc.adapters import calibration, frozen
from megatron_adacc.adapters.lora import Adapted, LoraLinear, find_targets, refuse_shared
from megatron_adacc.errors import UserError

CALIBRATED = ("int8", "gptq4")


class QuantizedLinear(nn.Linear):
    """nn.Linear with a FrozenWeight; input and output as nn.Linear's. It has no gradient for weight and bias."""

    weight: frozen.FrozenWeight  # type: ignore[assignment]
    with_adapter: ClassVar[type[Adapted]]

    def forward(self, input: Tensor) -> Tensor:
        return frozen.linear(input, self.weight, self.bias)


class QuantizedLoraLinear(LoraLinear, QuantizedLinear):  # type: ignore[misc]
    """LoraLinear beside a FrozenWeight."""


QuantizedLinear.with_adapter = QuantizedLoraLinear


# What a layer becomes, and what it becomes with an adapter.
_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: QuantizedLinear, LoraLinear: QuantizedLoraLinear}


@dataclass(frozen=True)
class Shared:
    """What ranks that share layers have to agree on: statistics (calibration.Combine), and the counts of outlier
    columns by last name, which must come back the same on all ranks of the job."""

    combine: calibration.Combine = calibration.alone
    agree: Callable[[dict[str, int]], dict[str, int]] = dict


ALONE = Shared()


def quantize_base(
    model: nn.Module,
    names: Iterable[str],
    format: str,
    *,
    run: Callable[[], None] | None = None,
    layers: Sequence[nn.Module] | None = None,
) -> dict[str, frozen.FrozenWeight]:
    """Freeze every nn.Linear of `model` whose last name is among `names`, and give its weight fewer bits.

    Args:
        format: nf4, nf4-double, int8 or gptq4.
        run: for int8 and gptq4, a function that runs the model on text of the user's own. The model is in evaluation
            mode then, and adapters that it has already are left out.
        layers: for gptq4, the model's stack of layers, in order, which hold all these linear layers: they are
            quantized one after the other, each on inputs that the quantized ones before it give.

    Returns:
        the new weights by the layers' full names. Biases are frozen with them.

    Raises:
        UserError: a name that names no layer; a layer that is no nn.Linear, has a low-bit weight already, shares its
            weight or is merged; a weight that is not finite; a calibration that does not fit. The model is then as it
            was, unless calibration fails on the way."""
    found = find_targets(model.named_modules(), names)
    for name, module in found.items():
        if type(module) not in _KINDS:
            raise UserError(
                f"{name} is a {type(module).__name__}, but a weight of fewer bits is for an nn.Linear, with or without "
                "an adapter, that has none yet."
            )
    refuse_shared(model, found)
    if format == "gptq4" and layers is None:
        raise UserError("gptq4 quantizes one layer after the other: give the model's stack of layers as `layers`.")
    with calibration.evaluating([model]):
        return quantize(found, format, run=run, stacks=() if layers is None else (layers,), kinds=_KINDS)


def quantize(
    linears: Mapping[str, nn.Module],
    format: str,
    *,
    run: Callable[[], None] | None,
    stacks: Sequence[Sequence[nn.Module]],
    kinds: Mapping[type[nn.Module], type[nn.Module]],
    shared: Shared = ALONE,
) -> dict[str, frozen.FrozenWeight]:
    """As quantize_base, for layers of the classes in `kinds`, which says what each becomes. ``stacks``: stacks of
    layers, each of which is run by itself."""
    if format not in frozen.FORMATS:
        raise UserError(f"The base's format is {format!r}, but the known ones are {', '.join(frozen.FORMATS)}.")
    for name, module in linears.items():
        _refuse(name, module)
    make = frozen.FORMATS[format]
    if format not in CALIBRATED:
        return {name: _replace(module, make, kinds) for name, module in linears.items()}
    if run is None:
        raise UserError(f"{format} is calibrated on text: give a function that runs the model on some as `run`.")
    with _adapters_left_out(linears):
        return _calibrated(linears, format, run, stacks, kinds, shared)


def _calibrated(
    linears: Mapping[str, nn.Module],
    format: str,
    run: Callable[[], None],
    stacks: Sequence[Sequence[nn.Module]],
    kinds: Mapping[type[nn.Module], type[nn.Module]],
    shared: Shared,
) -> dict[str, frozen.FrozenWeight]:
    make = frozen.FORMATS[format]
    if format == "int8":
        most = calibration.outlier_features(linears, run, shared.combine)
        counts = shared.agree(calibration.outlier_counts(most))
        columns = calibration.outlier_columns(most, counts)
        return {
            name: _replace(module, partial(make, outlier_columns=columns[name]), kinds)
            for name, module in linears.items()
        }
    return _by_gptq(linears, make, run, stacks, kinds, shared)


def _by_gptq(
    linears: Mapping[str, nn.Module],
    make: Callable[..., frozen.FrozenWeight],
    run: Callable[[], None],
    stacks: Sequence[Sequence[nn.Module]],
    kinds: Mapping[type[nn.Module], type[nn.Module]],
    shared: Shared,
) -> dict[str, frozen.FrozenWeight]:
    names = {id(module): name for name, module in linears.items()}
    inside = [[[names[id(m)] for m in layer.modules() if id(m) in names] for layer in stack] for stack in stacks]
    missing = names.keys() - {id(linears[name]) for stack in inside for layer in stack for name in layer}
    if missing:
        raise UserError(f"{names[missing.pop()]} is in none of the layers that are to be quantized one by one.")
    # All inputs first: a run needs the whole model, and all ranks make it together.
    calls = [_inputs_of(stack, run) for stack in stacks]
    found: dict[str, frozen.FrozenWeight] = {}
    for stack, own, one in zip(stacks, inside, calls, strict=True):
        for layer, inner in zip(stack, own, strict=True):
            assert one is not None
            here = {name: linears[name] for name in inner}
            seen = calibration.hessians(here, partial(one.run, layer), shared.combine) if here else {}
            for name in inner:
                found[name] = _replace(here[name], partial(make, hessian=seen.pop(name)), kinds)
            one.advance(layer)
    return found


def _inputs_of(stack: Sequence[nn.Module], run: Callable[[], None]) -> calibration.LayerCalls | None:
    if stack:
        return calibration.LayerCalls(stack[0], run)
    run()
    return None


@contextlib.contextmanager
def _adapters_left_out(linears: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, adapters add zero: a base is calibrated as it is, whatever has been trained beside it."""
    adapted = [module for module in linears.values() if isinstance(module, Adapted)]
    scales = [module.lora_scale for module in adapted]
    for module in adapted:
        module.lora_scale = 0.0
    try:
        yield
    finally:
        for module, scale in zip(adapted, scales, strict=True):
            module.lora_scale = scale


def _refuse(name: str, module: nn.Module) -> None:
    weight = module.weight
    if isinstance(module, Adapted) and module.lora_unmerged is not None:
        raise UserError(f"The adapter of {name} is merged into its weight: unmerge() comes before fewer bits.")
    assert isinstance(weight, Tensor)
    if weight.is_meta:
        raise UserError(f"{name} has no contents yet (meta device): load the model before its weights get fewer bits.")
    if not weight.is_floating_point() or not bool(torch.isfinite(weight.detach()).all()):
        raise UserError(f"The weight of {name} has elements that are not finite numbers: fewer bits cannot hold it.")


def _replace(
    module: nn.Module,
    make: Callable[[Tensor], frozen.FrozenWeight],
    kinds: Mapping[type[nn.Module], type[nn.Module]],
) -> frozen.FrozenWeight:
    weight = module.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        made = make(weight.detach())
    del module.weight
    module.__class__ = kinds[type(module)]
    module.weight = made
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        bias.requires_grad_(False)
    return made


def quantized_modules(model: nn.Module) -> dict[str, frozen.FrozenWeight]:
    """The weights of fewer bits, by the full names of their layers."""
    found = {name: getattr(module, "weight", None) for name, module in model.named_modules()}
    return {name: weight for name, weight in found.items() if isinstance(weight, frozen.FrozenWeight)}
