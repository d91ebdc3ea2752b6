"""--adacc-plan auto: within its limit, and not a bit of the training changes."""

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
