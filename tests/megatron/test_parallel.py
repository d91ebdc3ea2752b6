"""Two ranks on the CPU give the losses of one."""

import pytest

NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

LAYOUTS = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("start")


@pytest.fixture
def one_rank(trained, folder):
    """A run of one rank from a saved starting point, and that point: other layouts would draw other weights."""
    shared = {**NO_DROPOUT, "make_vocab_size_divisible_by": 64, "ckpt_format": "torch_dist"}
    start = {**shared, "load": folder / "checkpoint", "no_load_optim": True, "no_load_rng": True, "finetune": True}
    if not (folder / "checkpoint").exists():
        trained(iterations=2, save=folder / "checkpoint", save_interval=2, **shared)
    return trained(iterations=5, **start), start


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", ["off", "full"])
def test_two_ranks_agree_with_one(layout, plan, one_rank, trained):
    alone, start = one_rank
    together = trained(iterations=5, ranks=2, plan=plan, **start, **LAYOUTS[layout])
    assert len(alone.losses) == 5
    assert together.losses == pytest.approx(alone.losses, abs=1e-4)
    # The losses move by far more than the tolerance, so agreeing is not trivial.
    assert max(alone.losses) - min(alone.losses) > 1e-2
