"""Bytes held by Megatron's own GPT on the CPU: plain, core-attention recompute and full recompute."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from megatron_adacc.runtime.held import HeldMeter

# hidden 32, 4 heads, sequence 16, batch 2, fp32
HIDDEN_BYTES = 16 * 2 * 32 * 4
SCORES_BYTES = 2 * 4 * 16 * 16 * 4
MASK_BYTES = 16 * 16
NORM_BYTES = HIDDEN_BYTES + 2 * (16 * 2 * 4)  # input, mean and inverse deviation
# What one layer holds: two norms; the inputs of qkv, of the projection and of fc1; q, k and v in one
# storage; the softmax; GELU's input and output.
LAYER_BYTES = 2 * NORM_BYTES + 3 * HIDDEN_BYTES + 3 * HIDDEN_BYTES + SCORES_BYTES + 2 * 4 * HIDDEN_BYTES
# Embedding: token and position indices (the positions are one row, expanded). Final norm and the input of
# the output layer. Loss: softmax over 64 words, target mask and masked target.
OUTSIDE_BYTES = (2 * 16 * 8 + 16 * 8) + (NORM_BYTES + HIDDEN_BYTES) + (16 * 2 * 64 * 4 + 32 + 32 * 8)
RNG_STATE_BYTES = 5056


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """One rank of Megatron on the CPU. Without dropout its RNG tracker is not needed."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(random, "_get_cuda_rng_state", lambda **_: None)
    patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    yield
    patch.undo()
    random.initialize_rng_tracker(force_reset=True)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def gpt(**options: Any) -> tuple[nn.Module, Callable[[], torch.Tensor], dict[str, nn.Module]]:
    """Megatron's GPT of two layers: the model, its forward to the loss, its layers by name."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        **options,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)
    tokens = torch.randint(0, 64, (2, 16))
    positions = torch.arange(16).expand(2, 16)
    mask = torch.ones(1, 1, 16, 16).triu(1).bool()
    layers = {f"layer{index}": layer for index, layer in enumerate(model.decoder.layers)}
    return model, lambda: model(tokens, positions, mask, labels=tokens), layers


@pytest.mark.usefixtures("megatron")
class TestMegatronLayers:
    def test_plain(self, held: Callable, hooked_bytes: Callable, node_kinds: Callable) -> None:
        model, forward, layers = gpt()
        result = held(forward, model, **layers)
        # masked_fill_ on a view of the scores: the mask hangs on CopySlices, and the layers share it.
        assert "CopySlices" in node_kinds(forward())
        assert result.layer_bytes == {"layer0": LAYER_BYTES + MASK_BYTES, "layer1": LAYER_BYTES}
        assert result.outside_bytes == OUTSIDE_BYTES
        assert result.total_bytes == hooked_bytes(forward, model) == 166_048
        assert (result.other_device_bytes, result.unread_nodes) == (0, ())

    def test_core_attention_recompute(self, held: Callable, hooked_bytes: Callable) -> None:
        model, forward, layers = gpt(recompute_granularity="selective", recompute_modules=["core_attn"])
        result = held(forward, model, **layers)
        # The softmax goes. The mask stays, as an argument of the checkpoint, beside the mask type (one int32
        # tensor) and the RNG state.
        layer_bytes = LAYER_BYTES - SCORES_BYTES + 4 + RNG_STATE_BYTES
        assert result.layer_bytes == {"layer0": layer_bytes + MASK_BYTES, "layer1": layer_bytes}
        assert result.outside_bytes == OUTSIDE_BYTES
        assert result.total_bytes == hooked_bytes(forward, model) + 2 * RNG_STATE_BYTES

    @pytest.mark.parametrize("group", [1, 2])
    def test_full_recompute(self, held: Callable, hooked_bytes: Callable, group: int) -> None:
        model, forward, layers = gpt(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=group
        )
        result = held(forward, model, **layers)
        checkpoint_bytes = HIDDEN_BYTES + RNG_STATE_BYTES
        assert result.layer_bytes == {
            "layer0": checkpoint_bytes + MASK_BYTES,
            "layer1": checkpoint_bytes if group == 1 else 0,
        }
        assert result.outside_bytes == OUTSIDE_BYTES
        assert result.total_bytes == hooked_bytes(forward, model) + (2 // group) * RNG_STATE_BYTES

    def test_training_is_bit_identical(self) -> None:
        def train(measured: bool) -> list[torch.Tensor]:
            torch.manual_seed(1)
            model, forward, layers = gpt(recompute_granularity="selective", recompute_modules=["core_attn"])
            meter = HeldMeter(layers, model)
            for _ in range(2):
                loss = forward()
                if measured:
                    assert meter.measure(loss).total_bytes > 0
                loss.mean().backward()
            meter.close()
            return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

        assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))
