"""What the inputs of linear layers look like on a user's own text: outlier features, and second moments.

    outlier feature   |x_j| >= 6 for some token (LLM.int8(), arXiv 2208.07339)
    hessian           sum of x x^T over all tokens (GPTQ, arXiv 2210.17323)

``run`` is a function without arguments that runs the model on that text, forward only, in as many calls as it likes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_adacc.errors import UserError

OUTLIER = 6.0

# See(name, x): one input of the linear layer of that name, [tokens, in].
See = Callable[[str, Tensor], None]
# Combine(name, x, by): a statistic of a layer that several ranks share, in place; by "max" or "sum".
Combine = Callable[[str, Tensor, str], None]


def alone(name: str, statistic: Tensor, by: str) -> None:
    """Combine for layers that no other rank has."""


@contextlib.contextmanager
def inputs_seen(linears: Mapping[str, nn.Module], see: See) -> Iterator[None]:
    """Inside, `see` is told of what the layers are called with; in evaluation mode, without gradients."""
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0].detach().flatten(0, -2)))
        for name, module in linears.items()
    ]
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, all these and their submodules are in evaluation mode; afterwards each is as it was."""
    was = [(module, module.training) for root in modules for module in root.modules()]
    for module, _ in was:
        module.training = False
    try:
        yield
    finally:
        for module, training in was:
            module.training = training


def outlier_features(
    linears: Mapping[str, nn.Module], run: Callable[[], None], combine: Combine = alone
) -> dict[str, Tensor]:
    """The largest |x_j| of each layer's features: float32 [in] by name. Raises UserError where a layer was not run, and
    for inputs that are not finite."""
    found: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> None:
        most = x.abs().amax(0).float()
        found[name] = torch.maximum(found[name], most) if name in found else most

    with inputs_seen(linears, see):
        run()
    _refuse_unseen(linears, found)
    for name, most in found.items():
        combine(name, most, "max")
        if not most.isfinite().all():
            raise UserError(f"The calibration text gives {name} inputs that are not finite: give another text.")
    return found


def outlier_columns(most: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """For each layer, its features of the largest inputs, as many as `counts` says by the layer's last name: int64."""
    return {name: each.topk(min(counts[_last(name)], each.numel())).indices for name, each in most.items()}


def outlier_counts(most: Mapping[str, Tensor]) -> dict[str, int]:
    """How many features of a layer are outliers, at most, by the layers' last names. Layers of one name get the same
    number of columns, so that they stay equal in shape and one trace serves them all."""
    found: dict[str, int] = {}
    for name, each in most.items():
        found[_last(name)] = max(found.get(_last(name), 0), int((each >= OUTLIER).sum()))
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def hessians(
    linears: Mapping[str, nn.Module], run: Callable[[], None], combine: Combine = alone
) -> dict[str, Tensor]:  # fmt: skip
    """Each layer's sum of x x^T, float32 [in, in] by name. Raises UserError where a layer was not run."""
    found: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> None:
        x = x.float()
        if name in found:
            found[name].addmm_(x.T, x)
        else:
            found[name] = x.T @ x

    with inputs_seen(linears, see):
        run()
    _refuse_unseen(linears, found)
    for name, hessian in found.items():
        combine(name, hessian, "sum")
    return found


def _refuse_unseen(linears: Mapping[str, nn.Module], found: Mapping[str, Tensor]) -> None:
    for name in linears:
        if name not in found:
            raise UserError(f"The calibration run does not reach {name}: it must run the whole model.")


class LayerCalls:
    """The calls of a stack of layers, each of which gets the output of the one before as its first tensor: positional,
    or as `hidden_states`. What else they get is the same for all of them."""

    def __init__(self, first: nn.Module, run: Callable[[], None]) -> None:
        """Run the model, and remember what the first layer was called with. Raises UserError where it was not."""
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._calls.append((args, dict(kwargs)))

        hook = first.register_forward_pre_hook(remember, with_kwargs=True)
        try:
            with torch.no_grad():
                run()
        finally:
            hook.remove()
        if not self._calls:
            raise UserError("The calibration run does not reach the first of the layers: it must run the whole model.")

    def run(self, layer: nn.Module) -> None:
        """Call the layer on all of them, for what its hooks see."""
        with torch.no_grad():
            for args, kwargs in self._calls:
                layer(*args, **kwargs)

    def advance(self, layer: nn.Module) -> None:
        """Let what the layer gives be what the next one gets."""
        with torch.no_grad():
            for index, (args, kwargs) in enumerate(self._calls):
                found = layer(*args, **kwargs)
                hidden = found[0] if isinstance(found, (tuple, list)) else found
                if args:
                    self._calls[index] = ((hidden, *args[1:]), kwargs)
                else:
                    self._calls[index] = (args, {**kwargs, "hidden_states": hidden})
