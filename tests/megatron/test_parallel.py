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
def shared(tmp_path_factory):
    """What the tests of this module make once: the starting point's folder and the run of one rank from it."""
    return {"folder": tmp_path_factory.mktemp("start")}


@pytest.fixture
def one_rank(trained, shared):
    """A run of one rank from a saved starting point, and that point: other layouts would draw other weights."""
    settings = {**NO_DROPOUT, "make_vocab_size_divisible_by": 64, "ckpt_format": "torch_dist"}
    folder = shared["folder"] / "checkpoint"
    start = {**settings, "load": folder, "no_load_optim": True, "no_load_rng": True, "finetune": True}
    if "run" not in shared:
        trained(iterations=2, save=folder, save_interval=2, **settings)
        shared["run"] = trained(iterations=5, **start)
    return shared["run"], start


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
