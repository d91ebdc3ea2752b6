"""--adacc-plan auto: within its limit, and not a bit of the training changes."""

from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint

SETTINGS = {
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "hidden_size": 64, "seq_length": 64, "max_position_embeddings": 64,
    "iterations": 3, "ckpt_format": "torch",
}  # fmt: skip

LAYOUTS = {
    "one rank": {},
    "tensor": {"ranks": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "data": {"ranks": 2, "use_distributed_optimizer": True},
    "grid": {"ranks": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "interleaved": {
        "ranks": 2, "pipeline_model_parallel_size": 2, "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1,
        "global_batch_size": 8,
    },
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_leaves_the_checkpoint_of_a_plain_run(trained, tmp_path, layout):
    settings = SETTINGS | LAYOUTS[layout]
    off = trained(plan="off", save=tmp_path / "off", save_interval=3, **settings)
    auto = trained(plan="auto", adacc_limit="30%", save=tmp_path / "auto", save_interval=3, **settings)
    assert auto.losses == off.losses
    saved, found = checkpoint(tmp_path / "off"), checkpoint(tmp_path / "auto")
    assert saved.keys() == found.keys()
    assert [path for path, tensor in saved.items() if not torch.equal(tensor, found[path])] == []
    off_bytes, auto_bytes = (sum(run.report["layer_held_bytes"].values()) for run in (off, auto))
    assert auto_bytes < 0.45 * off_bytes
    assert "plan auto, limit 30 % of the plain activations: optimal" in auto.text


PREDICTED = SETTINGS | {
    "hidden_size": 128, "seq_length": 128, "max_position_embeddings": 128, "micro_batch_size": 4, "vocab_size": 1000,
    "num_layers": 4, "global_batch_size": 8, "iterations": 4,
}  # fmt: skip
PEAKS = {
    "everything fits": {},
    "half": {"adacc_limit": "50%"},
    "least": {"adacc_limit": "13%"},
    "tensor": {"ranks": 2, "tensor_model_parallel_size": 2, "adacc_limit": "35%"},
    "sequence": {"ranks": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "sequence, half": {"ranks": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True, "adacc_limit": "50%"},
    "pipeline, a batch that grows": {
        "ranks": 2, "pipeline_model_parallel_size": 2, "adacc_limit": "40%", "global_batch_size": None,
        "step_batch_size_schedule": "0:4 1024:16",
    },
    "llama, bf16": {
        "bf16": True, "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
        "disable_bias_linear": True, "untie_embeddings_and_output_weights": True, "adacc_limit": "50%",
    },
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("case", PEAKS)
def test_predicted_peak_is_met_from_above(trained, case):
    """Parameters, optimizer, embedding, loss, layers under the plan: at most 5 % too much, never too little."""
    run = trained(plan="auto", **PREDICTED | PEAKS[case])
    predicted = {one["rank"]: one for one in run.report["predicted"]}
    assert len(predicted) == len(run.report["ranks"])
    for rank in run.report["ranks"]:
        assert rank["peak_bytes"] <= predicted[rank["rank"]]["peak_bytes"] <= 1.05 * rank["peak_bytes"]


@pytest.mark.distributed
def test_a_stage_without_layers_holds_nobody_up(trained):
    """All ranks gather what was promised; the first stage has the embedding only, and promises nothing."""
    layout = {"ranks": 2, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttL"}
    off, auto = (trained(plan=plan, **SETTINGS | layout) for plan in ("off", "auto"))
    assert auto.losses == off.losses
    assert [one["rank"] for one in auto.report["predicted"]] == [1]


def test_a_resumed_run_may_have_another_limit(trained, tmp_path):
    whole = trained(plan="auto", adacc_limit="40%", **SETTINGS | {"iterations": 6})
    stopped = {"iterations": 6, "exit_interval": 3, "save": tmp_path, "save_interval": 3}
    first = trained(plan="auto", adacc_limit="40%", **SETTINGS | stopped)
    rest = trained(plan="auto", adacc_limit="60%", load=tmp_path, **SETTINGS | {"iterations": 6})
    assert first.losses + rest.losses == whole.losses


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_16_bits(trained, precision):
    off, auto = (
        trained(plan=plan, adacc_limit=limit, **SETTINGS | {precision: True})
        for plan, limit in (("off", None), ("auto", "50%"))
    )
    assert auto.losses == off.losses


UNEVEN = {
    "tensor": {"tensor_model_parallel_size": 2},
    "data": {"use_distributed_optimizer": True},
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", UNEVEN)
def test_ranks_with_other_timings_hold_the_first_ones_plan(trained, tmp_path, layout):
    settings = SETTINGS | UNEVEN[layout] | {"ranks": 2}
    environment = {"PLANS": str(tmp_path), "ADACC_CACHE_DIR": "off"}
    script = Path(__file__).with_name("uneven_timings_script.py")
    off = trained(plan="off", **settings)
    auto = trained(plan="auto", adacc_limit="30%", script=script, env=environment, **settings)
    assert auto.losses == off.losses
    first, second = (tmp_path.joinpath(f"{rank}.json").read_text() for rank in (0, 1))
    assert first == second
    prices = [tmp_path.joinpath(f"{rank}.prices").read_text() for rank in (0, 1)]
    assert prices[0] != prices[1]


EXPERTS = SETTINGS | {"num_experts": 2, "moe_router_topk": 2, "disable_bias_linear": True}


def test_a_share_needs_no_memory_model(trained):
    """The memory model does not know experts."""
    off = trained(plan="off", **EXPERTS)
    auto = trained(plan="auto", adacc_limit="60%", **EXPERTS)
    assert auto.losses == off.losses


def test_a_limit_in_bytes_needs_one(train):
    run = train(plan="auto", adacc_limit="1GiB", **EXPERTS)
    assert run.code != 0
    assert "--num-experts 2 is not in the memory model: leave it out. Or give --adacc-limit as a share" in run.text
