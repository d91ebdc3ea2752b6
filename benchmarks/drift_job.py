"""pretrain_gpt.py in which channels of every layer's norm outputs grow at one step, without a change of what the model
computes: the norm's weight and bias times FACTOR, the columns of the linear behind it divided by FACTOR.

    DRIFT_AT=250 python benchmarks/drift_job.py <flags of pretrain_gpt.py>
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from megatron_adacc.megatron import launch

# Before Megatron is imported: it imports names of torch.cuda by value.
launch.prepare("pretrain_gpt.py")

import torch

from megatron_adacc.megatron import observe

ROOT = Path(__file__).resolve().parent.parent
AT = int(os.environ["DRIFT_AT"])
FACTOR = float(os.environ.get("DRIFT_FACTOR", "20"))
CHANNELS = 2  # of each norm


def grow(layers: list[Any]) -> None:
    """Others in each layer, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in layers:
            for norm, linear in (
                (layer.input_layernorm, layer.self_attention.linear_qkv),
                (layer.pre_mlp_layernorm, layer.mlp.linear_fc1),
            ):
                channels = torch.randperm(norm.weight.numel(), generator=generator)[:CHANNELS]
                norm.weight[channels] *= FACTOR
                norm.bias[channels] *= FACTOR
                linear.weight[:, channels] /= FACTOR


around_step = observe.Observer.around_step


def drifting(observer: observe.Observer, step: Any) -> tuple:
    if step.iteration == AT:
        grow([m for chunk in step.model for m in chunk.modules() if hasattr(m, "input_layernorm")])
    return around_step(observer, step)


observe.Observer.around_step = drifting  # type: ignore[method-assign]
sys.argv[0] = str(ROOT / "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
