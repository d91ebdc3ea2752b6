"""The parameters of a dense GPT or Llama-style model, tensor by tensor, as one rank of Megatron holds them.

Sizes follow the modules of megatron.core.models.gpt (0.19) with h the hidden size, f the MLP's width, d the channels
of a head, a heads, g groups of keys and values, t tensor-parallel ranks; biases only where the model has them:

    word embedding       padded vocabulary / t * h     first stage; last stage too where the output layer is tied to it
    position embedding   positions * h                 first stage, learned positions only
    a layer              2 norms of h (weight, bias); norms of d for queries and keys
                         qkv  (a + 2 g) d h / t (bias (a + 2 g) d / t),  projection  a d h / t  (bias h)
                         fc1  f h / t, twice that where gated (bias likewise),  fc2  f h / t  (bias h)
    final norm, output layer (padded vocabulary / t * h)                       last stage
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_adacc.errors import UserError


@dataclass(frozen=True)
class GptModel:
    """What decides the sizes of a model's parameters. ``vocab_size`` is the padded one, ``positions`` 0 where they are
    not learned; ``qkv_bias`` is for queries, keys and values, ``linear_bias`` for the other linear layers too;
    ``norm_bias`` is true of LayerNorm and false of RMSNorm.

    Raises UserError for sizes that do not make a model."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    positions: int
    gated: bool = False
    linear_bias: bool = True
    qkv_bias: bool = True
    norm_bias: bool = True
    qk_norm: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"):
            _at_least_one(name, getattr(self, name))
        for name in ("ffn_hidden_size", "vocab_size"):
            _at_least_one(name, getattr(self, name))
        if self.positions < 0:
            raise UserError(f"positions is {self.positions}, but a model has none or more of them.")
        if self.num_attention_heads % self.num_query_groups:
            raise UserError(
                f"{self.num_attention_heads} attention heads cannot be divided into {self.num_query_groups} groups."
            )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name} is {value}, but it must be at least 1.")


@dataclass(frozen=True)
class Tensor:
    """One parameter of a rank: Megatron's name for it, its elements, and whether its gradient is shared between the
    first and the last pipeline stage (Megatron then gives it a bucket of its own)."""

    name: str
    elements: int
    shared: bool = False


@dataclass(frozen=True)
class Chunk:
    """A model chunk of one rank: its layers, and whether the embedding and the output layer are in it."""

    layers: int
    first: bool = True
    last: bool = True


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel: int) -> int:
    """The vocabulary that Megatron makes room for: a multiple of --make-vocab-size-divisible-by times the
    tensor-parallel ranks."""
    step = multiple * tensor_parallel
    return -(-vocab_size // step) * step


def tensors(model: GptModel, chunk: Chunk, tensor_parallel: int = 1) -> tuple[Tensor, ...]:
    """The parameters of one chunk on one of `tensor_parallel` ranks, in the order of Megatron's named_parameters().

    Raises UserError where a size cannot be divided among the ranks."""
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size"):
        value = getattr(model, name)
        if value % tensor_parallel:
            raise UserError(f"{name} is {value}, which {tensor_parallel} tensor-parallel ranks cannot share equally.")
    hidden = model.hidden_size
    word_embedding = model.vocab_size // tensor_parallel * hidden
    found: list[Tensor] = []
    if chunk.first:
        # The two copies of a tied weight on different stages share their gradient.
        shared = model.tied and not chunk.last
        found.append(Tensor("embedding.word_embeddings.weight", word_embedding, shared))
        if model.positions:
            found.append(Tensor("embedding.position_embeddings.weight", model.positions * hidden))
    for layer in range(chunk.layers):
        found += _layer(model, f"decoder.layers.{layer}.", tensor_parallel)
    if chunk.last:
        found += _norm(model, "decoder.final_layernorm", hidden)
        if not (model.tied and chunk.first):
            found.append(Tensor("output_layer.weight", word_embedding, shared=model.tied))
    return tuple(found)


def _layer(model: GptModel, prefix: str, tensor_parallel: int) -> list[Tensor]:
    hidden, channels = model.hidden_size, model.kv_channels
    queries = model.num_attention_heads * channels // tensor_parallel
    keys = model.num_query_groups * channels // tensor_parallel
    width = model.ffn_hidden_size // tensor_parallel
    expanded = 2 * width if model.gated else width
    found = _norm(model, f"{prefix}input_layernorm", hidden)
    found += _linear(f"{prefix}self_attention.linear_proj", queries * hidden, hidden, model.linear_bias)
    qkv = queries + 2 * keys
    found += _linear(f"{prefix}self_attention.linear_qkv", qkv * hidden, qkv, model.qkv_bias or model.linear_bias)
    if model.qk_norm:
        found += _norm(model, f"{prefix}self_attention.q_layernorm", channels)
        found += _norm(model, f"{prefix}self_attention.k_layernorm", channels)
    found += _norm(model, f"{prefix}pre_mlp_layernorm", hidden)
    found += _linear(f"{prefix}mlp.linear_fc1", expanded * hidden, expanded, model.linear_bias)
    found += _linear(f"{prefix}mlp.linear_fc2", width * hidden, hidden, model.linear_bias)
    return found


def _norm(model: GptModel, name: str, size: int) -> list[Tensor]:
    return _linear(name, size, size, model.norm_bias)


def _linear(name: str, weight: int, bias: int, has_bias: bool) -> list[Tensor]:
    found = [Tensor(f"{name}.weight", weight)]
    return [*found, Tensor(f"{name}.bias", bias)] if has_bias else found


def count(model: GptModel) -> int:
    """The parameters of the whole model, a tied weight counted once."""
    return sum(tensor.elements for tensor in tensors(model, Chunk(model.num_layers)))
