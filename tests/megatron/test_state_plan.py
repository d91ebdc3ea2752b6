"""--adacc-state-plan in Megatron's loop: fewer bits for Adam's moments."""

import re

import pytest
import torch
from checkpoints import checkpoint

# Large enough for the weights to be quantized: parameters of fewer than 4096 elements keep 32 bits.
MODEL = {"hidden_size": 64, "seq_length": 16, "lr": 1e-3, "hidden_dropout": 0.1, "attention_dropout": 0.1}
# Compiled and plain updates agree (tests/optim/test_block_adamw.py), and to compile takes each rank seconds.
MODEL["env"] = {"TORCH_COMPILE_DISABLE": "1"}


def static_share(run) -> float:
    """What the job says of its static bytes, of those without a state plan."""
    return float(re.search(r"adacc: optimizer state: .* \(([0-9.]+)%\)", run.text)[1]) / 100


def test_full_is_megatron_as_it_is(train):
    plain, full = train(iterations=3, **MODEL), train(iterations=3, adacc_state_plan="full", **MODEL)
    assert plain.losses == full.losses
    assert "optimizer state:" not in full.text


def test_fewer_bits_train_near_the_exact_run(train):
    plain = train(iterations=6, **MODEL)
    few = train(iterations=6, adacc_state_plan="4", **MODEL)
    assert few.code == 0, few.text[-3000:]
    assert few.losses[0] == plain.losses[0]
    assert few.losses != plain.losses
    assert few.losses == pytest.approx(plain.losses, abs=0.05)
    assert static_share(few) == pytest.approx(0.58, abs=0.02)  # small tensors keep 32 bits


def test_a_limit_is_kept_and_bits_are_chosen_by_block(train):
    run = train(iterations=110, adacc_state_plan="auto", adacc_state_limit="60%", log_interval=50, **MODEL)
    assert run.code == 0, run.text[-3000:]
    assert static_share(run) <= 0.6
    after = re.search(r"adacc: optimizer state after 100 steps: (.*)", run.text)[1]
    assert "in 8 bits" in after
    assert "in 4 bits" in after


@pytest.mark.parametrize("kind", [{}, {"fp16": True, "initial_loss_scale": 2**10}], ids=["fp32", "fp16"])
def test_a_resumed_run_has_the_losses_of_one_never_stopped(train, tmp_path, kind):
    settings = {
        "adacc_state_plan": "8",
        "adacc_plan": "recompute",
        "ckpt_format": "torch",
        "lr_decay_iters": 6,
        **MODEL,
        **kind,
    }
    whole = train(iterations=6, plan=None, **settings)
    saved = {"save": tmp_path / "saved", "save_interval": 3}
    train(iterations=6, exit_interval=3, plan=None, **saved, **settings)
    rest = train(iterations=6, plan=None, load=tmp_path / "saved", **settings)
    assert rest.code == 0, rest.text[-3000:]
    assert rest.losses == whole.losses[3:]


def test_a_checkpoint_goes_on_without_us_and_comes_back(train, tmp_path):
    settings = {"ckpt_format": "torch", "iterations": 5, **MODEL}
    train(adacc_state_plan="8", exit_interval=2, save=tmp_path / "ours", save_interval=2, **settings)
    entry = next(t for path, t in checkpoint(tmp_path / "ours", iteration=2).items() if "exp_avg_sq" in str(path))
    assert entry.dtype is torch.float32
    without = train(exit_interval=4, load=tmp_path / "ours", save=tmp_path / "theirs", save_interval=4, **settings)
    assert len(without.losses) == 2, without.text[-3000:]
    back = train(adacc_state_plan="4", load=tmp_path / "theirs", **settings)
    assert len(back.losses) == 1, back.text[-3000:]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("parallel", "kind"),
    [("tensor", {}), ("pipeline", {}), ("pipeline", {"fp16": True, "initial_loss_scale": 2**10})],
)
def test_what_two_ranks_share_stays_alike(train, tmp_path, parallel, kind):
    """Norm weights on tensor-parallel ranks; the embedding that first and last stage have in common."""
    layout = {f"{parallel}_model_parallel_size": 2, "ranks": 2, "save": tmp_path, "save_interval": 4}
    run = train(iterations=4, adacc_state_plan="8", ckpt_format="torch", **MODEL, **layout, **kind)
    assert run.code == 0, run.text[-3000:]
    folder, names = tmp_path / "iter_0000004", {"tensor": "mp_rank_0{}", "pipeline": "mp_rank_00_00{}"}
    models = [
        torch.load(folder / names[parallel].format(rank) / "model_optim_rng.pt", weights_only=False)["model"]
        for rank in range(2)
    ]
    first, last = ({name: t for name, t in model.items() if isinstance(t, torch.Tensor)} for model in models)
    if parallel == "tensor":
        alike = [(first[name], last[name]) for name in first if "norm" in name]
        assert len(alike) >= 4
    else:
        alike = [(first["embedding.word_embeddings.weight"], last["output_layer.weight"])]
    assert all(torch.equal(one, other) for one, other in alike)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"adacc_state_plan": "7"}, "--adacc-state-plan is '7', but the known ones are full, 16, 8, 4, auto."),
        ({"adacc_state_plan": "auto"}, "--adacc-state-plan auto needs --adacc-state-limit, such as 60%."),
        ({"adacc_state_plan": "8", "adacc_state_limit": "60%"}, "the state plan 8 does not look at it: leave it out."),
        ({"adacc_state_plan": "auto", "adacc_state_limit": "60"}, "--adacc-state-limit is '60', but it is a share of"),
        ({"adacc_state_plan": "8", "use_distributed_optimizer": True}, "--use-distributed-optimizer does not know"),
        ({"adacc_state_plan": "8", "optimizer": "sgd"}, "is for AdamW: use --optimizer adam with decoupled weight"),
    ],
)
def test_what_is_refused(train, flags, sentence):
    run = train(iterations=1, **{**MODEL, **flags})
    assert run.code == 2
    assert sentence in run.sentence()


def test_a_limit_that_nothing_meets(train):
    run = train(iterations=1, adacc_state_plan="auto", adacc_state_limit="30%", **MODEL)
    assert run.code == 2
    assert "is too little: with 4 bits everywhere the static bytes are" in run.sentence()
