"""Run one layer forward and backward beside the training, to see what its backward needs.

The layer runs on stand-ins: parameters, and attributes with a gradient, that share the data of its own but have
gradients, hooks and Megatron's ``main_grad`` of their own, copies of its module buffers, and copies of its inputs
(cost/arguments.py). So no gradient of the training, no hook of its parameters and no running statistic is touched.
Put back are torch's, Python's and NumPy's default generators, torch generators among the layer's attributes and
arguments, and plain attributes of the modules. What else a forward changes (Megatron's tracker of random states) is
the caller's to put back. Hooks of modules run as in any forward and backward.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_adacc.cost.arguments import ArgumentCopies, snapshot
from megatron_adacc.graph.storages import flatten_tensors, has_plain_storage


class _Seed(torch.autograd.Function):
    """A scalar whose backward gives each output a random gradient, which nobody but the engine holds."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.layouts = [(o.size(), o.stride(), o.dtype, o.device) for o in outputs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        made = [
            torch.empty_strided(size, stride, dtype=dtype, device=device).normal_()
            for size, stride, dtype, device in ctx.layouts
        ]
        return made[0] if len(made) == 1 else tuple(made)


def _stand_in(parameter: nn.Parameter, scratch: dict[torch.dtype, Tensor]) -> nn.Parameter:
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    attributes = dict(parameter.__dict__)
    attributes.pop("_backward_hooks", None)
    attributes.pop("_post_accumulate_grad_hooks", None)
    main_grad = attributes.get("main_grad")
    if isinstance(main_grad, Tensor):
        # One scratch for all: what is accumulated there is read by nobody.
        space = scratch.get(main_grad.dtype)
        if space is None or space.numel() < main_grad.numel():
            space = scratch[main_grad.dtype] = main_grad.new_zeros(main_grad.numel())
        attributes["main_grad"] = space[: main_grad.numel()].view(main_grad.shape)
    if "get_main_grad" in attributes:  # Megatron-FSDP's way to it, bound to the parameter
        attributes["get_main_grad"] = lambda: torch.zeros_like(stand_in)
    stand_in.__dict__.update(attributes)
    return stand_in


@contextlib.contextmanager
def stand_ins(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Inside, the module tree has stand-ins for its parameters and module buffers; gives those of parameters by
    the id of what they stand for."""
    scratch: dict[torch.dtype, Tensor] = {}
    found: dict[int, nn.Parameter] = {}
    copies: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for submodule in module.modules():
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    if id(parameter) not in found:
                        found[id(parameter)] = _stand_in(parameter, scratch)
                    replaced.append((submodule._parameters, name, parameter))
            for name, value in submodule.__dict__.items():
                # FSDP1 puts views of its flat parameter there: a backward must not go on to it.
                if isinstance(value, Tensor) and value.requires_grad and has_plain_storage(value):
                    if id(value) not in found:
                        found[id(value)] = nn.Parameter(value.detach())
                    replaced.append((submodule.__dict__, name, value))
            for name, buffer in submodule._buffers.items():
                if isinstance(buffer, Tensor):
                    if id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                    replaced.append((submodule._buffers, name, buffer))
        for table, name, original in replaced:
            table[name] = found[id(original)] if id(original) in found else copies[id(original)]
        yield found
    finally:
        for table, name, original in replaced:
            table[name] = original


@contextlib.contextmanager
def _other_generators_put_back(holders: list[Any]) -> Iterator[None]:
    """Generators that are not torch's default ones: Python's, NumPy's, and those that a layer has or is given."""
    own = [(g, g.get_state()) for g in _generators(holders)]
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for generator, before in own:
            generator.set_state(before)


def _generators(value: Any) -> Iterator[torch.Generator]:
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, nn.Module):
        for submodule in value.modules():
            for attribute in submodule.__dict__.values():
                if isinstance(attribute, (torch.Generator, list, tuple)):
                    yield from _generators(attribute)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _generators(one)
    elif isinstance(value, dict):
        yield from _generators(list(value.values()))


@contextlib.contextmanager
def _attributes_put_back(module: nn.Module) -> Iterator[None]:
    """What a forward leaves on its modules, such as a count of calls or the last output, is then as before."""
    before = [(submodule.__dict__, dict(submodule.__dict__)) for submodule in module.modules()]
    try:
        yield
    finally:
        for table, attributes in before:
            for name in table.keys() - attributes.keys():
                del table[name]
            for name, value in attributes.items():
                if name not in table or table[name] is not value:
                    table[name] = value


class Rehearsal:
    """A layer call that can be run again, forward and backward, without a trace in the training.

    ``forward`` is the layer's own forward, not that of an attached layer. To be made before the call that it repeats
    where that changes its arguments: lists and objects are remembered as they are now, tensors by reference."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._module = module
        self._forward = forward
        self.args, self.kwargs = snapshot((args, kwargs))

    @contextlib.contextmanager
    def begin(self) -> Iterator[Call]:
        """Inside, the call can be run on stand-ins and copies of its inputs, which are there already."""
        tensors = [t for value in (*self.args, *self.kwargs.values()) for _, t in flatten_tensors(value, "")]
        tensors += [*self._module.parameters(), *self._module.buffers()]
        fake = any(type(t).__name__ == "FakeTensor" for t in tensors)
        devices = set() if fake else {t.device.index or 0 for t in tensors if t.device.type == "cuda"}
        copies = ArgumentCopies()
        with (
            torch.random.fork_rng(sorted(devices)),
            _other_generators_put_back([self._module, self.args, self.kwargs]),
            _attributes_put_back(self._module),
            torch.enable_grad(),
            stand_ins(self._module) as parameters,
        ):
            args, kwargs = copies.of((self.args, self.kwargs))
            yield Call(self._forward, args, kwargs, list(parameters.values()))


class Call:
    """One run of a rehearsal."""

    def __init__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        parameters: list[nn.Parameter],
    ) -> None:  # fmt: skip
        self._forward = forward
        self._args = args
        self._kwargs = kwargs
        self.parameters = parameters

    @property
    def inputs(self) -> list[Tensor]:
        """The copied tensor arguments."""
        values = (*self._args, *self._kwargs.values())
        return [t for value in values for _, t in flatten_tensors(value, "")]

    def forward(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Tensor:
        """Run the layer under the hooks; gives a scalar whose backward() runs the layer's with random gradients of
        its outputs, and nothing where no output has one."""
        args, kwargs = snapshot((self._args, self._kwargs))  # each run appends to lists and caches of its own
        with saved_tensors_hooks(pack, unpack):
            outputs = [t for _, t in flatten_tensors(self._forward(*args, **kwargs), "") if t.requires_grad]
        del args, kwargs
        if not outputs:
            return torch.zeros((), requires_grad=True)
        loss = _Seed.apply(*outputs)
        assert isinstance(loss, Tensor)
        return loss

    def drop_parameter_gradients(self) -> None:
        """Free each parameter's gradient as soon as it is complete, as a training does that adds it to a main
        gradient."""

        def drop(parameter: Tensor) -> None:
            main_grad = getattr(parameter, "main_grad", None)
            if isinstance(main_grad, Tensor) and parameter.grad is not None and parameter.device.type == "cpu":
                parameter.grad.to(main_grad.dtype)  # the copy that the CPU makes to add to wider elements
            parameter.grad = None

        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(drop)
