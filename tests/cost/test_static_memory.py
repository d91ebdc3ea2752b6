"""Static bytes: known totals, the distributed optimizer's padding by hand, what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, Tensor, count, padded_vocab_size, tensors
from megatron_adacc.cost.in_flight import Schedule
from megatron_adacc.cost.job import SMALL_BYTES, Job
from megatron_adacc.cost.outer_activations import OuterShape
from megatron_adacc.cost.outer_activations import of_chunk as outer_of_chunk
from megatron_adacc.cost.static_memory import Buckets, Training, gathered_bytes, of_chunk, of_elements, step_bytes
from megatron_adacc.errors import UserError

GPT_345M = GptModel(24, 1024, 16, 16, 64, 4096, 50304, 1024)
LLAMA_7B = GptModel(
    32, 4096, 32, 32, 128, 11008, 32000, 0, gated=True, linear_bias=False, qkv_bias=False, norm_bias=False, tied=False
)


@pytest.mark.parametrize(
    ("training", "parameters", "gradients", "master", "moments", "total"),
    [
        (Training("fp16"), 3.0e9, 3.0e9, 6.0e9, 12.0e9, 24.0e9),
        (Training("fp16", gradient_bytes=4), 3.0e9, 6.0e9, 6.0e9, 12.0e9, 27.0e9),
        (Training("bf16"), 3.0e9, 6.0e9, 6.0e9, 12.0e9, 27.0e9),
        (Training("fp32"), 6.0e9, 6.0e9, 0, 12.0e9, 24.0e9),
        (Training("fp32", "sgd"), 6.0e9, 6.0e9, 0, 6.0e9, 18.0e9),
        (Training("fp32", "sgd", momentum=False), 6.0e9, 6.0e9, 0, 0, 12.0e9),
        (Training("fp16", zero=1, data_parallel=8), 3.0e9, 3.0e9, 0.75e9, 1.5e9, 8.25e9),
        (Training("fp16", zero=2, data_parallel=8), 3.0e9, 0.375e9, 0.75e9, 1.5e9, 5.625e9),
        (Training("fp16", zero=3, data_parallel=8), 0.375e9, 0.375e9, 0.75e9, 1.5e9, 3.0e9),
        (Training("fp16", zero=0, data_parallel=8), 3.0e9, 3.0e9, 6.0e9, 12.0e9, 24.0e9),
    ],
)
def test_1_5_billion_parameters(training, parameters, gradients, master, moments, total):
    found = of_elements(1_500_000_000, training)
    assert (found.parameters, found.gradients, found.master, found.moments) == (parameters, gradients, master, moments)
    assert found.total == total


def test_parameter_counts_that_are_known():
    # GPT-2 medium has 354,823,168 with 50,257 words; 47 more rows of 1024 pad them.
    assert count(GPT_345M) == 354_823_168 + 47 * 1024
    assert count(LLAMA_7B) == 6_738_415_616
    assert padded_vocab_size(50257, 128, 1) == 50304
    assert padded_vocab_size(50257, 128, 8) == 51200
    assert padded_vocab_size(128, 128, 1) == 128


def test_tensor_parallel_ranks_share_what_megatron_splits():
    half = {tensor.name: tensor.elements for tensor in tensors(GPT_345M, Chunk(1), 2)}
    whole = {tensor.name: tensor.elements for tensor in tensors(GPT_345M, Chunk(1))}
    split = {name for name in whole if half[name] == whole[name] // 2}
    assert {name for name in whole if half[name] == whole[name]} == whole.keys() - split
    assert split == {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.mlp.linear_fc2.weight",
    }


def test_a_tied_weight_lies_on_both_ends_of_a_pipeline():
    first, last = tensors(GPT_345M, Chunk(12, last=False)), tensors(GPT_345M, Chunk(12, first=False))
    assert (first[0].name, first[0].shared) == ("embedding.word_embeddings.weight", True)
    assert (last[-1].name, last[-1].shared) == ("output_layer.weight", True)
    total = sum(tensor.elements for chunk in (first, last) for tensor in chunk)
    assert total == count(GPT_345M) + first[0].elements


def test_padding_of_the_distributed_optimizer():
    # Last tensor first: c at 0..10, b at 64..164, a at 192..392; the bucket ends at 512, a multiple of 2 * 64 and 128.
    chunk = (Tensor("a", 200), Tensor("b", 100), Tensor("c", 10))
    training = Training("bf16", zero=1, data_parallel=2)
    ranks = [of_chunk(chunk, training, rank) for rank in range(2)]
    assert [(rank.parameters, rank.gradients) for rank in ranks] == [(1024, 2048)] * 2
    # Rank 0 owns 0..256: all of c and b and 64 of a; rank 1 the other 136 of a.
    assert [rank.master for rank in ranks] == [4 * 174, 4 * 136]
    assert [rank.moments for rank in ranks] == [8 * 174, 8 * 136]
    assert of_chunk(chunk, training) == ranks[0]
    # Buckets of 100 elements: c and b end at 256, a begins there and ends at 512.
    cut = [of_chunk(chunk, training, rank, Buckets(100)) for rank in range(2)]
    assert [rank.master for rank in cut] == [4 * (10 + 64 + 128), 4 * (36 + 72)]
    assert of_chunk(chunk, training, 0, Buckets(None, for_bandwidth=True)).parameters == 2 * 2**16


@given(
    sizes=st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=8),
    ranks=st.integers(1, 9),
    bucket=st.none() | st.integers(1, 900),
)
@settings(max_examples=200, deadline=None)
def test_the_ranks_of_a_distributed_optimizer_own_everything_once(sizes, ranks, bucket):
    chunk = tuple(Tensor(str(index), elements, shared) for index, (elements, shared) in enumerate(sizes))
    training = Training("bf16", zero=1, data_parallel=ranks)
    shares = [of_chunk(chunk, training, rank, Buckets(bucket)) for rank in range(ranks)]
    assert sum(share.master for share in shares) == 4 * sum(tensor.elements for tensor in chunk)
    (buffer,) = {share.parameters // 2 for share in shares}
    assert buffer % ranks == buffer % 128 == 0
    assert buffer >= sum(tensor.elements for tensor in chunk)
    assert of_chunk(chunk, training, None, Buckets(bucket)).master == max(share.master for share in shares)


def test_a_shared_tensor_has_a_bucket_of_its_own():
    chunk = (Tensor("embedding", 100, shared=True), Tensor("b", 100))
    assert of_chunk(chunk, Training("fp32", zero=1, data_parallel=1)).parameters == 4 * (128 + 128)
    unshared = (Tensor("embedding", 100), Tensor("b", 100))
    assert of_chunk(unshared, Training("fp32", zero=1, data_parallel=1)).parameters == 4 * 256
    assert of_chunk((Tensor("a", 1),) * 3, Training("fp32", zero=1, data_parallel=1)).parameters == 4 * 256


def test_bytes_of_an_optimizer_step():
    chunk = (Tensor("a", 200), Tensor("b", 100))
    assert step_bytes([chunk], Training("fp16"), cuda=True) == 4 * 300
    assert step_bytes([chunk], Training("bf16"), cuda=True) == 0
    assert step_bytes([chunk], Training("bf16", torch_optimizer=True), cuda=True) == 4 * 300
    assert step_bytes([chunk], Training("bf16", torch_optimizer=True), cuda=False) == 2 * 4 * 200
    assert step_bytes([chunk], Training("fp16", "sgd", torch_optimizer=True), cuda=False) == 4 * 300 + 4 * 200


def test_what_fully_sharded_ranks_gather():
    chunk = tensors(GPT_345M, Chunk(24))
    words, layer = 50304 * 1024 + 1024 * 1024, 12 * 1024**2 + 13 * 1024
    assert gathered_bytes(chunk, Training("bf16", zero=1, data_parallel=8)) == 0
    assert gathered_bytes(chunk, Training("bf16", zero=2, data_parallel=8)) == 4 * words
    # The embedding is the largest unit; the final norm is in none.
    assert gathered_bytes(chunk, Training("bf16", zero=3, data_parallel=8)) == 2 * (3 * words + 2 * 1024)
    middle = tensors(GPT_345M, Chunk(6, first=False, last=False))
    assert gathered_bytes(middle, Training("bf16", zero=3, data_parallel=8)) == 2 * 3 * layer


SHAPE = OuterShape(1024, 8, 1024, 50304, element_bytes=2, gradient_bytes=2, scores_heads=16)


def test_outside_the_layers_of_gpt_345m():
    tokens, hidden, logits = 8 * 1024, 1024, 8 * 1024 * 50304
    assert SHAPE.embedding_bytes == 16 * tokens + tokens * hidden
    assert SHAPE.head_bytes == 4 * tokens * hidden + 8 * tokens + 4 * logits + 9 * tokens
    assert SHAPE.mask_bytes == 8 * 1024 * 1024
    assert SHAPE.scratch_bytes == 2 * 8 * 16 * 1024**2
    assert replace(SHAPE, scores_heads=0, rotary_channels=64).scratch_bytes == 4 * 64 * 1024 + 4 * 32
    alone = outer_of_chunk(SHAPE, Chunk(24))
    assert alone.held == 1_690_574_848
    assert alone.forward_end == 2 * logits + 52 * tokens
    assert alone.backward == 2 * 50304 * 1024
    assert outer_of_chunk(SHAPE, Chunk(6, first=False, last=False)).held == 0
    # The received and the sent gradient, and the one in the making.
    assert outer_of_chunk(SHAPE, Chunk(6, first=False, last=False)).stage_gradients == 3 * 2 * tokens * hidden


def test_the_room_of_a_job_adds_up():
    job = Job(GPT_345M, ((Chunk(24),),), Schedule(1, 4), Training("fp16"), SHAPE)
    room, (outer,) = job.room(0), job.outer_bytes(0)
    static = of_chunk(tensors(GPT_345M, Chunk(24)), Training("fp16")).total
    assert room.static.total == static == 16 * count(GPT_345M)
    everything = static + SHAPE.scratch_bytes + SHAPE.batch_bytes + SMALL_BYTES
    assert room.fixed_bytes == everything + outer.embedding + outer.backward
    assert room.fixed_bytes + room.transient_bytes == everything + outer.held + outer.forward_end
    assert room.step_bytes == everything + 4 * count(GPT_345M)


def test_micro_batches_in_flight_are_counted():
    stages = tuple((Chunk(6, stage == 0, stage == 3),) for stage in range(4))
    job = Job(GPT_345M, stages, Schedule(4, 8), Training("fp16"), SHAPE)
    one = replace(job, schedule=Schedule(4, 1))
    assert job.room(0).fixed_bytes - one.room(0).fixed_bytes == 3 * SHAPE.embedding_bytes
    assert job.room(3) == one.room(3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Training("int8"), "The precision is 'int8', but the known ones are fp32, fp16, bf16."),
        (lambda: Training("fp32", "adagrad"), "The optimizer is 'adagrad', but the known ones are adam, sgd."),
        (lambda: Training("fp32", zero=4), "The ZeRO stage is 4, but the stages are 0, 1, 2 and 3."),
        (lambda: Training("fp32", data_parallel=0), "0 data-parallel ranks are given"),
        (
            lambda: Training("fp32", gradient_bytes=2),
            "Gradients of fp32 parameters have 4 bytes an element, but 2 is given.",
        ),
        (lambda: of_elements(0, Training("fp32")), "0 parameters are given, but a model has at least one."),
        (lambda: of_chunk((Tensor("a", 1),), Training("fp32"), 1), "Rank 1 does not exist"),
        (lambda: replace(GPT_345M, hidden_size=0), "hidden_size is 0, but it must be at least 1."),
        (lambda: replace(GPT_345M, positions=-1), "positions is -1"),
        (lambda: replace(GPT_345M, num_query_groups=5), "16 attention heads cannot be divided into 5 groups."),
        (lambda: tensors(GPT_345M, Chunk(24), 3), "num_attention_heads is 16, which 3 tensor-parallel ranks"),
        (lambda: replace(SHAPE, sequence=0), "sequence is 0, but it must be at least 1."),
        (lambda: replace(SHAPE, element_bytes=1), "An element has 2 or 4 bytes, but 1 is given."),
        (lambda: replace(SHAPE, tensor_parallel=5), "A vocabulary of 50304 cannot be shared equally by 5 ranks."),
        (
            lambda: replace(SHAPE, sequence=1023, tensor_parallel=2, sequence_parallel=True),
            "Sequences of 1023 tokens cannot be shared equally by 2 ranks.",
        ),
        (
            lambda: Job(GPT_345M, ((Chunk(23),),), Schedule(), Training("fp16"), SHAPE),
            "The stages hold 23 layers, but the model has 24.",
        ),
    ],
)
def test_sentences(make, sentence):
    with pytest.raises(UserError) as caught:
        make()
    assert sentence in str(caught.value)
