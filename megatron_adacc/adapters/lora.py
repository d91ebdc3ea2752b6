"""LoRA (arXiv 2106.09685): beside a frozen linear layer, two thin matrices that are trained.

    h = W0 x + (alpha / r) B A x        A: r x in, random at the start;   B: out x r, zero at the start

A layer is adapted where it stands: its class becomes a subclass of what it was, and A and B are parameters of its own,
``lora_a`` and ``lora_b``. So the names of the base's parameters, and checkpoints of it, stay as they are; and the
first forward's result is the base's, since B A x is zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_adacc.errors import UserError

# The names of the two matrices among a layer's parameters.
NAMES = ("lora_a", "lora_b")


class Adapted(nn.Module):
    """What every adapted linear layer is, beside what it was.

    weight: this rank's part of W0, [out, in]; lora_a: [rank, in], lora_b: [out, rank], both of the weight's dtype;
    lora_scale: alpha / rank. While it is merged, the weight is W0 + (alpha / rank) B A and the adapter is left out."""

    weight: Tensor
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    # W0 while the layer is merged.
    lora_unmerged: Tensor | None

    def delta(self) -> Tensor:
        """(alpha / rank) B A, [out, in] in float32: what the adapter adds to the weight."""
        with torch.no_grad():
            return (self.lora_b.float() @ self.lora_a.float()).mul_(self.lora_scale)

    def merge(self) -> None:
        """Add the adapter to the weight, in float32, rounded once to the weight's dtype. W0 is kept beside it, because
        no subtraction gives its bits back."""
        if self.lora_unmerged is not None:
            raise UserError("The adapter is merged already: unmerge() comes first.")
        if not isinstance(self.weight, Tensor):
            raise UserError(
                "The weight beside the adapter has fewer bits, which cannot hold a sum: merge into the base."
            )
        with torch.no_grad():
            self.lora_unmerged = self.weight.detach().clone()
            # In place: the weight may lie in a buffer with others (Megatron's DDP).
            self.weight.copy_(self.weight.float() + self.delta())

    def unmerge(self) -> None:
        """Put W0 back, bit for bit."""
        if self.lora_unmerged is None:
            raise UserError("The adapter is not merged: merge() comes first.")
        with torch.no_grad():
            self.weight.copy_(self.lora_unmerged)
        self.lora_unmerged = None


class LoraLinear(Adapted, nn.Linear):
    """nn.Linear with an adapter; input and output as nn.Linear's."""

    lora_dropout: float

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if self.lora_unmerged is not None:
            return output
        if self.lora_dropout:
            input = F.dropout(input, self.lora_dropout, self.training)
        # The scale goes to the thin tensor between the two.
        return output + F.linear(F.linear(input, self.lora_a) * self.lora_scale, self.lora_b)


def check_numbers(rank: int, alpha: float, dropout: float = 0.0) -> None:
    """Raises UserError for what cannot be meant."""
    if rank < 1:
        raise UserError(f"The rank of an adapter is {rank}, but it must be at least 1.")
    if not 0 < alpha < float("inf"):
        raise UserError(f"alpha of an adapter is {alpha}, but it must be a number above 0.")
    if not 0 <= dropout < 1:
        raise UserError(f"The dropout of an adapter is {dropout}, but it must be from 0 to below 1.")


