"""Run one layer forward and backward beside the training, to see what its backward needs.

The layer runs on stand-ins: parameters that share the data of its own but have gradients, hooks and Megatron's
``main_grad`` of their own, copies of its module buffers, and copies of its inputs. So no gradient of the
training, no hook of its parameters and no running statistic is touched; torch's default generators are put
back. What else a forward changes (Megatron's tracker of random states) is the caller's to put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_adacc.graph.storages import flatten_tensors, has_plain_storage


class _Seed(torch.autograd.Function):
    """A scalar whose backward gives each output a random gradient, which nobody but the engine holds."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.layouts = [(o.size(), o.stride(), o.dtype, o.device) for o in outputs]
        return outputs[0].new_zeros(())

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
                # FSDP keeps DTensors there, which stand for other tensors: they are left alone.
                if parameter is not None and has_plain_storage(parameter):
                    if id(parameter) not in found:
                        found[id(parameter)] = _stand_in(parameter, scratch)
                    replaced.append((submodule._parameters, name, parameter))
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


def copied(value: Any) -> Any:
    """The arguments of a call with float tensors copied, those that require grad as leaves."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        made = made.copy_(value.detach()) if not _overlaps(value) else value.detach().clone()
        return made.requires_grad_(value.requires_grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(v) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(copied(v) for v in value)
    if type(value) is dict:
        return {k: copied(v) for k, v in value.items()}
    return value


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


class Rehearsal:
    """A layer call that can be run again, forward and backward, without a trace in the training.

    ``forward`` is the layer's own forward, not that of an attached layer."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._module = module
        self._forward = forward
        self.args = args
        self.kwargs = kwargs

    @contextlib.contextmanager
    def begin(self) -> Iterator[Call]:
        """Inside, the call can be run on stand-ins and copies of its inputs, which are there already."""
        tensors = [t for value in (*self.args, *self.kwargs.values()) for _, t in flatten_tensors(value, "")]
        devices = {t.device for t in tensors if t.device.type == "cuda"}
        if any(type(t).__name__ == "FakeTensor" for t in tensors):
            devices = set()
        with (
            torch.random.fork_rng([d.index or 0 for d in devices]),
            torch.enable_grad(),
            stand_ins(self._module) as parameters,
        ):
            yield Call(self._forward, copied(self.args), copied(self.kwargs), list(parameters.values()))


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
        its outputs. Raises ValueError where no output has a gradient."""
        with saved_tensors_hooks(pack, unpack):
            outputs = [t for _, t in flatten_tensors(self._forward(*self._args, **self._kwargs), "") if t.requires_grad]
        if not outputs:
            raise ValueError("no output of the layer requires a gradient")
        loss = _Seed.apply(*outputs)
        assert isinstance(loss, Tensor)
        return loss

    def drop_parameter_gradients(self) -> None:
        """Free each parameter's gradient as soon as it is complete, as a training does that adds it to a main
        gradient."""

        def drop(parameter: Tensor) -> None:
            parameter.grad = None

        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(drop)
