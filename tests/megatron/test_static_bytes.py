"""The static bytes of real training jobs on the CPU, storage by storage, against the memory model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, tensors
from megatron_adacc.cost.static_memory import ONE_BUCKET, Buckets, StaticBytes, Training, of_chunk

SCRIPT = Path(__file__).with_name("static_script.py")
PARTS = ("parameters", "gradients", "master", "moments", "counters")

# The fixture's model: 2 layers, hidden 32, 4 heads, 16 positions, 128 words.
GPT = GptModel(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=128,
    vocab_size=128,
    positions=16,
)
LLAMA = replace(
    GPT,
    num_query_groups=2,
    ffn_hidden_size=96,
    positions=0,
    gated=True,
    linear_bias=False,
    qkv_bias=False,
    norm_bias=False,
    tied=False,
)
LLAMA_FLAGS = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "position_embedding_type": "rope",
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "max_position_embeddings": 16,
}
# Nothing for torch.compile to do.
UNFUSED = {"no_bias_gelu_fusion": True, "no_bias_swiglu_fusion": True, "no_bias_dropout_fusion": True}


@pytest.fixture
def held(trained, tmp_path):
    """held(ranks=..., **flags): what every rank says it holds after a step."""

    def run(ranks: int = 1, **settings: object) -> list[dict]:
        out = tmp_path / "static"
        environment = {"STATIC_BYTES": str(out)}
        trained(iterations=1, ranks=ranks, report=False, script=SCRIPT, env=environment, **UNFUSED, **settings)
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]

    return run


def check(found: dict, expected: StaticBytes, chunks: list[tuple]) -> None:
    assert found["names"] == [[[each.name, each.elements, each.shared] for each in chunk] for chunk in chunks]
    assert {name: found[name] for name in PARTS} == {name: getattr(expected, name) for name in PARTS}


@pytest.mark.parametrize(
    ("flags", "training"),
    [
        ({}, Training("fp32", torch_optimizer=True)),
        ({"bf16": True, "grad_reduce_in_bf16": True}, Training("bf16", gradient_bytes=2, torch_optimizer=True)),
        ({"fp16": True, "initial_loss_scale": 1024}, Training("fp16", torch_optimizer=True)),
        ({"optimizer": "sgd"}, Training("fp32", "sgd", torch_optimizer=True)),
        ({"bf16": True, "use_distributed_optimizer": True}, Training("bf16", zero=1, torch_optimizer=True)),
    ],
)
def test_one_rank(held, flags, training):
    chunk = tensors(GPT, Chunk(2))
    (found,) = held(**flags)
    check(found, of_chunk(chunk, training), [chunk])


def test_llama(held):
    chunk = tensors(LLAMA, Chunk(2))
    (found,) = held(bf16=True, **LLAMA_FLAGS)
    check(found, of_chunk(chunk, Training("bf16", torch_optimizer=True)), [chunk])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("flags", "training", "buckets"),
    [
        (
            {"use_distributed_optimizer": True, "bf16": True},
            Training("bf16", zero=1, data_parallel=2, torch_optimizer=True),
            ONE_BUCKET,
        ),
        (
            {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 5000},
            Training("fp32", zero=1, data_parallel=2, torch_optimizer=True),
            Buckets(5000),
        ),
    ],
)
def test_two_data_parallel_ranks(held, flags, training, buckets):
    chunk = tensors(GPT, Chunk(2))
    for rank, found in enumerate(held(ranks=2, **flags)):
        check(found, of_chunk(chunk, training, rank, buckets), [chunk])


@pytest.mark.distributed
def test_two_tensor_parallel_ranks(held):
    chunk = tensors(replace(LLAMA, vocab_size=256), Chunk(2), tensor_parallel=2)
    for found in held(ranks=2, tensor_model_parallel_size=2, **LLAMA_FLAGS):
        check(found, of_chunk(chunk, Training("fp32", torch_optimizer=True)), [chunk])


@pytest.mark.distributed
def test_two_pipeline_stages_share_the_embedding(held):
    training = Training("fp32", zero=1, torch_optimizer=True)
    ranks = held(ranks=2, pipeline_model_parallel_size=2, use_distributed_optimizer=True)
    for found, chunk in zip(ranks, (Chunk(1, last=False), Chunk(1, first=False)), strict=True):
        parameters = tensors(GPT, chunk)
        check(found, of_chunk(parameters, training), [parameters])


@pytest.mark.distributed
def test_chunks_of_an_interleaved_pipeline(held):
    ranks = held(
        ranks=2, pipeline_model_parallel_size=2, num_layers=4, num_layers_per_virtual_pipeline_stage=1, bf16=True
    )
    model, training = replace(GPT, num_layers=4), Training("bf16", torch_optimizer=True)
    expected = [
        [Chunk(1, first=True, last=False), Chunk(1, first=False, last=False)],
        [Chunk(1, first=False, last=False), Chunk(1, first=False, last=True)],
    ]
    for found, chunks in zip(ranks, expected, strict=True):
        parameters = [tensors(model, chunk) for chunk in chunks]
        total = StaticBytes()
        for chunk in parameters:
            total += of_chunk(chunk, training)
        check(found, total, parameters)
