"""Stages of a job traced as on a GPU that is not there."""

import dataclasses
import gc
import json
import logging
import os
import resource
import runpy
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch._subclasses.fake_tensor import FakeTensor

from megatron_adacc.cost.outer_activations import of_chunk
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.timeline import record
from megatron_adacc.errors import UserError
from megatron_adacc.graph import Origin, Role
from megatron_adacc.megatron.offline import Settings, Stage, open_stage, trace_offline
from megatron_adacc.megatron.read_job import job_of_args

MIB = 2**20
SCRIPT = Path(__file__).with_name("offline_script.py")
summary = runpy.run_path(str(SCRIPT))["summary"]

PLAIN = ["--transformer-impl", "local", "--no-masked-softmax-fusion", "--vocab-size", "127"]
SMALL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "2", *PLAIN),
]
GPT_345M = [
    *("--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--micro-batch-size", "8", "--fp16", "--transformer-impl", "local", "--no-masked-softmax-fusion"),
    *("--vocab-size", "50257"),
]
LLAMA = [
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--group-query-attention", "--num-query-groups", "2"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]
SEQUENCE_PARALLEL = [*TENSOR_PARALLEL, "--sequence-parallel"]


def traced(flags: Sequence[str], **settings: int) -> Stage:
    return trace_offline(Settings(flags, **settings))  # type: ignore[arg-type]


def collectives(stage: Stage) -> list[str]:
    (layers,) = stage.layers
    return [op.target.split(".")[1] for op in layers.graph.ops if op.collective]


class TestRightValues:
    def test_gpt_345m(self) -> None:
        """Per layer s b h (34 + 5 a s / h) bytes of 16 bits (arXiv 2205.05198, eq. 1), the statistics of two norms in
        32 bits, and the causal mask, one byte an element."""
        stage = traced([*GPT_345M, "--no-create-attention-mask-in-dataloader"])
        (layers,) = stage.layers
        s, b, h, a = 1024, 8, 1024, 16
        assert layers.activation_bytes == s * b * h * (34 + 5 * a * s // h) + 4 * s * b * 4 + s * s == 957_480_960
        assert round(layers.activation_bytes / MIB, 1) == 913.1
        assert layers.places == tuple(range(24))
        assert layers.shared_bytes == 0
        assert stage.activation_bytes == 24 * layers.activation_bytes
        assert round(stage.activation_bytes / 2**30, 1) == 21.4
        assert stage.parameter_count == 354_871_296
        assert stage.parameter_bytes == 2 * 354_871_296

    def test_saved_set_is_that_of_cuda(self) -> None:
        (layers,) = traced(GPT_345M).layers
        graph = layers.graph
        masks = [b for b in graph.saved if graph.role(b) == Role.DROPOUT_MASK]
        assert [(graph.buffers[b].base.dtype, graph.buffers[b].nbytes) for b in masks] == [
            ("bool", 8 * 16 * 1024 * 1024),
            ("bool", 1024 * 8 * 1024),
            ("bool", 1024 * 8 * 1024),
        ]
        assert layers.evidence.two_valued == frozenset(masks)
        assert set(masks) == {b for b in layers.evidence.refused if graph.buffers[b].origin == Origin.OP}
        assert layers.evidence.verified == {b for b in graph.saved if graph.buffers[b].origin == Origin.OP} - set(masks)

    def test_a_mask_of_the_data_loader_is_one_for_all_layers(self) -> None:
        stage = traced(GPT_345M)
        (layers,) = stage.layers
        assert layers.shared_bytes == 8 * 1024 * 1024
        assert layers.activation_bytes == 957_480_960 - 1024 * 1024 + layers.shared_bytes
        own = layers.activation_bytes - layers.shared_bytes
        assert stage.activation_bytes == 24 * own + layers.shared_bytes

    def test_beside_the_layers(self) -> None:
        """Tokens and positions, the embedding's dropout mask, the last norm's input, statistics and output, and of
        the loss the softmax in 32 bits, the masked target ids and the mask of targets elsewhere."""
        (outside,) = traced(GPT_345M).outside
        s, b, h, v = 1024, 8, 1024, 50304
        ids = 2 * s * b * 8
        assert outside.graph.activation_bytes == ids + s * b * h * (1 + 2 + 2) + 2 * s * b * 4 + s * b * (4 * v + 1 + 8)

    @pytest.mark.parametrize("layout", [[], [*SEQUENCE_PARALLEL, "--pipeline-model-parallel-size", "2"]])
    @pytest.mark.parametrize("model", [["--fp16"], [*LLAMA, "--bf16"]], ids=["gpt", "llama"])
    def test_formulas_of_the_memory_model(self, layout: list[str], model: list[str]) -> None:
        """cost/outer_activations.py and cost/gpt_parameters.py count the same from sizes."""
        for rank in range(2 if layout else 1):
            stage = traced([*SMALL, *model, *layout], pipeline_rank=rank)
            job = job_of_args(stage.args)
            shape = dataclasses.replace(job.outer, cuda=True)
            (chunk,) = job.stages[rank]
            assert stage.outside[0].graph.activation_bytes == of_chunk(shape, chunk).held
            assert stage.layers[0].shared_bytes >= shape.mask_bytes
            assert stage.parameter_count == job.parameters(rank)

    def test_a_buffer_that_megatron_keeps_for_scores(self) -> None:
        assert traced(GPT_345M).workspace_bytes == 8 * 16 * 1024 * 1024 * 2

    @pytest.mark.parametrize(("precision", "width"), [([], 4), (["--bf16"], 2), (["--fp16"], 2)])
    def test_precision(self, precision: list[str], width: int) -> None:
        stage = traced([*SMALL, *precision])
        (layers,) = stage.layers
        s, b, h, a = 16, 2, 32, 4
        values = s * b * (16 * h + 2 * a * s)  # of the width; the rest are masks, statistics and the attention mask
        masks = s * b * (2 * h + a * s)
        assert layers.activation_bytes == width * values + masks + 4 * s * b * 4 + b * s * s
        assert stage.parameter_bytes == width * stage.parameter_count

    def test_llama(self) -> None:
        (layers,) = traced([*SMALL, *LLAMA, "--bf16"]).layers
        graph = layers.graph
        assert layers.count == 4
        assert {op.target.split(".")[1] for op in graph.ops} >= {"silu", "_softmax", "cat", "rsqrt"} or any(
            "rms_norm" in op.target for op in graph.ops
        )
        assert not [b for b in graph.saved if graph.role(b) == Role.DROPOUT_MASK]
        # the attention mask and the rotary embedding's angles
        assert {graph.buffers[b].name for b in layers.shared} >= {"attention_mask"}


def test_a_model_of_100_layers_needs_no_memory() -> None:
    traced(SMALL)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stage = traced(
        [
            *("--num-layers", "100", "--hidden-size", "12288", "--num-attention-heads", "96", "--seq-length", "2048"),
            *("--micro-batch-size", "1", "--fp16", *PLAIN),
        ]
    )
    assert stage.parameter_count > 180e9
    assert stage.layers_of_chunks == (100,)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


class TestRanks:
    def test_tensor_parallel(self) -> None:
        whole, part = traced(SMALL), traced([*SMALL, *TENSOR_PARALLEL])
        assert collectives(part) == ["allreduce_", "allreduce_"]
        s, b, h, a = 16, 2, 32, 4
        # q k v, context, both of the MLP; probabilities, dropped ones and their masks
        split = s * b * ((3 + 1 + 8) * h * 4 + a * s * (4 + 4 + 1))
        assert part.layers[0].activation_bytes == whole.layers[0].activation_bytes - split // 2

    def test_sequence_parallel(self) -> None:
        whole, part = traced([*SMALL]), traced([*SMALL, *SEQUENCE_PARALLEL])
        assert collectives(part) == [
            *("_allgather_base_", "_reduce_scatter_base_", "_allgather_base_", "_reduce_scatter_base_")
        ]
        mask = 2 * 16 * 16
        assert whole.layers[0].activation_bytes - mask == 2 * (part.layers[0].activation_bytes - mask)

    @pytest.mark.distributed
    @pytest.mark.parametrize("layout", [TENSOR_PARALLEL, SEQUENCE_PARALLEL], ids=["tensor", "sequence"])
    def test_a_lone_rank_traces_what_two_real_ones_do(self, layout: list[str], zygote, tmp_path: Path) -> None:
        flags = [
            *(*SMALL, *layout, "--attention-dropout", "0", "--hidden-dropout", "0", "--max-position-embeddings", "16"),
            *("--no-bias-dropout-fusion", "--no-bias-gelu-fusion", "--lr", "1e-3"),
        ]
        job = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "1", "--eval-interval", "9"]
        output = tmp_path / "output.txt"
        code = zygote.run(SCRIPT, [str(tmp_path), *flags, *job], 2, {}, output)
        assert code == 0, output.read_text()[-4000:]
        for rank in range(2):
            real = json.loads((tmp_path / f"rank{rank}.json").read_text())
            alone = json.loads(json.dumps(summary(traced(flags, tensor_rank=rank))))
            assert len(alone[0]["packs"]) > 20
            for row in real:
                row["ops"] = without_gloo_copies(row["ops"])
            assert alone == real

    def test_pipeline(self) -> None:
        whole = traced(SMALL)
        stages = [traced([*SMALL, "--pipeline-model-parallel-size", "2"], pipeline_rank=rank) for rank in (0, 1)]
        assert [stage.layers_of_chunks for stage in stages] == [(2,), (2,)]
        assert {layers.activation_bytes for stage in stages for layers in stage.layers} == {
            whole.layers[0].activation_bytes
        }
        # The output layer has the embedding's weights, which both stages hold.
        embedding = 128 * 32
        assert sum(stage.parameter_count for stage in stages) == whole.parameter_count + embedding
        outside = [stage.outside[0].graph.activation_bytes for stage in stages]
        assert sum(outside) == whole.outside[0].graph.activation_bytes

    def test_virtual_stages(self) -> None:
        flags = [*SMALL, "--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
        first, last = (traced(flags, pipeline_rank=rank) for rank in (0, 1))
        assert first.layers_of_chunks == last.layers_of_chunks == (1, 1)
        # Only what reads or ends the batch has the data loader's mask; elsewhere each layer makes its own.
        assert [(layers.chunk, layers.places, layers.shared_bytes) for layers in first.layers] == [
            (0, (0,), 512),
            (1, (1,), 0),
        ]
        assert [layers.shared_bytes for layers in last.layers] == [0, 512]
        assert first.outside[1].graph.activation_bytes == last.outside[0].graph.activation_bytes == 0

    def test_layers_that_only_a_number_tells_apart(self) -> None:
        flags = [*SMALL, "--num-layers", "8", "--pipeline-model-parallel-size", "2"]
        stage = traced([*flags, "--num-virtual-stages-per-pipeline-rank", "2"])
        assert [layers.places for layers in stage.layers] == [(0, 1), (2, 3)]
        scaled = traced([*SMALL, "--fp16", "--apply-query-key-layer-scaling"])
        assert [layers.places for layers in scaled.layers] == [(0,), (1,), (2,), (3,)]

    def test_data_parallel_ranks_change_nothing_in_a_layer(self) -> None:
        alone, among = traced(SMALL), traced([*SMALL, "--use-distributed-optimizer"], world_size=64)
        assert among.args.data_parallel_size == 64
        assert among.layers[0].graph == alone.layers[0].graph


def without_gloo_copies(ops: list) -> list:
    """Gloo reduce-scatters by a sum and a copy of this rank's part, which NCCL does in one."""
    return [
        op
        for before, op in zip([None, *ops], ops, strict=False)
        if not (op[0] == "aten.copy_.default" and before is not None and "reduce_scatter" in before[0])
    ]


@pytest.mark.parametrize("layout", [[], SEQUENCE_PARALLEL], ids=["alone", "sequence"])
@pytest.mark.parametrize("model", [["--fp16"], [*LLAMA, "--bf16"]], ids=["gpt", "llama"])
def test_forward_and_backward_can_be_rehearsed(layout: list[str], model: list[str]) -> None:
    with open_stage(Settings([*SMALL, *layout, *model])) as stage:
        for part in (*stage.layers, *stage.outside):
            call = part.call
            timeline = record(part.graph, Rehearsal(call.module, call.forward, call.args, call.kwargs))
            packs = list(range(len(part.graph.packs)))
            assert [i.index for i in timeline.forward if i.event == "pack"] == packs
            assert sorted(i.index for i in timeline.backward if i.event == "release") == packs
            assert sorted({i.index for i in timeline.backward if i.event == "unpack"}) == packs
            assert max(i.peak_bytes for i in timeline.backward) > 0
            assert all(p.grad is None for p in call.module.parameters())


class TestAssumptions:
    def test_none_where_nothing_is_replaced(self) -> None:
        stage = traced([*SMALL, "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"])
        assert stage.assumptions == ()

    def test_each_is_said(self) -> None:
        flags = [flag for flag in SMALL if flag not in ("--no-masked-softmax-fusion",)]
        flags[flags.index("local")] = "transformer_engine"
        del flags[flags.index("--vocab-size") : flags.index("--vocab-size") + 2]
        stage = traced([*flags, "--use-flash-attn", "--bf16", "--recompute-activations"])
        beginnings = [sentence[:29] for sentence in stage.assumptions]
        assert beginnings == [
            "The vocabulary is taken to be",
            "The layers are those of --tra",
            "Attention is traced unfused: ",
            "The softmax is torch's: Megat",
            "Megatron's own recompute flag",
            "What Megatron compiles (bias ",
        ]
        assert stage.layers[0].graph == traced([*SMALL, "--bf16"]).layers[0].graph


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--hidden-size", "32"], "--num-layers and --num-attention-heads are missing: give the model by Megatron's"),
        ([*SMALL, "--bogus", "3"], "unrecognized arguments: --bogus 3"),
        ([*SMALL, "--num-layers", "many"], "argument --num-layers: invalid int value: 'many'"),
        (
            [*SMALL, "--num-attention-heads", "5"],
            "Megatron refuses these arguments: this does not hold: args.hidden_si",
        ),
        (
            [*SMALL, "--tensor-model-parallel-size", "3"],
            "Megatron refuses these arguments: num_attention_heads (4) mus",
        ),
        (
            [*SMALL, "--pipeline-model-parallel-size", "3"],
            "Megatron refuses these arguments: Number of layers should b",
        ),
        ([*SMALL, "--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size is 0, but at least one rank"),
        ([*SMALL, "--num-experts", "4"], "--num-experts cannot be planned for a device that is not there: the sizes"),
        ([*SMALL, "--context-parallel-size", "2"], "--context-parallel-size above 1 cannot be planned for a device"),
        ([*SMALL, "--bf16", "--fp8-format", "hybrid"], "--fp8-format cannot be planned for a device that is not"),
        ([*SMALL, "--yaml-cfg", "x"], "Offline planning takes Megatron's settings as flags or by --config"),
        (
            [*SMALL, "--seq-length", "15", "--max-position-embeddings", "15", *SEQUENCE_PARALLEL],
            "This model cannot be traced for a device that is not there: First dimension of the tensor should be",
        ),
    ],
)
def test_mistakes(flags: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        traced(flags)
    assert str(caught.value).startswith(sentence)


def test_ranks_that_do_not_exist() -> None:
    with pytest.raises(UserError, match="There is no pipeline rank 1: the flags give 1, counted from 0"):
        traced(SMALL, pipeline_rank=1)
    with pytest.raises(UserError, match="There is no tensor-parallel rank 2: the flags give 2"):
        traced([*SMALL, *TENSOR_PARALLEL], tensor_rank=2)


def test_not_inside_a_job() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="in a process of its own, and this one belongs to a job already"):
            traced(SMALL)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("flags", [[*SMALL, *LLAMA, *SEQUENCE_PARALLEL], [*SMALL, "--tensor-model-parallel-size", "3"]])
def test_nothing_is_left_behind(flags: list[str], capfd: pytest.CaptureFixture) -> None:
    traced(SMALL)  # what imports leave behind
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    def state() -> list:
        return [
            *(dict(os.environ), list(sys.argv), logging.root.manager.disable, torch.distributed.is_initialized()),
            *(
                parallel_state.model_parallel_is_initialized(),
                random._CUDA_RNG_STATE_TRACKER,
                torch.get_default_device(),
            ),
            *(torch.cuda.current_device, torch.nn.Module._apply, torch.autograd._engine_run_backward),
            torch.get_rng_state().tolist(),
        ]

    capfd.readouterr()
    # Other tests compile functions, and torch's compiler keeps fake tensors of its own.
    earlier = [weakref.ref(thing) for thing in gc.get_objects() if type(thing) is FakeTensor]
    before = state()
    try:
        traced(flags)
    except UserError:
        assert "3" in flags
    assert state() == before
    assert capfd.readouterr().out == ""
    gc.collect()
    known = {id(reference()) for reference in earlier}
    assert not [thing for thing in gc.get_objects() if type(thing) is FakeTensor and id(thing) not in known]
