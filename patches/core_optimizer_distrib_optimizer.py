"""megatron/core/optimizer/distrib_optimizer.py: resuming without apex and Transformer Engine.

When a checkpoint is loaded, the distributed optimizer is asked for its state dict before its first step.
With torch's Adam that state does not exist yet, and an assertion about the step count ends the run. So the
state is made as torch itself would make it in the first step: count zero, moments zero.

A model in fp32 has no separate main parameters: the optimizer's are views of the model's, and copying the
loaded values into them is an error of autograd's unless gradients are off, which they are not there.

And the step count of torch's Adam is lost on the way: it comes back as one tensor that all parameters
share, and that what was there before the load is copied into. The bias correction is then another, and the
resumed run silently leaves the path of the run that was never stopped. So each parameter gets a count of its
own, with the value that the checkpoint has for its group.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_adacc.patches.patching import Patch


def _make(original: Callable) -> Callable:
    import torch

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if not self.optimizer.state[parameter]:
                        self.optimizer.state[parameter] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        }
        return original(self)

    return state_dict


def _make_without_grad(original: Callable) -> Callable:
    import torch

    return torch.no_grad()(original)


def _make_own_steps(original: Callable) -> Callable:
    import torch

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        # Megatron asserts that all groups have the same.
        step = state_dict["optimizer"]["param_groups"][0].get("step")
        original(self, state_dict)
        if step is not None:
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):  # a state of ours counts in an int of its own
                    state["step"] = torch.tensor(float(step))

    return load_state_dict


def _make_moments_out(original: Callable) -> Callable:
    @functools.wraps(original)
    def get(self: Any, model_param: Any) -> dict[str, Any]:
        if not hasattr(self.optimizer, "set_moments"):
            return original(self, model_param)
        group, place = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][place]
        m, v = self.optimizer.moments(parameter)
        return {"param": parameter, "exp_avg": m, "exp_avg_sq": v}

    return get


def _make_moments_in(original: Callable) -> Callable:
    import torch

    @functools.wraps(original)
    @torch.no_grad()
    def put(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if not hasattr(self.optimizer, "set_moments"):
            return original(self, model_param, tensors)
        group, place = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][place]
        parameter.copy_(tensors["param"])
        self.optimizer.set_moments(parameter, tensors["exp_avg"], tensors["exp_avg_sq"])

    return put


def state_patches() -> list[Patch]:
    """For an optimizer that keeps its moments in a form of its own, and gives and takes them in float32 by
    `moments(parameter)` and `set_moments(parameter, m, v)`: so checkpoints hold what torch's Adam has."""
    return [
        Patch(
            module="megatron.core.optimizer.distrib_optimizer",
            symbol=f"DistributedOptimizer.{name}",
            parameters=parameters,
            checked_with=("0.19.2",),
            make=make,
            why="checkpoints of the distributed optimizer hold moments in float32",
        )
        for name, parameters, make in (
            ("_get_main_param_and_optimizer_states", ("self", "model_param"), _make_moments_out),
            ("_set_main_param_and_optimizer_states", ("self", "model_param", "tensors"), _make_moments_in),
        )
    ]


def patches() -> list[Patch]:
    """Loading into the distributed optimizer; the first step's state only without apex and Transformer Engine."""
    from megatron.core.optimizer import distrib_optimizer

    loading = Patch(
        module="megatron.core.optimizer.distrib_optimizer",
        symbol="DistributedOptimizer._set_main_param_and_optimizer_states",
        parameters=("self", "model_param", "tensors"),
        checked_with=("0.19.2",),
        make=_make_without_grad,
        why="a run in fp32 with the distributed optimizer resumes",
    )
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return [loading]
    return [
        loading,
        Patch(
            module="megatron.core.optimizer.distrib_optimizer",
            symbol="DistributedOptimizer.load_state_dict",
            parameters=("self", "state_dict"),
            checked_with=("0.19.2",),
            make=_make_own_steps,
            why="a resumed run counts each parameter's steps on its own",
        ),
        Patch(
            module="megatron.core.optimizer.distrib_optimizer",
            symbol="DistributedOptimizer.state_dict",
            parameters=("self",),
            checked_with=("0.19.2",),
            make=_make,
            why="a run with the distributed optimizer resumes with torch's Adam",
        ),
    ]
