"""pretrain_gpt.py that writes to the file MEASURED, as JSON, the CPU milliseconds of each training step, and bytes that
its rank holds through the training: base, adapters or trained parameters, gradients, optimizer state.

MEASURED=measured.json python benchmarks/finetuning_job.py <flags of pretrain_gpt.py, --adacc-report among them>
"""

import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_adacc.megatron import launch

# Before Megatron is imported: it imports names of torch.cuda by value.
launch.prepare("pretrain_gpt.py")

import torch  # noqa: E402
from megatron.training import training  # noqa: E402

from megatron_adacc.megatron import observe  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
milliseconds: list[float] = []
kept: dict[str, Any] = {}
around_step = observe.Observer.around_step
original_setup = training.setup_model_and_optimizer


def timed(observer: observe.Observer, step: Any) -> tuple:
    begun = time.process_time()
    result = around_step(observer, step)
    milliseconds.append((time.process_time() - begun) * 1e3)
    return result


@functools.wraps(original_setup)  # its parameters are looked at
def setup(*args: Any, **kwargs: Any) -> Any:
    result = original_setup(*args, **kwargs)
    kept["chunks"], kept["optimizer"] = result[:2]
    return result


def static_bytes() -> dict[str, int]:
    """Bytes of storages, each counted once."""
    seen: set[int] = set()

    def new_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
        found = 0
        for tensor in tensors:
            if tensor is not None and tensor.untyped_storage()._cdata not in seen:
                seen.add(tensor.untyped_storage()._cdata)
                found += tensor.untyped_storage().nbytes()
        return found

    parameters = [parameter for chunk in kept["chunks"] for parameter in chunk.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = kept["optimizer"]
    inner = [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]
    return {
        "trained": new_bytes(trained),
        "frozen": new_bytes(
            [*parameters, *(buffer for chunk in kept["chunks"] for _, buffer in chunk.named_buffers())]
        ),
        "gradients": new_bytes(getattr(parameter, "main_grad", None) for parameter in trained),
        "optimizer": new_bytes(
            value
            for each in inner
            for values in each.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ),
        "parameters_trained": sum(parameter.numel() for parameter in trained),
    }


observe.Observer.around_step = timed  # type: ignore
training.setup_model_and_optimizer = setup
sys.argv[0] = str(ROOT / "pretrain_gpt.py")
with launch.user_errors("pretrain_gpt.py"):
    runpy.run_path(sys.argv[0], run_name="pretrain_gpt")["main"]()
Path(os.environ["MEASURED"]).write_text(json.dumps({"cpu_ms": milliseconds, "static": static_bytes()}))
