"""Plans of our own in Megatron: a lossless one changes no bit of the training, on any layout."""

import json

import pytest
import torch
from checkpoints import checkpoint
from megatron_models import MODELS

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

LAYOUTS = {
    "one rank": {},
    "tensor": {"ranks": 2, "tensor_model_parallel_size": 2},
    "sequence": {"ranks": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"ranks": 2, "pipeline_model_parallel_size": 2},
    "interleaved": {
        "ranks": 2,
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "num_layers_per_virtual_pipeline_stage": 1,
        "global_batch_size": 8,
    },
    "distributed optimizer": {"ranks": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) for model in MODELS for layout in LAYOUTS if model == "gpt" or layout != "distributed optimizer"],
)
def test_recompute_leaves_the_checkpoint_of_a_plain_run(trained, tmp_path, model, layout):
    settings = {**DROPOUT, **MODELS[model], **LAYOUTS[layout], "iterations": 3, "ckpt_format": "torch"}
    saved, runs = {}, {}
    for plan in ("off", "recompute"):
        runs[plan] = trained(plan=plan, save=tmp_path / plan, save_interval=3, **settings)
        saved[plan] = checkpoint(tmp_path / plan)
    assert runs["off"].losses == runs["recompute"].losses
    assert saved["off"].keys() == saved["recompute"].keys()
    different = [path for path, tensor in saved["off"].items() if not torch.equal(tensor, saved["recompute"][path])]
    assert different == []
    assert len(saved["off"]) > 30
    held = {plan: sum(run.report["layer_held_bytes"].values()) for plan, run in runs.items()}
    assert held["recompute"] < 0.6 * held["off"]  # in a model this small much lies below the size that is handled


def test_keep_holds_what_autograd_holds_and_changes_nothing(trained):
    off, keep = trained(plan="off", **DROPOUT), trained(plan="keep", **DROPOUT)
    assert keep.losses == off.losses
    assert keep.report["layer_held_bytes"] == off.report["layer_held_bytes"]


def test_compress_trains_near_the_exact_run(trained):
    settings = {"iterations": 12, "hidden_size": 128, "lr": 1e-3, **DROPOUT}
    off, compressed = (
        trained(plan="off", **settings), trained(plan="compress", adacc_warmup_steps=0, **settings)
    )  # fmt: skip
    # The forward pass is exact, so the first loss is; the gradients are not.
    assert compressed.losses[0] == off.losses[0]
    assert compressed.losses != off.losses
    assert compressed.losses == pytest.approx(off.losses, abs=0.02)
    held = [sum(run.report["layer_held_bytes"].values()) for run in (compressed, off)]
    assert held[0] < 0.5 * held[1]


def test_fp16_with_recompute(trained):
    settings = {"fp16": True, "initial_loss_scale": 2**10, **DROPOUT}
    assert trained(plan="recompute", **settings).losses == trained(plan="off", **settings).losses


def test_evaluation_between_steps_and_a_resumed_run_keep_the_plan(trained, tmp_path):
    settings = {"eval_iters": 1, "eval_interval": 2, "plan": "recompute", **DROPOUT}
    whole = trained(iterations=6, **settings)
    trained(iterations=6, exit_interval=3, save=tmp_path / "c", save_interval=3, **settings)
    assert trained(iterations=6, load=tmp_path / "c", **settings).losses == whole.losses[3:]


def test_the_table_of_the_plan_is_printed_once(trained):
    run = trained(plan="recompute", iterations=2)
    assert run.text.count("the layers of rank 0 under --adacc-plan recompute") == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cuda_graph_impl": "local", "adacc_device": "cpu"}, None),
        ({"recompute_granularity": "selective"}, "--adacc-plan recompute decides what is recomputed, and so does"),
        ({"fine_grained_activation_offloading": True}, "and so does --fine-grained-activation-offloading"),
    ],
)
def test_what_decides_about_the_same_tensors_is_refused(train, settings, words):
    run = train(plan="recompute", **settings)
    assert run.code == 2
    assert (words or "--cuda-graph-impl local replaces them by one graph") in run.sentence()


def test_a_plan_file_that_is_none(train, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"not": "a plan"}))
    run = train(plan=path)
    assert run.code == 2
    assert "Traceback" not in run.text
    assert str(path) in run.sentence()
