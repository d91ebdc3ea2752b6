"""Megatron's own GPT layers on the CPU under the engine: right counts, right gradients, right random numbers."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_adacc import attach
from megatron_adacc.devices import cpu
from megatron_adacc.graph import Role, trace

# hidden 32, 4 heads, sequence 16, batch 2, fp32
HIDDEN_BYTES = 16 * 2 * 32 * 4


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    """One rank of Megatron on the CPU."""
    was_installed = cpu.is_installed()
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    random.initialize_rng_tracker(force_reset=True)
    random.model_parallel_cuda_manual_seed(1)
    yield
    random.initialize_rng_tracker(force_reset=True)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    if not was_installed:
        cpu.uninstall()


def gpt(dropout: float, *, llama: bool = False, fusions: bool = False) -> nn.Module:
    """Megatron's GPT of two layers; ``llama``: SwiGLU, RoPE, GQA and RMSNorm."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    options: dict[str, Any] = {}
    if llama:
        options = {
            "gated_linear_unit": True, "activation_func": F.silu, "normalization": "RMSNorm",
            "num_query_groups": 2, "add_bias_linear": False,
        }  # fmt: skip
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=fusions,
        bias_activation_fusion=fusions,
        **options,
    )
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm" if llama else None)
    embedding = "rope" if llama else "learned_absolute"
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=16, position_embedding_type=embedding)


def inputs(seed: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(16).expand(2, 16)
    mask = torch.ones(1, 1, 16, 16).triu(1).bool()
    return (tokens, positions, mask), {"labels": tokens}


def step(model: nn.Module, seed: int) -> list[Tensor]:
    """Loss, all gradients, and the states of every random generator afterwards."""
    from megatron.core.tensor_parallel import random

    torch.manual_seed(seed)
    random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    args, kwargs = inputs(seed)
    loss = model(*args, **kwargs).sum()
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    states = random.get_cuda_rng_tracker().get_states().values()
    return [loss.detach(), *gradients, torch.get_rng_state(), *states]


def test_counts_of_a_two_layer_model() -> None:
    args, kwargs = inputs(0)
    graph = trace(gpt(0.0), *args, **kwargs)
    assert len(graph.packs) == 62
    assert graph.parameter_packs == 19
    assert graph.activation_bytes == 166_048


def test_no_save_without_gradients() -> None:
    model = gpt(0.0)
    args, kwargs = inputs(0)
    with attach(model.decoder.layers, "recompute", min_bytes=0) as handle:
        with torch.no_grad():
            model(*args, **kwargs)
        assert handle.traced_forwards == 0
        assert handle.stored_bytes() == 0


@pytest.mark.parametrize("plan", ["keep", "recompute"])
@pytest.mark.parametrize("fusions", [False, True], ids=["unfused", "compiled"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
def test_gradients_and_random_states(llama: bool, dropout: float, fusions: bool, plan: str) -> None:
    model = gpt(dropout, llama=llama, fusions=fusions)
    attached = gpt(dropout, llama=llama, fusions=fusions)
    if fusions:
        step(model, 0)  # compiles: before that, the fused functions are run another way
    with attach(attached.decoder.layers, plan, min_bytes=0) as handle:
        for seed in range(4):
            expected, found = step(model, seed), step(attached, seed)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), seed
            assert handle.stored_bytes() == 0
        assert handle.traced_forwards == 2  # one for each layer of the class, in the first step
        assert len(handle.graphs) == 1


def test_held_bytes_under_recompute() -> None:
    model = gpt(0.1)
    args, kwargs = inputs(0)
    with attach(model.decoder.layers, "recompute", min_bytes=0) as handle:
        for _ in range(2):
            output = model(*args, **kwargs)
        # Two layer inputs, the attention mask, and for each layer the bits of three dropout masks with the two
        # values that each block of bits stands for: scores 2 x 4 x 16 x 16, hidden 16 x 2 x 32 twice.
        bits = 2 * 4 * 16 * 16 // 8 + 2 * (16 * 2 * 32 // 8)
        assert handle.stored_bytes() == 2 * HIDDEN_BYTES + 16 * 16 + 2 * (bits + 3 * 2 * 4)
        del output
        assert handle.stored_bytes() == 0


def test_held_bytes_under_recompute_of_compiled_functions() -> None:
    """What the fused bias-dropout-adds return is rebuilt from their masks, which are bool: one byte a value."""
    model = gpt(0.1, fusions=True)
    step(model, 0)  # compiles
    args, kwargs = inputs(0)
    with attach(model.decoder.layers, "recompute", min_bytes=0) as handle:
        for _ in range(2):
            output = model(*args, **kwargs)
        bits = 2 * 4 * 16 * 16 // 8 + 2 * (16 * 2 * 32 // 8)
        assert handle.stored_bytes() == 2 * HIDDEN_BYTES + 16 * 16 + 2 * (bits + 2 * 4)
        del output
        assert handle.stored_bytes() == 0


def test_roles() -> None:
    args, kwargs = inputs(0)
    model = gpt(0.1)
    with attach(model.decoder.layers, "keep") as handle:
        model(*args, **kwargs)
        (graph,) = handle.graphs
    roles = [graph.role(b) for b in graph.saved]
    assert roles.count(Role.DROPOUT_MASK) == 3
    assert roles.count(Role.ATTENTION_PROBABILITIES) == 2
    assert roles.count(Role.NORM_OUTPUT) == 2
    assert roles.count(Role.QUERY_KEY_VALUE) == 1
    assert roles.count(Role.STATISTICS) == 4
    assert roles.count(Role.LINEAR_INPUT) == 2


def test_compiling_works_after_the_bridge_is_gone() -> None:
    """Dynamo's table of torch's functions, made under the bridge, has the stand-ins in place of the originals."""
    program = """
import torch
from megatron_adacc.devices import cpu

def compiled():
    return torch.compile(lambda x: x + torch.arange(3, device=x.device), backend="eager", fullgraph=True)(torch.ones(3))

for _ in range(2):
    cpu.install()
    assert compiled().tolist() == [1, 2, 3]
    cpu.uninstall()
    assert compiled().tolist() == [1, 2, 3]
print("compiled")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


def test_the_flag_attaches_the_papers_direct_quantization() -> None:
    from megatron_adacc.megatron import strategies
    from megatron_adacc.runtime.policy import QuantizeAll, policy_for

    strategy = strategies.get("quantize")
    assert strategy.name in strategies.STRATEGIES
    assert policy_for(strategy.plan, 1024) == QuantizeAll(1024)
