"""Half precision, gradient accumulation and the distributed optimizer on the CPU."""

import itertools

import pytest


def falls(losses):
    """The mean of the last quarter lies below the mean of the first by more than noise."""
    quarter = len(losses) // 4
    return sum(losses[-quarter:]) / quarter < sum(losses[:quarter]) / quarter - 0.03


def test_fp16_with_dynamic_loss_scaling(trained):
    run = trained(iterations=24, fp16=True, initial_loss_scale=2**24, loss_scale_window=4, hysteresis=1)
    scales = [
        float(line.split("loss scale: ")[1].split(" ")[0]) for line in run.text.splitlines() if "loss scale:" in line
    ]
    skipped = [row["skipped_iterations"] for row in run.report["iterations"]]
    # It starts too high, overflows, halves until a step succeeds, and grows again after a window.
    assert skipped[:2] == [1, 1]
    assert skipped.count(0) > 8
    assert scales[0] == 2**23
    assert any(later == 2 * earlier for earlier, later in itertools.pairwise(scales))
    assert run.report["run"]["dtype"] == "float16"
    assert falls(run.losses[skipped.index(0) :])


def test_fp16_agrees_over_the_strategies(trained):
    settings = {"fp16": True, "initial_loss_scale": 2**10, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    runs = [trained(plan=plan, **settings) for plan in ("off", "full")]
    assert {row["skipped_iterations"] for row in runs[0].report["iterations"]} == {0}
    assert runs[0].losses == runs[1].losses


def test_bf16_is_near_fp32(trained):
    exact, rounded = trained(iterations=16), trained(iterations=16, bf16=True)
    assert rounded.report["run"]["dtype"] == "bfloat16"
    assert rounded.losses != exact.losses
    # The first loss differs by rounding alone; later ones follow slightly different weights.
    assert rounded.losses[0] == pytest.approx(exact.losses[0], abs=2e-3)
    assert rounded.losses == pytest.approx(exact.losses, abs=0.25)
    assert falls(rounded.losses)


def test_four_micro_batches_accumulate_to_the_gradient_of_one_large_batch(trained):
    # Without learned positions: those are drawn after Megatron's warm-up, which draws a micro-batch of numbers.
    settings = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "global_batch_size": 8,
        "position_embedding_type": "rope",
    }
    four, one = trained(micro_batch_size=2, **settings), trained(micro_batch_size=8, **settings)
    assert four.losses == pytest.approx(one.losses, abs=1e-4)
    assert four.summary["held_bytes"] < 0.3 * one.summary["held_bytes"]


@pytest.mark.distributed
def test_distributed_optimizer_with_overlapped_communication_changes_no_loss(trained):
    plain = trained(ranks=2)
    overlapped = trained(ranks=2, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    assert overlapped.losses == pytest.approx(plain.losses, abs=1e-6)


@pytest.mark.distributed
def test_the_distributed_optimizer_in_bf16(trained):
    run = trained(ranks=2, iterations=16, bf16=True, use_distributed_optimizer=True, overlap_grad_reduce=True)
    assert falls(run.losses)
