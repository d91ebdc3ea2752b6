"""Layers of other people: gradients torch.equal to the plain run, with dropout and its random numbers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.graph import LayerGraph, Role

CALLS = 4  # two are traced


def step(model: nn.Module, call: Callable[[nn.Module, int], Tensor], seed: int) -> list[Tensor]:
    """Loss, every parameter gradient, and the state of the random generator afterwards."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = call(model, seed)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, torch.get_rng_state()]


def compare(model: nn.Module, layers: Callable[[nn.Module], Any], call: Any, plan: str) -> list[LayerGraph]:
    """Train a copy under the plan and the model without; returns the graphs that were traced."""
    attached = copy.deepcopy(model)
    with attach(layers(attached), plan, min_bytes=0) as handle:
        for seed in range(CALLS):
            expected, found = step(model, call, seed), step(attached, call, seed)
            assert len(expected) == len(found)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), seed
            assert handle.stored_bytes() == 0
        assert handle.traced_forwards == 2
        if plan == "recompute":
            assert any(str(a) == "recompute" for layer in handle.plan.layers for _, a in layer.actions)
        return handle.graphs


def token_loss(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    return model(tokens).last_hidden_state.square().mean()


def huggingface(name: str, attention: str) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """A tiny model with random weights, and where its layers are."""
    import transformers as hf

    common: dict[str, Any] = {"vocab_size": 64, "attn_implementation": attention}
    if name == "gpt2":
        config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, **common)
        return hf.GPT2Model(config), lambda m: m.h
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if name == "llama":
        config = hf.LlamaConfig(num_key_value_heads=2, use_cache=False, **sizes, **common)
        return hf.LlamaModel(config), lambda m: m.layers
    config = hf.BertConfig(max_position_embeddings=32, **sizes, **common)
    return hf.BertModel(config, add_pooling_layer=False), lambda m: m.encoder.layer


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("plan", ["keep", "recompute"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_hugging_face(name: str, attention: str, plan: str) -> None:
    model, layers = huggingface(name, attention)
    (graph,) = compare(model.train(), layers, token_loss, plan)
    found = {graph.role(b) for b in graph.saved}
    assert {Role.QUERY_KEY_VALUE, Role.LINEAR_INPUT} <= found
    assert (Role.ATTENTION_PROBABILITIES in found) == (attention == "eager" or name != "llama")


@pytest.mark.parametrize("plan", ["keep", "recompute"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_torch_transformer_encoder_layer(norm_first: bool, plan: str) -> None:
    layers = [nn.TransformerEncoderLayer(32, 4, 64, norm_first=norm_first, batch_first=True) for _ in range(2)]

    def call(model: nn.Module, seed: int) -> Tensor:
        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(seed))
        return model(x.requires_grad_()).square().mean()

    compare(nn.Sequential(*layers), list, call, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hugging_face_under_autocast(dtype: torch.dtype) -> None:
    """Autocast keeps the cast weights for the second use within its region: they are named as constants at
    most, and a later region makes new ones."""
    model, layers = huggingface("llama", "eager")

    def call(model: nn.Module, seed: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return token_loss(model, seed) + token_loss(model, seed + 100)

    attached = copy.deepcopy(model)
    with attach(layers(attached), "recompute", min_bytes=0) as handle:
        for seed in range(CALLS):
            expected, found = step(model, call, seed), step(attached, call, seed)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), seed
            assert handle.stored_bytes() == 0


def test_frozen_layers_save_less_and_the_graph_shows_it() -> None:
    model, layers = huggingface("gpt2", "eager")
    (full,) = compare(model, layers, token_loss, "recompute")
    for layer in model.h:
        layer.mlp.requires_grad_(False)
    (frozen,) = compare(model, layers, token_loss, "recompute")

    # The inputs of both frozen linears: the norm's output and the activation's.
    gone = {full.buffers[b].site for b in full.saved} - {frozen.buffers[b].site for b in frozen.saved}
    assert gone == {"ln_2/native_layer_norm.0", "mlp.act/mul#3.0"}
    assert full.activation_bytes - frozen.activation_bytes == (2 * 12 * 32 + 2 * 12 * 128) * 4


class Lora(nn.Module):
    """A frozen linear with a trained low-rank addition."""

    def __init__(self, linear: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(self.dropout(x)))


@pytest.mark.parametrize("plan", ["keep", "recompute"])
def test_lora_adapters_on_a_frozen_model(plan: str) -> None:
    model, layers = huggingface("llama", "sdpa")
    model.requires_grad_(False)
    for layer in model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Lora(layer.self_attn.v_proj)
    graphs = []
    attached = copy.deepcopy(model)
    with attach(layers(attached), plan, min_bytes=0) as handle:
        for seed in range(CALLS):
            expected, found = step(model, token_loss, seed), step(attached, token_loss, seed)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), seed
        graphs = handle.graphs
    # The first layer's input needs no gradient, the second's does: two keys, each traced twice.
    assert handle.traced_forwards == 4
    assert len(graphs) == 2
    assert len(graphs[0].packs) < len(graphs[1].packs)
