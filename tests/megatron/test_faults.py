"""Faults in a Megatron job: refused memory, killed ranks, ranks with other plan files, full disks."""

from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint

SCRIPT = Path(__file__).with_name("failing_script.py")
SETTINGS = {"plan": "auto", "adacc_limit": "80%", "hidden_dropout": 0.1, "attention_dropout": 0.1, "hidden_size": 64}


@pytest.mark.parametrize("at", [1, 17, 40])
def test_a_step_that_was_refused_memory_runs_again_with_the_same_bits(trained, at):
    """In the first micro-batch and the second, in the first layer and the second."""
    off = trained(iterations=4, **{**SETTINGS, "plan": "off", "adacc_limit": None})
    run = trained(iterations=4, script=SCRIPT, env={"FAIL_STEP": "3", "FAIL_AT": str(at)}, **SETTINGS)
    assert run.losses == off.losses
    (decision,) = run.report["decisions"]
    assert decision["step"] == 2
    assert decision["why"] == ["a step did not get its memory: CUDA out of memory. Tried to allocate 2.00 GiB."]


def test_refused_memory_at_every_pack_of_a_step_in_turn(trained):
    """Two micro-batches, two layers of 29 saves: in each step another pack is refused, and no loss changes."""
    iterations = 2 + 2 * 2 * 29 + 3
    off = trained(iterations=iterations, **{**SETTINGS, "plan": "off", "adacc_limit": None})
    run = trained(iterations=iterations, script=SCRIPT, env={"SWEEP": "1"}, **SETTINGS)
    assert run.losses == off.losses
    refused = [d["step"] + 1 for d in run.report["decisions"] if "a step did not get its memory" in d["why"][0]]
    assert refused == list(range(3, 3 + 2 * 2 * 29))


@pytest.mark.parametrize("plan", ["auto", "compress"])
def test_a_run_that_is_killed_again_and_again_ends_like_one_never_killed(train, trained, tmp_path, plan):
    settings = {**SETTINGS, "plan": plan, "ckpt_format": "torch", "save_interval": 1}
    if plan == "compress":
        settings |= {"adacc_limit": None, "adacc_warmup_steps": 2, "adacc_max_interval": 2}
    whole = trained(iterations=8, save=tmp_path / "whole", **settings)
    # Steps of the process that is killed: iterations 3, 4 and 5.
    for step, packs, done in ((3, 5, 2), (2, 100, 3), (2, 60, 4)):
        env = {"KILL_AT": str(step), "KILL_PACK": str(packs)}
        killed = train(
            iterations=8, script=SCRIPT, env=env, save=tmp_path / "c", load=tmp_path / "c", report=False, **settings
        )
        assert killed.code != 0
        assert (tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text() == str(done)
    resumed = trained(iterations=8, save=tmp_path / "c", load=tmp_path / "c", **settings)
    assert resumed.losses == whole.losses[4:]
    saved, found = (checkpoint(tmp_path / name, 8) for name in ("whole", "c"))
    assert [path for path, tensor in saved.items() if not torch.equal(tensor, found[path])] == []


def test_fp16_and_the_distributed_optimizer(trained):
    settings = {**SETTINGS, "fp16": True, "initial_loss_scale": 2**10, "use_distributed_optimizer": True}
    off = trained(iterations=4, **{**settings, "plan": "off", "adacc_limit": None})
    env = {"FAIL_STEP": "2", "FAIL_AT": "30", "FAIL_TIMES": "2"}
    assert trained(iterations=4, script=SCRIPT, env=env, **settings).losses == off.losses


def test_the_run_ends_with_a_table_when_no_plan_helps(train):
    run = train(iterations=4, script=SCRIPT, env={"FAIL_STEP": "3", "FAIL_AT": "9", "FAIL_TIMES": "99"}, **SETTINGS)
    assert run.code == 2
    assert run.sentence().startswith("pretrain_gpt.py: error: Step 3 did not get its memory in 4 tries, each under a")
    assert "predicted peak" in run.text


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}],
    ids=["dp", "tp", "pp"],
)
def test_all_ranks_drop_a_step_in_which_one_held_too_much(trained, layout):
    settings = {**SETTINGS, **layout}
    off = trained(iterations=4, ranks=2, **{**settings, "plan": "off", "adacc_limit": None})
    env = {"EXCESS_STEP": "3", "EXCESS": "5000", "ONLY_RANK": "1"}
    run = trained(iterations=4, ranks=2, script=SCRIPT, env=env, **settings)
    assert run.losses == off.losses
    assert {(d["step"], d["why"][0]) for d in run.report["decisions"]} == {
        (2, "a step did not get its memory: 4.9 KiB more than the limit were held")
    }
    assert len(run.report["decisions"]) == (1 if not layout else 2)


@pytest.mark.distributed
def test_one_rank_of_two_that_is_refused_memory_ends_the_job_with_the_way_out(train):
    env = {"FAIL_STEP": "3", "FAIL_AT": "9", "ONLY_RANK": "1"}
    settings = {**SETTINGS, "adacc_limit": "100MiB"}
    run = train(iterations=4, ranks=2, script=SCRIPT, env=env, **settings)
    assert run.code != 0
    assert (
        "Step 3 did not get its memory (CUDA out of memory. Tried to allocate 2.00 GiB.); start again with" in run.text
    )
    assert "--adacc-limit 90.0MiB" in run.text


@pytest.mark.distributed
def test_a_rank_that_is_killed_ends_the_job(train):
    run = train(iterations=4, ranks=2, script=SCRIPT, env={"KILL_AT": "3", "ONLY_RANK": "1"}, **SETTINGS)
    assert run.code != 0


@pytest.mark.distributed
def test_ranks_with_different_plan_files_are_named_within_seconds(train, trained, tmp_path):
    """The same path, another file on each machine."""
    import json

    made = trained(iterations=2, plan="recompute", hidden_size=64)
    assert made.code == 0
    plan = {"format": 1, "name": "mine", "notes": {}, "layers": [{"fingerprint": "x", "layer": None, "actions": {}}]}
    for rank, action in enumerate(("recompute", "keep")):
        (tmp_path / str(rank)).mkdir()
        plan["layers"][0]["actions"] = {"input_layernorm/native_layer_norm.0": {"action": action}}
        (tmp_path / str(rank) / "plan.json").write_text(json.dumps(plan))
    script = tmp_path / "apart.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
        f"sys.argv[0] = {str(SCRIPT.parents[2] / 'pretrain_gpt.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    run = train(ranks=2, plan="plan.json", script=script)
    assert run.code == 2
    assert "Rank 1 has another plan or other settings than rank 0:" in run.text
    assert "input_layernorm/native_layer_norm.0: keep where rank 0 has" in run.text


def test_a_full_disk_while_the_report_is_written_ends_nothing(trained):
    run = trained(iterations=2, report=False, adacc_report="/dev/full", **SETTINGS)
    assert "could not be written" in run.text or run.code == 0