def initial_a(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """A at the start: [rank, inputs], float32 on the host, normal with mean 0 and variance 1 / inputs, so that A x is
    of x's size. It depends on its arguments alone: not on the generators of the training, which go on as without
    adapters, and not on how many ranks share the layer."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    # The device is named, because a bridge may send tensors without one elsewhere.
    return torch.randn(rank, inputs, generator=generator, device="cpu").div_(inputs**0.5)


def adapt(module: nn.Module, kind: type[Adapted], a: Tensor, b: Tensor, scale: float) -> None:
    """Make `module` one of `kind`, a subclass of its class, with these matrices in its weight's dtype and place."""
    assert issubclass(kind, type(module)), (kind, type(module))
    weight: Any = module.weight  # a tensor, or a FrozenWeight
    module.__class__ = kind
    for name, matrix in zip(NAMES, (a, b), strict=True):
        # Not .to(): where nothing changes it gives the tensor itself.
        made = torch.empty(matrix.shape, dtype=weight.dtype, device=weight.device)
        module.register_parameter(name, nn.Parameter(made.copy_(matrix)))
    module.lora_scale = scale  # type: ignore[assignment]
    module.lora_unmerged = None  # type: ignore[assignment]


def find_targets(modules: Iterable[tuple[str, nn.Module]], targets: Iterable[str]) -> dict[str, nn.Module]:
    """The modules whose last name is among `targets`, by full name. Raises UserError for a target that names none."""
    wanted = list(dict.fromkeys(targets))
    named = [(name, module) for name, module in modules if name]
    found = {name: module for name, module in named if name.rpartition(".")[2] in wanted}
    for target in wanted:
        if not any(name.rpartition(".")[2] == target for name in found):
            there = sorted(
                {name.rpartition(".")[2] for name, m in named if isinstance(getattr(m, "weight", None), Tensor)}
            )
            raise UserError(
                f"An adapter is asked for {target!r}, but no layer of the model is called so: its layers with a weight "
                f"are {', '.join(there) or 'none'}."
            )
    if not found:
        raise UserError("Adapters need at least one target: name the linear layers that get one.")
    return found


def refuse_shared(model: nn.Module, found: Mapping[str, nn.Module]) -> None:
    """Raises UserError where an adapted weight is another module's too: merging would change that one."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for name, module in found.items():
        others = [other for other in holders.get(id(module.weight), []) if other != name]
        if others:
            raise UserError(f"The weight of {name} is that of {others[0]} too: it cannot have an adapter of its own.")


def inject(
    model: nn.Module,
    targets: Iterable[str],
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Give an adapter to every nn.Linear of `model` whose last name is among `targets`, and freeze everything else.

    Args:
        rank: r; an adapter of a layer has r (in + out) parameters.
        alpha: the adapter's part is scaled by alpha / rank; by default alpha is 2 rank.
        dropout: probability for the elements of the adapter's input while the layer trains.
        seed: of A's start (initial_a).

    Returns:
        the full names of the adapted layers.

    Raises:
        UserError: a target that names no layer, a layer that is no nn.Linear or has an adapter already, numbers that
            cannot be meant. The model is then as it was."""
    alpha = 2.0 * rank if alpha is None else alpha
    check_numbers(rank, alpha, dropout)
    found = find_targets(model.named_modules(), targets)
    for name, module in found.items():
        if isinstance(module, Adapted):
            raise UserError(f"{name} has an adapter already.")
        if type(module) is not nn.Linear and not hasattr(type(module), "with_adapter"):
            raise UserError(f"{name} is a {type(module).__name__}, but an adapter goes beside an nn.Linear.")
        if module.weight.is_meta:
            raise UserError(f"{name} has no contents yet (meta device): load the model before it gets adapters.")
    refuse_shared(model, found)
    for name, module in found.items():
        assert isinstance(module, nn.Linear)
        a = initial_a(rank, module.in_features, seed, name)
        kind = getattr(type(module), "with_adapter", LoraLinear)
        adapt(module, kind, a, torch.zeros(module.out_features, rank), alpha / rank)
        module.lora_dropout = dropout  # type: ignore[assignment]
    freeze_base(model)
    return list(found)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this full name is an adapter's."""
    return name.rpartition(".")[2] in NAMES


def freeze_base(model: nn.Module) -> None:
    """Only adapters are trained from now on."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def adapted_modules(model: nn.Module) -> dict[str, Adapted]:
    """The adapted layers by full name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """All A and B by full name, detached, not copied: an adapter checkpoint."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if is_adapter(name)}


def load_adapter_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy what adapter_state() gave into the adapters of `model`.

    Raises UserError where names or shapes are not the model's, or an adapter is merged; then nothing is copied."""
    own = adapter_state(model)
    if any(module.lora_unmerged is not None for module in adapted_modules(model).values()):
        raise UserError("An adapter is merged into its weight: unmerge() comes before another one is loaded.")
    compare_state(own, state, "the adapters")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def compare_state(own: Mapping[str, Any], state: Mapping[str, Any], what: str) -> None:
    """Raises UserError with the first name or shape in which `state` differs from the model's `own`."""
    for name in own.keys() ^ state.keys():
        side = "has no" if name in own else "has, and the model has not,"
        raise UserError(f"What is loaded {side} {name}: {what} must be those of the same model, targets and layers.")
    for name, tensor in own.items():
        shapes = tuple(getattr(state[name], "shape", ())), tuple(getattr(tensor, "shape", ()))
        if shapes[0] != shapes[1]:
            raise UserError(f"{name} has the shape {shapes[0]} in what is loaded, but {shapes[1]} in the model.")


def merge(model: nn.Module) -> None:
    """Merge every adapter of `model` into its weight (Adapted.merge)."""
    found = _all_adapted(model)
    # The layers whose merging is refused come first, so that it is all or none.
    for module in sorted(found, key=lambda module: isinstance(module.weight, Tensor)):
        module.merge()


def unmerge(model: nn.Module) -> None:
    """Give every weight of `model` its own bits back (Adapted.unmerge)."""
    for module in _all_adapted(model):
        module.unmerge()


def _all_adapted(model: nn.Module) -> list[Adapted]:
    found = list(adapted_modules(model).values())
    if not found:
        raise UserError("The model has no adapters: inject() makes them.")
    if len({module.lora_unmerged is None for module in found}) > 1:
        raise UserError("Some adapters of the model are merged and some are not: merge or unmerge them one by one.")
    return found
