"""PEFT's own adapters in a model of transformers, under attach(plan="auto")."""

import pytest
import torch
from auto_training import compare

from megatron_adacc import attach
from megatron_adacc.cost import measured
from megatron_adacc.cost.prices import CodecPrice
from megatron_adacc.graph.model import Origin
from megatron_adacc.planner.plan import Recompute

TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No prices on disk; those of codecs made up, because to time one takes 64 MiB."""
    monkeypatch.setenv("ADACC_CACHE_DIR", "off")
    monkeypatch.setattr(measured, "time_codec", lambda *_: CodecPrice(1.0, 1.0))


def llama():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def adapted():
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(llama(), config)


def loss_of(model, seed):
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=tokens, labels=tokens).loss


def layers_of(model):
    return model.base_model.model.model.layers


@pytest.mark.parametrize("limit", ["8GiB", "25%"])
def test_a_plan_leaves_every_bit_of_pefts_gradients(limit):
    model = adapted()
    # Not exact: all layers share the mask and the rotary table, which each is charged with.
    handle = compare(model, loss_of, limit=limit, layers=layers_of, exact=False)
    assert handle.stage.plan.lossless
    kinds = {type(action) for layer in handle.stage.plan.layers for _, action in layer.actions}
    assert (Recompute in kinds) is (limit == "25%")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 3 * 2 * 2


def saved_inputs(layers, run):
    """Bytes that are saved of the inputs of linear layers, by the layer's last name, in all layers."""
    handle = attach(layers, plan="keep", min_bytes=0)
    for seed in range(2):
        run(seed)
    found = {}
    for graph in handle.graphs:
        saved = set(graph.saved)
        for op in graph.ops:
            name = op.module.rpartition(".")[2]
            if name.endswith("_proj") and "mm" in op.target:
                own = [b for b in op.reads if graph.buffers[b].origin is not Origin.PARAMETER and b in saved]
                found[name] = found.get(name, 0) + sum(graph.buffers[b].nbytes for b in own)
    handle.detach()
    return found


def test_a_frozen_linear_holds_none_of_its_input():
    plain, with_adapters = llama(), adapted()
    every = saved_inputs(plain.model.layers, lambda seed: loss_of(plain, seed).backward())
    frozen = saved_inputs(layers_of(with_adapters), lambda seed: loss_of(with_adapters, seed).backward())
    assert every["down_proj"] > every["o_proj"] > 0
    assert frozen["down_proj"] == frozen["o_proj"] == 0
