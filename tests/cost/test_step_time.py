"""From micro-batches to samples a second."""

import dataclasses

import pytest

from megatron_adacc.cost.devices import device
from megatron_adacc.cost.gpt_parameters import Chunk, GptModel
from megatron_adacc.cost.in_flight import Schedule
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.outer_activations import OuterShape
from megatron_adacc.cost.static_memory import Training
from megatron_adacc.cost.step_time import optimizer_us, pipeline_us, samples_per_second


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks", "us"),
    [
        ([10.0], 3, 1, 30.0),
        # 4 equal stages, 8 micro-batches: (m + p - 1) t.
        ([10.0] * 4, 8, 1, 110.0),
        # Two chunks a stage: half the bubble.
        ([10.0] * 4, 8, 2, 95.0),
        # The slowest stage sets the pace, the others are filled and drained once.
        ([10.0, 20.0, 5.0], 4, 1, 95.0),
    ],
)
def test_pipeline(stages: list[float], micro_batches: int, chunks: int, us: float) -> None:
    assert pipeline_us(stages, micro_batches, chunks) == us


def test_samples() -> None:
    assert samples_per_second(8, 4, 2, 500_000.0) == 128.0


def _job(training: Training) -> Job:
    model = GptModel(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_channels=16, ffn_hidden_size=256,
        vocab_size=128, positions=64,
    )  # fmt: skip
    outer = OuterShape(sequence=64, micro_batch=2, hidden_size=64, vocab_size=128, element_bytes=2, gradient_bytes=2)
    return Job(model, ((Chunk(2, True, True),),), Schedule(), training, outer)


def test_optimizer_moves_its_bytes_once() -> None:
    spec = dataclasses.replace(device("v100-32gb"), bandwidth=1e9, bandwidth_fraction=1.0, link=1e8, link_fraction=1.0)
    job = _job(Training("fp16"))
    parameters = job.parameters(0)
    # Read: 2 of the gradient, 2 x 4 of its copy, 4 + 8 of master copy and moments; written: 4 of the gradient's copy,
    # 2 + 4 + 8 of parameter, master copy and moments.
    assert optimizer_us(job, 0, spec) == pytest.approx(1e6 * 40 * parameters / 1e9)
    # In fp32: 8 of the gradient, 4 + 8 of parameter and moments, and these two written.
    assert optimizer_us(_job(Training("fp32")), 0, spec) == pytest.approx(1e6 * 32 * parameters / 1e9)
    four = optimizer_us(_job(Training("fp16", data_parallel=4)), 0, spec)
    # Beside that, a ring of 4 ranks sends 2 x 3 / 4 of the 2-byte gradients.
    assert four - optimizer_us(job, 0, spec) == pytest.approx(1e6 * 3 * parameters / 1e8)
