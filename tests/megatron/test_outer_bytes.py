"""What real training jobs on the CPU hold outside their layers, and need at their peak, against the memory model.

The vocabulary is large and the layers are tiny, so that embedding, head and optimizer decide the peak.
"""

from dataclasses import dataclass, replace

import pytest

from megatron_adacc.cost.gpt_parameters import Chunk, GptModel
from megatron_adacc.cost.in_flight import Schedule
from megatron_adacc.cost.job import SMALL_BYTES, Job
from megatron_adacc.cost.outer_activations import OuterShape
from megatron_adacc.cost.static_memory import Training

# Nothing for torch.compile to do.
UNFUSED = {"no_bias_gelu_fusion": True, "no_bias_swiglu_fusion": True, "no_bias_dropout_fusion": True}
PRECISION_FLAGS = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True, "initial_loss_scale": 1024}}
LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Case:
    """``limiting``: what the model expects to decide the peak."""

    precision: str
    sequence: int
    micro_batch: int
    tied: bool
    limiting: str
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    llama: bool = False

    def flags(self) -> dict[str, object]:
        return {
            **UNFUSED,
            **PRECISION_FLAGS[self.precision],
            **(LLAMA if self.llama else {}),
            "num_layers": self.pipeline,
            "seq_length": self.sequence,
            "max_position_embeddings": self.sequence,
            "micro_batch_size": self.micro_batch,
            "global_batch_size": 2 * self.micro_batch,
            "vocab_size": 8192,
            "untie_embeddings_and_output_weights": not self.tied,
            "tensor_model_parallel_size": self.tensor_parallel,
            "sequence_parallel": self.sequence_parallel,
            "pipeline_model_parallel_size": self.pipeline,
        }

    def job(self) -> Job:
        model = GptModel(
            num_layers=self.pipeline,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=4,
            kv_channels=8,
            ffn_hidden_size=128,
            vocab_size=8192,
            positions=0 if self.llama else self.sequence,
            linear_bias=not self.llama,
            qkv_bias=not self.llama,
            norm_bias=not self.llama,
            tied=self.tied,
        )
        outer = OuterShape(
            sequence=self.sequence,
            micro_batch=self.micro_batch,
            hidden_size=32,
            vocab_size=8192,
            element_bytes=4 if self.precision == "fp32" else 2,
            gradient_bytes=2 if self.precision == "fp16" else 4,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
            dropout=not self.llama,
            positions=not self.llama,
            rms_norm=self.llama,
            tied=self.tied,
            scores_heads=4,
            cuda=False,
        )
        chunks = tuple((Chunk(1, stage == 0, stage == self.pipeline - 1),) for stage in range(self.pipeline))
        training = Training(self.precision, torch_optimizer=True)
        return Job(model, chunks, Schedule(self.pipeline, 2), training, outer, self.tensor_parallel)

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline


BIG, SMALL = (64, 4), (16, 1)
CASES = [
    Case("fp32", *BIG, tied=True, limiting="head"),
    Case("fp16", *BIG, tied=True, limiting="head"),
    Case("bf16", *BIG, tied=False, limiting="head", llama=True),
    Case("fp32", *SMALL, tied=True, limiting="end"),
    Case("bf16", *SMALL, tied=False, limiting="step"),
    Case("bf16", *BIG, tied=True, limiting="head", tensor_parallel=2),
    Case("fp32", *BIG, tied=False, limiting="head", tensor_parallel=2, sequence_parallel=True),
    Case("fp32", *BIG, tied=True, limiting="head", pipeline=2),
]


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_held_and_peak(case, trained):
    report = trained(iterations=2, ranks=case.ranks, **case.flags()).report
    job = case.job()
    expected = []
    for rank, seen in enumerate(report["ranks"]):
        stage = rank // case.tensor_parallel
        layers = report["layer_held_bytes"][f"layer.{stage + 1}"]
        room = job.room(stage)
        in_flight = 2 if stage < case.pipeline - 1 else 1
        (outside,) = job.outer_bytes(stage)
        assert seen["held_bytes"] - layers == outside.held, (rank, seen)
        moments = {
            "head": room.fixed_bytes + in_flight * layers + room.transient_bytes,
            "end": room.fixed_bytes + (in_flight - 1) * layers + room.end_bytes,
            "step": room.step_bytes,
        }
        peak = max(moments.values())
        expected.append(max(moments, key=moments.__getitem__))
        if stage < case.pipeline - 1:
            continue  # without a head, the layers' own passing tensors decide, which are not counted here
        least = peak - SMALL_BYTES - job.outer.batch_bytes
        assert least <= seen["peak_bytes"] <= peak, (rank, moments, seen["peak_bytes"])
    assert expected[-1] == case.limiting


def test_a_step_of_fused_optimizers_needs_only_copies_of_gradients():
    job = CASES[1].job()
    assert replace(job, training=Training("fp16")).room(0).step_bytes - replace(
        job, training=Training("fp16", gradient_bytes=4)
    ).room(0).step_bytes == (4 - 2) * job.parameters(0)
