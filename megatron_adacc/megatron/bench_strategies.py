"""What `adacc bench` compares: ways to save activation memory, each applied to the transformer layers of one model.

plain        nothing
full         Megatron's full recompute, one layer at a time
selective    Megatron's selective recompute of the core attention
checkpoint   torch.utils.checkpoint around each layer (use_reentrant=False)
matmuls      the same with torch's selective checkpointing: results of mm, addmm and bmm are saved
compiled B   torch.compile of each layer with torch._functorch.config.activation_memory_budget = B
others       a plan of ours by its name (keep, recompute, compress, quantize) or by its file
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from megatron_adacc.runtime.attach import Handle

LEARN = "learn"  # measures the costs that plans are made from
OF_MEGATRON = {"plain": "off", "full": "full", "selective": "selective"}


@dataclass(frozen=True)
class Strategy:
    """``megatron_plan``: what --adacc-plan would name. ``apply``: changes the layers, and gives the handle of a plan of
    ours."""

    megatron_plan: str
    apply: Callable[[Sequence[nn.Module]], Handle | None]


def get(name: str, plan: str | None = None) -> Strategy:
    """The strategy of that name. ``plan``: its file, where it has one. Raises KeyError for one that is not known."""
    if plan is not None or name in ("keep", "recompute", "compress", "quantize"):
        return Strategy("off", lambda layers: _attached(layers, plan or name))
    if name == LEARN:
        return Strategy("off", lambda layers: _attached(layers, "auto", limit="50%"))
    if name in OF_MEGATRON:
        return Strategy(OF_MEGATRON[name], _as_it_is)
    if name.startswith("compiled "):
        budget = float(name.removeprefix("compiled "))
        return Strategy("off", lambda layers: _wrapped(layers, lambda forward: _compiled(forward, budget)))
    return Strategy("off", lambda layers: _wrapped(layers, _WRAPPERS[name]))


def _as_it_is(layers: Sequence[nn.Module]) -> None:
    """Megatron does it."""


def _attached(layers: Sequence[nn.Module], plan: str, **settings: Any) -> Handle:
    from megatron_adacc.runtime.attach import attach

    return attach(list(layers), plan, **settings)


def _wrapped(layers: Sequence[nn.Module], wrap: Callable[[Any], Any]) -> None:
    for layer in layers:
        layer.forward = wrap(layer.forward)


def _checkpointed(forward: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _matmuls_saved(forward: Any) -> Any:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    saved = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run(*args: Any, **kwargs: Any) -> Any:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def _compiled(forward: Any, budget: float) -> Any:
    import torch

    def backend(module: Any, inputs: Any) -> Any:
        # A backend of its own: Dynamo would take what it compiled for another budget for the same.
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(module, inputs)

    return torch.compile(forward, backend=backend)


_WRAPPERS: dict[str, Callable[[Any], Any]] = {"checkpoint": _checkpointed, "matmuls": _matmuls_saved}
