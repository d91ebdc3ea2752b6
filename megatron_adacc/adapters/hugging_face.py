"""Megatron's tensors under the names and in the order of Hugging Face's GPT-2 and Llama.

Both sides compute the same function; what differs is how rows of a linear layer are ordered and which layers are one.
With a heads, g groups of keys and values and d channels of a head:

    Megatron                                            GPT-2                        Llama
    self_attention.linear_qkv                           attn.c_attn                  self_attn.q_proj, k_proj, v_proj
      rows, for each group: a/g queries, key, value       rows: all q, all k, all v    rows: heads one after the other
    self_attention.linear_proj                          attn.c_proj                  self_attn.o_proj
    mlp.linear_fc1  (gated: rows of gate, then value)   mlp.c_fc                     mlp.gate_proj, up_proj
    mlp.linear_fc2                                      mlp.c_proj                   mlp.down_proj

A weight is [out, in]; GPT-2's Conv1D stores [in, out]. An adapter's B has the rows of the weight, and is split with it;
each part has the whole of A. PEFT keeps A and B as for an nn.Linear beside a Conv1D too (``fan_in_fan_out``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_adacc.errors import UserError

# Hugging Face's names of a layer's linear layers, in the order of Megatron's rows.
_LINEARS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "self_attention.linear_qkv": ("attn.c_attn",),
        "self_attention.linear_proj": ("attn.c_proj",),
        "mlp.linear_fc1": ("mlp.c_fc",),
        "mlp.linear_fc2": ("mlp.c_proj",),
    },
    "llama": {
        "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.linear_proj": ("self_attn.o_proj",),
        "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": ("mlp.down_proj",),
    },
}
_LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
_NORMS = {
    "gpt2": {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"},
    "llama": {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"},
}
_OUTER = {
    "gpt2": {
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.final_layernorm.weight": "transformer.ln_f.weight",
        "decoder.final_layernorm.bias": "transformer.ln_f.bias",
        "output_layer.weight": "lm_head.weight",
    },
    "llama": {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    },
}
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.([^.]+)")


@dataclass(frozen=True)
class Family:
    """``name``: "gpt2" or "llama". ``heads`` queries share ``groups`` of keys and values, of ``channels`` each."""

    name: str
    heads: int
    groups: int
    channels: int


def split_qkv(rows: Tensor, family: Family) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of Megatron's linear_qkv, [(heads + 2 groups) channels, ...], as those of queries, keys and values, each
    head after head."""
    each = family.heads // family.groups
    grouped = rows.unflatten(0, (family.groups, each + 2, family.channels))
    queries, keys, values = grouped.split((each, 1, 1), dim=1)
    return queries.flatten(0, 2), keys.flatten(0, 2), values.flatten(0, 2)


def split_rows(path: str, rows: Tensor, family: Family) -> dict[str, Tensor]:
    """What each of Hugging Face's linear layers has of the rows (of a weight, a bias or a B) of Megatron's `path`.

    Raises UserError for a layer that has no counterpart."""
    names = _LINEARS[family.name].get(path)
    if names is None:
        raise UserError(
            f"{path} has no counterpart in Hugging Face's {family.name}: an adapter can be exported beside "
            f"{', '.join(_LINEARS[family.name])}."
        )
    parts: tuple[Tensor, ...] = (rows,)
    if path == "self_attention.linear_qkv":
        parts = split_qkv(rows, family)
    elif len(names) == 2:
        parts = rows.chunk(2)
    if len(names) == 1:
        return {names[0]: torch.cat(parts)}
    return dict(zip(names, parts, strict=True))


def peft_tensors(state: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Adapters by Megatron's full names (lora_a [r, in], lora_b [out, r], layers numbered through the whole model) as
    the tensors of a PEFT adapter.

    Raises UserError for an adapter that has no counterpart."""
    found = {}
    for name, matrix in state.items():
        match = _IN_LAYER.fullmatch(name)
        assert match is not None, name
        number, path, kind = match.groups()
        if kind == "lora_a":
            parts = dict.fromkeys(split_rows(path, state[f"{name[:-1]}b"], family), matrix)
        else:
            parts = split_rows(path, matrix, family)
        for module, part in parts.items():
            letter = kind[-1].upper()
            full = f"base_model.model.{_LAYERS[family.name]}.{number}.{module}.lora_{letter}.weight"
            # Copies: a file of safetensors holds no two views of one storage.
            found[full] = part.clone(memory_format=torch.contiguous_format)
    return found


def peft_config(paths: Iterable[str], family: Family, rank: int, alpha: float, base: str | None) -> dict[str, Any]:
    """adapter_config.json of adapters beside Megatron's linear layers `paths`; `base`: Hugging Face's name or folder of
    the base, for who loads them without naming one."""
    modules = [module for path in paths for module in _LINEARS[family.name][path]]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": family.name == "gpt2",
        "target_modules": sorted(modules),
        "use_rslora": False,
        "inference_mode": True,
    }


def model_tensors(state: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """A whole model by Megatron's full names under Hugging Face's.

    Raises UserError for a tensor that has no counterpart."""
    found = {}
    for name, tensor in state.items():
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            if name not in _OUTER[family.name]:
                raise UserError(f"{name} has no counterpart in Hugging Face's {family.name}.")
            found[_OUTER[family.name][name]] = tensor
            continue
        number, path, kind = match.groups()
        norm = _NORMS[family.name].get(path)
        parts = {norm: tensor} if norm is not None else split_rows(path, tensor, family)
        for module, part in parts.items():
            if family.name == "gpt2" and norm is None and kind == "weight":
                part = part.T
            found[f"{_LAYERS[family.name]}.{number}.{module}.{kind}"] = part
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}
