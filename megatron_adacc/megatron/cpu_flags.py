"""Megatron's GPU-only switches, turned off for a run on the CPU and said in one line.

A command line written for a GPU job runs on a laptop as it is. What has a counterpart on the CPU takes
it; what has none, and would change the numbers (8-bit and 4-bit formats), is refused.
"""

import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron_adacc.errors import UserError


@dataclass(frozen=True)
class _Switch:
    """args.<name> becomes `value` on the CPU; `flag` is how a user would write it."""

    name: str
    value: Any
    flag: str


_SWITCHES = (
    _Switch("distributed_backend", "gloo", "--distributed-backend gloo"),
    _Switch("transformer_impl", "local", "--transformer-impl local"),
    _Switch("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion"),
    _Switch("no_persist_layer_norm", True, "--no-persist-layer-norm"),
    _Switch("masked_softmax_fusion", False, "--no-masked-softmax-fusion"),
    _Switch("apply_rope_fusion", False, "--no-rope-fusion"),
    _Switch("use_flash_attn", False, "no --use-flash-attn"),
    _Switch("tp_comm_overlap", False, "no --tp-comm-overlap"),
    _Switch("cuda_graph_impl", "none", "--cuda-graph-impl none"),
)

# Gloo has no sum that scales as it adds: Megatron-FSDP then scales before.
_MEGATRON_FSDP_SWITCHES = (_Switch("gradient_reduce_div_fusion", False, "--no-gradient-reduce-div-fusion"),)

_REFUSED = {"fp8": "--fp8-format", "fp4": "--fp4-format"}


def adjust(args: Namespace) -> list[str]:
    """Turn off in `args` what needs a GPU; returns the changed flags. UserError for what has no counterpart."""
    for name, flag in _REFUSED.items():
        if getattr(args, name, None):
            raise UserError(f"{flag} needs a GPU that has the format: leave it out to train on the CPU.")
    if getattr(args, "context_parallel_size", 1) > 1:
        raise UserError(
            "--context-parallel-size above 1 needs Transformer Engine's attention, which needs a GPU: leave it out to "
            "train on the CPU."
        )
    megatron_fsdp = getattr(args, "use_megatron_fsdp", False)
    changed = []
    for switch in (*_SWITCHES, *(_MEGATRON_FSDP_SWITCHES if megatron_fsdp else ())):
        if getattr(args, switch.name, switch.value) not in (switch.value, None):
            setattr(args, switch.name, switch.value)
            changed.append(switch.flag)
    # Megatron asks for one hardware queue where tensor parallelism overlaps communication, and for more than one where
    # parameters are gathered meanwhile; a CPU has none.
    if megatron_fsdp or getattr(args, "use_torch_fsdp2", False):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    else:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return changed
