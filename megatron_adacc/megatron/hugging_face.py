"""Which of Hugging Face's models a Megatron model is, and files that transformers and peft read.

transformers is imported where a whole model is written; peft is not needed.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_adacc.adapters import hugging_face as names
from megatron_adacc.adapters.hugging_face import Family
from megatron_adacc.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

# attribute of Megatron's arguments -> (its flag, its value in every model that has a counterpart)
_PLAIN: dict[str, tuple[str, Any]] = {
    "num_experts": ("--num-experts", None),
    "multi_latent_attention": ("--multi-latent-attention", False),
    "attention_output_gate": ("--attention-output-gate", False),
    "rotary_interleaved": ("--rotary-interleaved", False),
    "softmax_type": ("--softmax-type", "vanilla"),
    "window_size": ("--window-size", None),
    "quick_geglu": ("--quick-geglu", False),
    "squared_relu": ("--squared-relu", False),
    "apply_residual_connection_post_layernorm": ("--apply-residual-connection-post-layernorm", False),
    "qk_l2_norm": ("--qk-l2-norm", False),
    "use_mup": ("--use-mup", False),
    "activation_func_clamp_value": ("--activation-func-clamp-value", None),
    "glu_linear_offset": ("--glu-linear-offset", 0.0),
}
# As above, of what an adapter does not depend on, but a whole model does.
_PLAIN_BASE: dict[str, tuple[str, Any]] = {
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", False),
    "qk_layernorm": ("--qk-layernorm", False),
    "rotary_percent": ("--rotary-percent", 1.0),
    "rotary_seq_len_interpolation_factor": ("--rotary-seq-len-interpolation-factor", None),
    "use_rope_scaling": ("--use-rope-scaling", False),
    "no_rope_freq": ("--no-rope-freq", None),
}


def family_of(args: Namespace) -> Family:
    """The family of a model of these arguments, as far as adapters see it: where it has its linear layers.

    Raises UserError for a model that is neither GPT-2 nor Llama."""
    _check(args, _PLAIN)
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    shape = args.num_attention_heads, groups, args.kv_channels
    kinds = args.position_embedding_type, args.normalization, bool(args.swiglu)
    if kinds == ("rope", "RMSNorm", True):
        return Family("llama", *shape)
    plain = groups == args.num_attention_heads and args.kv_channels * groups == args.hidden_size
    if kinds == ("learned_absolute", "LayerNorm", False) and args.add_bias_linear and plain:
        return Family("gpt2", *shape)
    raise UserError(
        f"The model has {kinds[0]} positions, {kinds[1]} and {'SwiGLU' if kinds[2] else 'no SwiGLU'}. Hugging Face's "
        "GPT-2 has learned positions, LayerNorm, biases and as many keys as queries, its Llama rotary positions, "
        "RMSNorm and SwiGLU; other models cannot be exported yet."
    )


def _check(args: Namespace, plain: dict[str, tuple[str, Any]]) -> None:
    for name, (flag, value) in plain.items():
        found = getattr(args, name, value)
        if (found or None) != (value or None):  # False, None and 0 are one absence
            raise UserError(f"The model was trained with {flag} {found}, which Hugging Face's models here have not.")


def config_of(args: Namespace, family: Family, vocabulary: int, dtype: torch.dtype) -> PretrainedConfig:
    """The configuration of the whole model; `vocabulary`: rows of its embedding, with Megatron's padding.

    Raises UserError for a model whose layers compute something else."""
    import transformers

    _check(args, _PLAIN_BASE)
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if family.name == "gpt2":
        # Megatron's fused bias and GELU is the tanh form (megatron/core/fusions/fused_bias_gelu.py).
        tanh = args.bias_gelu_fusion or args.openai_gelu
        return transformers.GPT2Config(
            n_positions=args.max_position_embeddings,
            n_embd=args.hidden_size,
            n_layer=args.num_layers,
            n_head=family.heads,
            n_inner=args.ffn_hidden_size,
            activation_function="gelu_new" if tanh else "gelu",
            layer_norm_epsilon=args.layernorm_epsilon,
            architectures=["GPT2LMHeadModel"],
            **common,
        )
    if args.add_qkv_bias and not args.add_bias_linear:
        raise UserError("The model has biases of queries, keys and values alone, which Hugging Face's Llama has not.")
    return transformers.LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=family.heads,
        num_key_value_heads=family.groups,
        head_dim=family.channels,
        max_position_embeddings=args.max_position_embeddings,
        rms_norm_eps=args.layernorm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(args.rotary_base)},
        attention_bias=args.add_bias_linear,
        mlp_bias=args.add_bias_linear,
        architectures=["LlamaForCausalLM"],
        **common,
    )


def write_peft(state: Mapping[str, Tensor], args: Namespace, base: str | None, folder: Path) -> None:
    """Write adapters by Megatron's full names as a PEFT adapter into an empty folder. `args`: Megatron's arguments of
    the job that trained them; `base`: Hugging Face's name of their base. Raises UserError as family_of()."""
    from safetensors.torch import save_file

    family = family_of(args)
    tensors = names.peft_tensors(state, family)
    paths = dict.fromkeys(name.split(".", 3)[3].rpartition(".")[0] for name in state)
    config = names.peft_config(paths, family, args.adacc_lora_rank, args.adacc_lora_alpha, base)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_model(state: Mapping[str, Tensor], args: Namespace, folder: Path) -> None:
    """Write a whole model by Megatron's full names for transformers' from_pretrained() into an empty folder. Raises
    UserError as family_of() and config_of()."""
    from safetensors.torch import save_file

    family = family_of(args)
    embedding = state["embedding.word_embeddings.weight"]
    config = config_of(args, family, embedding.shape[0], embedding.dtype)
    save_file(names.model_tensors(state, family), folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
