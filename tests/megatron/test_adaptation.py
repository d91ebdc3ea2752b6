"""Adaptation in Megatron's loop: settings, resuming, other layouts, and what is said of each."""

import json
import shutil

import pytest

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
WIDE = {"hidden_size": 128, "lr": 1e-3, **DROPOUT}
LOSSY = {"plan": "compress", "adacc_warmup_steps": 2, "adacc_max_interval": 4, **WIDE}


def decisions(run) -> list[str]:
    """What the log says of changes of the plan."""
    return [d["changed"] for d in run.report["decisions"]]


def cut(folder, iteration: int) -> None:
    """As if the run had been killed after this iteration: later checkpoints are gone."""
    for path in folder.glob("iter_*"):
        if int(path.name.removeprefix("iter_")) > iteration:
            shutil.rmtree(path)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def test_a_lossy_plan_comes_after_the_warm_up(trained):
    off = trained(iterations=6, **WIDE)
    run = trained(iterations=6, **LOSSY)
    assert run.losses[:3] == off.losses[:3]  # two exact steps, and the third's forward
    assert run.losses[3:] != off.losses[3:]
    assert run.losses == pytest.approx(off.losses, abs=0.02)
    (first, *_) = run.report["decisions"]
    assert first["step"] == 2
    assert "2 steps of warm-up have ended" in first["why"][0]


@pytest.mark.parametrize(("fmt", "stops"), [("torch", (6, 3, 1)), ("torch_dist", (4, 2))])
def test_a_lossy_run_resumes_with_the_losses_of_one_never_stopped(trained, tmp_path, fmt, stops):
    """At every step: in the warm-up, at its end, right before and after a check."""
    settings = {**LOSSY, "ckpt_format": fmt}
    whole = trained(iterations=8, save=tmp_path / "c", save_interval=1, **settings)
    for at in stops:
        cut(tmp_path / "c", at)
        resumed = trained(iterations=8, load=tmp_path / "c", **settings)
        assert resumed.losses == whole.losses[at:], at
        assert f"adaptation goes on after {at} steps with the plan of the checkpoint" in resumed.text
        assert [d for d in resumed.report["decisions"] if d["step"] > at] == [
            d for d in whole.report["decisions"] if d["step"] > at
        ]


def test_a_run_under_auto_resumes_with_its_plan(trained, tmp_path):
    settings = {"plan": "auto", "adacc_limit": "30%", **WIDE}
    whole = trained(iterations=4, save=tmp_path / "c", save_interval=2, **settings)
    cut(tmp_path / "c", 2)
    resumed = trained(iterations=4, load=tmp_path / "c", **settings)
    assert resumed.losses == whole.losses[2:]
    assert "adaptation goes on after 2 steps with the plan of the checkpoint" in resumed.text
    assert resumed.report["predicted"][0]["held_bytes"] == whole.report["predicted"][0]["held_bytes"]


def test_a_checkpoint_goes_on_with_another_plan_or_none(trained, tmp_path):
    trained(iterations=5, exit_interval=3, save=tmp_path / "c", save_interval=3, **LOSSY)
    other = {**LOSSY, "plan": "recompute", "adacc_warmup_steps": None, "adacc_max_interval": None}
    without = {**WIDE, "plan": "off"}
    resumed = [trained(iterations=5, load=tmp_path / "c", **settings) for settings in (other, without)]
    assert resumed[0].losses == resumed[1].losses
    assert "the plan is made anew, and not taken from the checkpoint (it was written under the plan 'compress'" in (
        resumed[0].text
    )


def test_a_checkpoint_without_us_starts_fresh(trained, tmp_path):
    trained(iterations=4, exit_interval=2, save=tmp_path / "c", save_interval=2, report=False, **WIDE)
    resumed = trained(iterations=4, load=tmp_path / "c", **LOSSY)
    assert "the checkpoint was written without a plan: it is made anew" in resumed.text


