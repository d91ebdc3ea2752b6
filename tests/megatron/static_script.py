"""pretrain_gpt.py that says at its end which storages its rank holds, and for what. For the tests of the memory model.

Writes $STATIC_BYTES.<rank>, JSON: bytes of parameters, gradients, master copies, moments and step counters, each
storage counted once, and of module buffers, and [name, elements, shared] of every parameter of every chunk.
"""

import functools
import json
import os
import runpy
from pathlib import Path

from megatron_adacc.megatron import launch

# Before Megatron is imported: it imports names of torch.cuda by value.
launch.prepare("static_script.py")

import torch  # noqa: E402
from megatron.training import training  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
kept = {}
original = training.setup_model_and_optimizer


@functools.wraps(original)
def setup(*args, **kwargs):
    result = original(*args, **kwargs)
    kept["chunks"], kept["optimizer"] = result[:2]
    return result


def main():
    training.setup_model_and_optimizer = setup
    try:
        with launch.user_errors("static_script.py"):
            runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="pretrain_gpt")["main"]()
    finally:
        training.setup_model_and_optimizer = original
    seen = set()

    def new_bytes(tensors):
        total = 0
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total

    parameters = [parameter for chunk in kept["chunks"] for parameter in chunk.parameters()]
    optimizer = kept["optimizer"]
    inner = [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]
    state = [
        (name, value)
        for each in inner
        for values in each.state.values()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    content = {
        "parameters": new_bytes(parameters),
        "buffers": new_bytes(
            buffer
            for chunk in kept["chunks"]
            for module in chunk.modules()  # DDP has another meaning for buffers()
            for buffer in module._buffers.values()
            if buffer is not None
        ),
        "gradients": new_bytes(
            tensor
            for parameter in parameters
            for tensor in (getattr(parameter, "main_grad", None),)
            if tensor is not None
        ),
        "master": new_bytes(value for each in inner for group in each.param_groups for value in group["params"]),
        "moments": new_bytes(value for name, value in state if name != "step"),
        "counters": new_bytes(value for name, value in state if name == "step"),
        "names": [
            [
                [
                    name.removeprefix("module.").removeprefix("module."),
                    parameter.numel(),
                    getattr(parameter, "shared_embedding", False),
                ]
                for name, parameter in chunk.named_parameters()
            ]
            for chunk in kept["chunks"]
        ],
    }
    Path(f"{os.environ['STATIC_BYTES']}.{torch.distributed.get_rank()}").write_text(json.dumps(content))


main()
