"""Delayed group updates: parameters in G groups, group g updated at steps t with t mod G = g.

A group's update uses the mean of its gradients since its last one. They were taken while the other groups moved.
To first order a gradient follows by its Hessian's block, g_g(w + d) = g_g(w) + H_gh d_h, and with the outer product
of gradients for H (Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
arXiv 1609.08326, there reduced to its diagonal), when group h has moved by d_h along its applied gradient a_h:

    sum_g  <-  sum_g max(0, 1 + lambda a_h . d_h)          for every other group g

The diagonal alone would do nothing here: between two updates of a group its own weights do not move; the others'
do. The outer product needs one number a step and no second copy of anything. lambda = 0 turns it off.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_adacc.errors import UserError
from megatron_adacc.optim.policy import depth_of


def groups_by_connectivity(named_parameters: Iterable[tuple[str, Parameter]], count: int) -> list[list[Parameter]]:
    """Parameters in `count` groups of consecutive layers, in the order of the model.

    A layer is what shares the name up to its first whole number ("decoder.layers.3"). What has no number goes with its
    neighbour: the embeddings with the first layer, final norm and head with the last. Layers are dealt out so that the
    groups' sizes in elements are as even as consecutive layers allow.

    Raises:
        UserError: fewer layers than groups, or count < 1.
    """
    named = list(named_parameters)
    members = consecutive([(name, parameter.numel()) for name, parameter in named], count)
    return [[named[index][1] for index in group] for group in members]


def consecutive(named_sizes: Sequence[tuple[str, int]], count: int) -> list[list[int]]:
    """The same for names with elements: the positions in each group."""
    units: list[list[int]] = []
    names: list[str] = []
    waiting: list[int] = []
    for index, (name, _) in enumerate(named_sizes):
        depth = depth_of(name)
        if depth is None:
            (units[-1] if units else waiting).append(index)
            continue
        parts = name.split(".")
        layer = ".".join(parts[: parts.index(str(depth)) + 1] if str(depth) in parts else parts[:1])
        if layer in names:
            units[names.index(layer)].append(index)
        else:
            names.append(layer)
            units.append([*waiting, index])
            waiting = []
    if waiting:
        units.append(waiting)
    if not 1 <= count <= len(units):
        raise UserError(
            f"{count} groups were asked for, but the model has {len(units)} layers to put into them; ask for a number "
            f"from 1 to {len(units)}."
        )
    return _evenly(units, [sum(named_sizes[index][1] for index in unit) for unit in units], count)


def _evenly(units: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    groups: list[list[int]] = []
    first = 0
    for left in range(count, 0, -1):
        goal = sum(sizes[first:]) / left
        end, total = first + 1, sizes[first]
        # Each later group needs a layer of its own.
        while end < len(units) - (left - 1) and (left == 1 or total + sizes[end] / 2 <= goal):
            total += sizes[end]
            end += 1
        groups.append([index for unit in units[first:end] for index in unit])
        first = end
    return groups


class DelayedGroups:
    """Steps an optimizer with one group's parameters at a time.

        delayed = DelayedGroups(optimizer, groups_by_connectivity(model.named_parameters(), 4))
        loss.backward(); delayed.step(); optimizer.zero_grad()

    It gives the optimizer the due group's corrected mean as `.grad`, and no gradient for the others. With one group it
    is optimizer.step(). A step that the caller skips (inf under loss scaling) is simply not made. Each group has one
    G-th of the updates: Adam's betas and the schedule count updates of a parameter, not steps.

    Args:
        optimizer: any torch optimizer that passes over parameters without a gradient. One that has `fetch_ahead`, as
            BlockAdamW, is told which parameters are updated next.
        groups: every parameter of the optimizer in exactly one.
        compensation: lambda, in units of 1 / loss: gradients must be unscaled when `step` is called.
        all_reduce: sums a float64 tensor in place over the ranks that hold parts of a group, where weights are sharded.
        counted: whether a parameter counts in that sum on this rank; None: all do. Of ranks that hold the same, one
            counts it.

    Raises:
        UserError: a parameter in no group or in two, or a negative lambda.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[Sequence[Parameter]],
        *,
        compensation: float = 10.0,
        all_reduce: Callable[[Tensor], object] | None = None,
        counted: Callable[[Parameter], bool] | None = None,
    ) -> None:
        grouped = [parameter for group in groups for parameter in group]
        optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len({id(p) for p in grouped}) != len(grouped) or {id(p) for p in grouped} != {id(p) for p in optimized}:
            raise UserError(
                f"The groups hold {len(grouped)} parameters and the optimizer {len(optimized)}; each parameter of the "
                "optimizer must be in exactly one group."
            )
        if not 0.0 <= compensation < float("inf"):
            raise UserError(f"The compensation lambda must be a number >= 0, but it is {compensation}.")
        self._optimizer = optimizer
        self._groups = [list(group) for group in groups]
        self._compensation = compensation
        self._all_reduce = all_reduce
        self._counted = counted
        self._step = 0
        self._sums: dict[Parameter, Tensor] = {}
        self._counts: dict[Parameter, int] = {}
        self._factors = [1.0] * len(self._groups)
        self._fetch_ahead()

    @torch.no_grad()
    def step(self) -> None:
        """Take in the gradients of this step and update the group that is due."""
        if len(self._groups) == 1:
            self._optimizer.step()
            self._step += 1
            return
        due = self._step % len(self._groups)
        for index, group in enumerate(self._groups):
            for parameter in group:
                self._take_in(parameter, self._factors[index], due=index == due)
            self._factors[index] = 1.0
        moving = [parameter for parameter in self._groups[due] if parameter.grad is not None]
        before = [parameter.detach().clone() for parameter in moving] if self._compensation else []
        self._optimizer.step()
        self._step += 1
        self._fetch_ahead()
        if self._compensation:
            factor = max(0.0, 1.0 + self._compensation * self._fall(moving, before))
            self._factors = [1.0 if index == due else factor for index in range(len(self._groups))]

    def held_bytes(self) -> int:
        """Bytes of the sums: up to 4 a parameter, for the groups that are not due."""
        return sum(total.nbytes for total in self._sums.values())

    def group_sizes(self) -> list[int]:
        """Elements of each group."""
        return [sum(parameter.numel() for parameter in group) for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on bit for bit, beside the optimizer's state; tensors are not copied."""
        order = [parameter for group in self._groups for parameter in group]
        return {
            "step": self._step,
            "groups": [len(group) for group in self._groups],
            "factors": list(self._factors),
            "sums": {index: self._sums[parameter] for index, parameter in enumerate(order) if parameter in self._sums},
            "counts": {index: self._counts.get(parameter, 0) for index, parameter in enumerate(order)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`.

        Raises:
            UserError: saved with other groups.
        """
        sizes = [len(group) for group in self._groups]
        if state["groups"] != sizes:
            raise UserError(
                f"The saved gradients are of groups of {state['groups']} parameters, these are of {sizes}; use the "
                "number of groups that the run was saved with, or start them anew."
            )
        order = [parameter for group in self._groups for parameter in group]
        self._step = state["step"]
        self._factors = list(state["factors"])
        self._sums = {order[i]: total.to(order[i].device, copy=True) for i, total in state["sums"].items()}
        self._counts = {order[i]: count for i, count in state["counts"].items() if count}
        self._fetch_ahead()

    def groups(self) -> list[list[Parameter]]:
        """The groups, in the order of their turns."""
        return [list(group) for group in self._groups]

    def _fetch_ahead(self) -> None:
        """State that is away comes back for the group that is due next. Without delay all is due in every step: that
        would bring back everything."""
        fetch = getattr(self._optimizer, "fetch_ahead", None)
        if fetch is not None and len(self._groups) > 1:
            fetch(self._groups[self._step % len(self._groups)])

    def _take_in(self, parameter: Parameter, factor: float, *, due: bool) -> None:
        """Add this step's gradient to the parameter's sum; `.grad` becomes the mean if due, else None."""
        grad, total = parameter.grad, self._sums.get(parameter)
        if total is not None and factor != 1.0:
            total.mul_(factor)
        if grad is not None:
            self._counts[parameter] = self._counts.get(parameter, 0) + 1
            if total is None:
                total = grad.to(torch.float32, copy=True)
            else:
                total.add_(grad)
        parameter.grad = None
        if not due:
            if total is not None:
                self._sums[parameter] = total
            return
        self._sums.pop(parameter, None)
        count = self._counts.pop(parameter, 0)
        if total is not None:
            parameter.grad = total.div_(count).to(parameter.dtype)

    def _fall(self, moving: list[Parameter], before: list[Tensor]) -> float:
        """a . d: the loss's change to first order by the update, negative for a descent."""
        device = self._groups[0][0].device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for parameter, old in zip(moving, before, strict=True):
            assert parameter.grad is not None
            if self._counted is not None and not self._counted(parameter):
                continue
            moved = (parameter.detach() - old).to(torch.float32)
            total += (parameter.grad.to(torch.float32) * moved).sum(dtype=torch.float64).to(device)
        if self._all_reduce is not None:
            self._all_reduce(total)
        return float(total)
