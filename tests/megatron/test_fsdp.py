"""Sharded parameters in Megatron's loop: torch's FSDP2, Megatron-FSDP, and gathers that overlap with the forward."""

import importlib.util
import json
import os
from argparse import Namespace

import pytest

from megatron_adacc import cli
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import checks, cpu_flags, strategies

TORCH = {"use_torch_fsdp2": True, "ckpt_format": "torch_dist", "untie_embeddings_and_output_weights": True}
MEGATRON = {"use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor"}
SHARDED = {**MEGATRON, "data_parallel_sharding_strategy": "optim_grads_params"}
OVERLAP = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 2000,
}
# Two micro-batches a step on each of two ranks, with dropout.
JOB = {"iterations": 2, "ranks": 2, "global_batch_size": 8, "hidden_dropout": 0.1, "attention_dropout": 0.1}
# What a layer holds without a plan (the second; the first also counts the attention mask, which all share).
LAYER_BYTES = 92672

needs_einops = pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="Megatron-FSDP needs einops")


@pytest.fixture(scope="module")
def memory():
    """What the tests of this module remember of each other's jobs."""
    return {}


@pytest.fixture
def plain(trained, memory):
    """plain(**flags): the job without a plan, run once for the module."""

    def run(**flags):
        name = str(flags)
        if name not in memory:
            memory[name] = trained(plan="off", **JOB, **flags)
            assert memory[name].report["layer_held_bytes"]["layer.2"] == LAYER_BYTES
        return memory[name]

    return run


def held(run):
    return run.report["layer_held_bytes"]["layer.2"]


@pytest.mark.distributed
def test_torch_fsdp2(plain, trained):
    off, run = plain(**TORCH), trained(plan="auto", adacc_limit="40%", **JOB, **TORCH)
    assert run.losses == off.losses
    assert len(set(run.losses)) == 2
    assert 0.2 * LAYER_BYTES < held(run) < 0.4 * LAYER_BYTES


@pytest.mark.distributed
def test_torch_fsdp2_under_a_lossy_plan_in_16_bits(trained):
    settings = {**JOB, **TORCH, "iterations": 3, "bf16": True, "adacc_warmup_steps": 1}
    run = trained(plan="compress", adacc_check_gradients_every=1, **settings)
    assert run.losses[2] < run.losses[0] - 0.1
    assert held(run) < 0.4 * LAYER_BYTES
    assert "compress(outlier_int4" in run.text


# Whole layers are the units of FSDP; each part of a layer gathers by a hook of its own; Megatron's usual data
# parallelism gathers inside the layers of the second step, whose first micro-batch is traced there.
@pytest.mark.distributed
@needs_einops
@pytest.mark.parametrize(
    ("plan", "flags"),
    [
        ("recompute", SHARDED),
        ("auto", {**MEGATRON, "data_parallel_sharding_strategy": "optim", "adacc_limit": "40%"}),
        ("recompute", OVERLAP),
    ],
    ids=["layers", "parts", "overlap"],
)
def test_megatrons_own_gathers(plan, flags, plain, trained):
    # With two ranks the order of a sum does not matter: all ways of sharing give the same bits.
    off, run = plain(**SHARDED), trained(plan=plan, **JOB, **flags)
    assert run.losses == off.losses
    assert len(set(run.losses)) == 2
    if plan == "auto":
        assert held(run) < 0.45 * LAYER_BYTES
    else:
        # Its input of 4096 bytes, masks as bits, statistics; and no forward of the run held more in all.
        assert held(run) < 5200
        assert run.summary["held_bytes"] < off.summary["held_bytes"] / 5


def test_a_sharded_job_is_planned_for_a_device_that_is_not_there(capsys):
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 127"
    flags = [*model.split(), "--untie-embeddings-and-output-weights", "--no-gradient-accumulation-fusion"]
    peaks = []
    for sharding in ([], ["--use-torch-fsdp2", "--ckpt-format", "torch_dist"]):
        command = ["plan", "--device", "v100-32gb", "--world", "2", *flags, *sharding, "--json", "-"]
        assert cli.main(command) == 0
        peaks.append(json.loads(capsys.readouterr().out)["strategies"]["auto"]["peak_bytes"])
    assert peaks[1] < peaks[0]


def test_fine_grained_gathers_are_refused():
    args = Namespace(megatron_fsdp_enable_fine_grained_param_gather=True)
    with pytest.raises(UserError, match="with --megatron-fsdp-enable-fine-grained-param-gather a layer never has all"):
        strategies.get("recompute").apply(args)
    strategies.get("off").apply(args)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--use-megatron-fsdp needs the package einops, which is missing: pip install"):
        checks.check_arguments(Namespace(adacc_plan="off", use_megatron_fsdp=True))


@pytest.mark.parametrize(
    ("given", "flags", "found"),
    [
        (None, {}, "1"),
        ("1", {"use_torch_fsdp2": True}, "8"),
        (None, {"use_megatron_fsdp": True, "gradient_reduce_div_fusion": True}, "8"),
        ("4", {"gradient_reduce_div_fusion": True}, "4"),
    ],
)
def test_what_the_cpu_needs_for_sharded_parameters(given, flags, found, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    args = Namespace(**flags)
    switched = "--no-gradient-reduce-div-fusion" in cpu_flags.adjust(args)
    assert switched == bool(flags.get("use_megatron_fsdp"))
    assert getattr(args, "gradient_reduce_div_fusion", None) == (
        flags.get("gradient_reduce_div_fusion") and not switched
    )
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == found
