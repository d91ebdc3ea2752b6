"""A training script in which channels of every layer's norms are large from the first step on.

    python -m megatron_adacc.megatron.compare_job FACTOR SCRIPT [the script's flags]

In each norm before a linear layer, one channel of SPACING has its weight and bias multiplied by FACTOR, and the columns
of the linear layer behind it are divided by FACTOR: what the model computes stays the same, and what is saved for
backward has outlier channels, as large language models have by nature. The training then goes on as always; an
optimizer that moves a weight by the learning rate leaves the scale nearly as it is.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SPACING = 64
SEED = 1  # of the choice of channels: the same in every run, others in each norm


def plant(modules: list[Any], factor: float) -> int:
    """Multiply channels of the norms in these transformer layers in place; returns how many channels.

    ``modules``: all modules of the model, as ``model.modules()`` gives them."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    count = 0
    with torch.no_grad():
        for module in modules:
            for weight, bias, columns, zero_centered in _norms(module):
                channels = torch.randperm(weight.numel(), generator=generator)[: max(1, weight.numel() // SPACING)]
                channels = channels.to(weight.device)
                shift = 1.0 if zero_centered else 0.0
                weight[channels] = (weight[channels] + shift) * factor - shift
                if bias is not None:
                    bias[channels] *= factor
                columns[:, channels] /= factor
                count += len(channels)
    return count


def _norms(layer: Any) -> Iterator[tuple["Tensor", "Tensor | None", "Tensor", bool]]:
    """Weight and bias of each norm of a transformer layer, the weight of the linear layer behind it, and whether the
    norm adds one to its weight. The norm is a module, or part of the linear layer (Transformer Engine)."""
    if not hasattr(layer, "input_layernorm"):
        return
    zero_centered = bool(layer.config.layernorm_zero_centered_gamma)
    for norm, linear in (
        (layer.input_layernorm, getattr(layer.self_attention, "linear_qkv", None)),
        (layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None)),
    ):
        weight = getattr(norm, "weight", None)
        bias = getattr(norm, "bias", None)
        if weight is None and linear is not None:
            weight, bias = getattr(linear, "layer_norm_weight", None), getattr(linear, "layer_norm_bias", None)
        if weight is not None and linear is not None:
            yield weight, bias, linear.weight, zero_centered


def main() -> None:
    """Plant before the first step of a training that begins, then run the script."""
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m megatron_adacc.megatron.compare_job FACTOR SCRIPT [flags]")
    factor, script = float(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    name = os.path.basename(script)

    from megatron_adacc.errors import UserError
    from megatron_adacc.megatron import launch

    # Before Megatron is imported: it imports names of torch.cuda by value.
    launch.prepare(name)

    from megatron_adacc.megatron.console import say
    from megatron_adacc.patches import patching, training_training

    def planted(step: training_training.Step) -> tuple:
        if step.iteration == 1:
            count = plant([module for chunk in step.model for module in chunk.modules()], factor)
            if not count:
                raise UserError("No norm before a linear layer was found in this model: outliers cannot be planted.")
            step.optimizer.reload_model_params()  # mixed precision trains on copies of its own
            say(f"{count} channels of norms are planted, {factor:g} times as large")
        return step.run(step.forward_step, step.forward_backward)

    with launch.user_errors(name):
        patching.apply(training_training.patches(planted))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
