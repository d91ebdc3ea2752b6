"""Adapters: a frozen model learns through small trainable matrices beside its linear layers."""

from megatron_adacc.adapters.bases import quantize_base, quantized_modules
from megatron_adacc.adapters.lora import (
    Adapted,
    LoraLinear,
    adapted_modules,
    adapter_state,
    freeze_base,
    inject,
    load_adapter_state,
    merge,
    unmerge,
)

__all__ = [
    "Adapted", "LoraLinear", "adapted_modules", "adapter_state", "freeze_base", "inject", "load_adapter_state", "merge",
    "quantize_base", "quantized_modules", "unmerge",
]  # fmt: skip
