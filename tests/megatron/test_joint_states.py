"""--adacc-state-plan auto and --adacc-plan auto under one limit in bytes."""

from argparse import Namespace

import pytest
import torch

from megatron_adacc.megatron.joint_states import offer
from megatron_adacc.megatron.state_plan import StateAdamW

MODEL = {"hidden_size": 64, "seq_length": 64, "max_position_embeddings": 64, "num_layers": 3, "lr": 1e-3}
MODEL["env"] = {"TORCH_COMPILE_DISABLE": "1"}
JOINT = {"plan": "auto", "adacc_state_plan": "auto"}
MIB = 2**20


def peaks(run) -> list[int]:
    return [row["peak_bytes"] for row in run.report["iterations"]]


def test_forms_are_what_the_optimizer_holds_and_only_a_smaller_one_is_taken_at_once(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    large, small = torch.zeros(64, 256, requires_grad=True), torch.zeros(10, requires_grad=True)
    optimizer = StateAdamW([{"params": [large, small]}], 4, {}, None, 0, awaits_plan=True)
    args = Namespace(
        adacc_state_plan="auto", adacc_state_limit=None, adacc_state_price=0.05, global_batch_size=8,
        micro_batch_size=2, data_parallel_size=2,
    )  # fmt: skip
    made = offer([optimizer], args, [])
    forms = {form.bytes: form for form in made.forms}
    assert len(forms) == 25
    assert (made.counted_bytes, made.micro_batches) == (8 * 16394, 2)
    assert min(forms) == made.least_bytes == optimizer.state_bytes() == 64 * 258 + 80
    uniform = [(64 * 2048 + 80, 0.0), (64 * 1024 + 80, 0.017**2), (64 * 514 + 80, 0.171**2), (64 * 258 + 80, 0.820**2)]
    for nbytes, error in uniform:
        assert forms[nbytes].error == pytest.approx(error * 16384 / 16394)
    made.allow(64 * 514 + 100)
    assert optimizer.state_bytes() == made.least_bytes  # activations may be alive
    large.grad = torch.ones_like(large)
    optimizer.step()
    assert optimizer.state_bytes() == 64 * 514 + 80
    made.allow(64 * 300)
    assert optimizer.state_bytes() == made.least_bytes


def test_a_large_limit_changes_no_bit_of_the_training(trained):
    plain, joint = trained(iterations=2, **MODEL), trained(iterations=2, adacc_limit="8GiB", **JOINT, **MODEL)
    assert joint.losses == plain.losses
    assert "optimizer state: 100.0 % of blocks in 32 bits" in joint.text


def test_state_gives_the_bytes_that_activations_lack(train, trained):
    """Exact state and the least activations need 3.7 MiB."""
    alone = train(plan="auto", iterations=2, adacc_limit="3500KiB", **MODEL)
    assert "the least limit that works is 3.7MiB" in alone.sentence()
    joint = trained(iterations=3, adacc_limit="3500KiB", **JOINT, **MODEL)
    assert max(peaks(joint)[1:]) <= 3500 * 1024  # the first step learns what the layers need


@pytest.mark.distributed
def test_two_tensor_parallel_ranks_share_the_limit(train):
    layout = {"ranks": 2, "tensor_model_parallel_size": 2, "adacc_limit": "2900KiB"}
    run = train(iterations=3, **layout, **JOINT, **MODEL)
    assert run.code == 0, run.text[-1500:]
    assert max(peaks(run)[1:]) <= 2900 * 1024


def test_a_share_of_the_activations_is_no_limit_for_both(train):
    run = train(iterations=1, adacc_limit="50%", **JOINT, **MODEL)
    assert run.code == 2
    assert (
        "--adacc-limit 50% is a share of the activations, of which the optimizer's state is no part" in run.sentence()
    )