@pytest.mark.distributed
def test_a_checkpoint_resumes_on_another_data_parallel_size(trained, tmp_path):
    settings = {**LOSSY, "global_batch_size": 4, "ckpt_format": "torch_dist"}
    trained(iterations=6, exit_interval=4, ranks=2, save=tmp_path / "c", save_interval=4, **settings)
    resumed = trained(iterations=6, load=tmp_path / "c", **settings)
    assert "adaptation goes on after 4 steps with the plan of the checkpoint" in resumed.text
    assert len(resumed.losses) == 2


@pytest.mark.distributed
def test_a_checkpoint_of_another_layout_is_said_not_to_fit(trained, tmp_path):
    settings = {**LOSSY, "ckpt_format": "torch_dist"}
    trained(
        iterations=4, exit_interval=3, ranks=2, tensor_model_parallel_size=2, save=tmp_path / "c", save_interval=3,
        **settings,
    )  # fmt: skip
    resumed = trained(iterations=4, load=tmp_path / "c", **settings)
    assert "it was written by a job with 2 tensor and 1 pipeline parallel ranks" in resumed.text


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
    ],
    ids=["dp", "tp", "pp"],
)
def test_two_ranks_with_a_lossy_plan_decide_alike_and_resume_exactly(trained, tmp_path, layout):
    settings = {**LOSSY, **layout, "ckpt_format": "torch_dist"}
    whole = trained(iterations=6, ranks=2, save=tmp_path / "c", save_interval=3, **settings)
    steps = {d["step"] for d in whole.report["decisions"]}
    assert 2 in steps
    cut(tmp_path / "c", 3)
    resumed = trained(iterations=6, ranks=2, load=tmp_path / "c", **settings)
    assert resumed.losses == whole.losses[3:]


def test_settings_come_from_a_file_and_flags_come_before_it(trained, tmp_path):
    path = tmp_path / "adacc.yaml"
    path.write_text("plan: compress\nwarmup_steps: 7\nmax_interval: 4\n")
    run = trained(iterations=3, plan=None, adacc_config=path, adacc_warmup_steps=1, **WIDE)
    assert run.summary["strategy"] == "compress"
    assert next(d["step"] for d in run.report["decisions"]) == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"plan": "off", "adacc_warmup_steps": 3}, "--adacc-warmup-steps is for plans of ours"),
        ({"plan": "compress", "adacc_compression_levels": "Linear"}, "--adacc-compression-levels is 'Linear', but it"),
        ({"plan": "compress", "adacc_compression_levels": "Linear=x"}, "The compression level of Linear has to be"),
        ({"plan": "auto", "adacc_compression_levels": "Linear=direct"}, "compression_levels are for the plan"),
        ({"plan": "compress", "adacc_config": "/nowhere.yaml"}, "The file of settings /nowhere.yaml cannot be read"),
        ({"plan": "compress", "adacc_min_interval": 9, "adacc_max_interval": 3}, "min_interval has to be at most"),
    ],
)
def test_settings_that_cannot_be_meant(train, settings, sentence):
    run = train(**settings)
    assert run.code == 2
    assert sentence in run.sentence()


def test_a_file_that_names_no_plan(train, tmp_path):
    path = tmp_path / "adacc.yaml"
    path.write_text("warmup_steps: 7\n")
    run = train(plan=None, adacc_config=path)
    assert run.code == 2
    assert "does not name a plan, and neither does the command line" in run.sentence()


def test_gradients_are_compared_and_bad_layers_become_exact(trained):
    off = trained(iterations=7, **WIDE)
    settings = {**LOSSY, "adacc_warmup_steps": 0, "adacc_check_gradients_every": 2}
    run = trained(iterations=7, **settings)
    assert run.text.count("step 4: gradients of layer 0 have relative error") == 1
    strict = trained(iterations=7, **settings, adacc_max_gradient_error=1e-6)
    changed = [line for d in strict.report["decisions"] if d["step"] == 2 for line in d["changed"]]
    assert "from now on layers [0, 1] are lossless" in changed
    assert strict.losses[:3] == run.losses[:3]
    assert strict.losses[3:] != run.losses[3:]
    assert abs(strict.losses[-1] - off.losses[-1]) < 0.02
    assert json.dumps(strict.report["decisions"])
