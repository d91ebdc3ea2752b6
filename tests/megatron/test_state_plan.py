"""--adacc-state-plan in Megatron's loop: fewer bits for Adam's moments."""

import math
import re
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint

from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, tensors
from megatron_adacc.cost.static_memory import Training
from megatron_adacc.megatron.state_bytes import of_chunk

# Large enough for the weights to be quantized: parameters of fewer than 4096 elements keep 32 bits.
MODEL = {"hidden_size": 64, "seq_length": 16, "lr": 1e-3, "hidden_dropout": 0.1, "attention_dropout": 0.1}
FAILING = Path(__file__).with_name("failing_script.py")
DELAYED = {"adacc_dgr_group_size": 2, "adacc_gradient_guard": "clip"}
# Compiled and plain updates agree (tests/optim/test_block_adamw.py), and to compile takes each rank seconds.
MODEL["env"] = {"TORCH_COMPILE_DISABLE": "1"}


def bytes_said(run) -> int:
    """Of m and v on the first rank, to the byte."""
    return int(re.search(r"adacc: optimizer state: .*?, ([0-9,]+) bytes;", run.text)[1].replace(",", ""))


def counted(tensor_parallel: int) -> GptModel:
    """The fixture's model with MODEL's sizes; Megatron pads its 128 words to a multiple of 128 times the ranks."""
    return GptModel(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_channels=16, ffn_hidden_size=256,
        vocab_size=128 * tensor_parallel, positions=16,
    )  # fmt: skip


def static_share(run) -> float:
    """What the job says of its static bytes, of those without a state plan."""
    return float(re.search(r"adacc: optimizer state: .* \(([0-9.]+)%\)", run.text)[1]) / 100


def test_full_is_megatron_as_it_is(train):
    plain, full = train(iterations=3, **MODEL), train(iterations=3, adacc_state_plan="full", **MODEL)
    assert plain.losses == full.losses
    assert "optimizer state:" not in full.text


def test_one_group_and_32_bits_change_no_bit(train):
    """The guard makes the optimizer ours, with 32 bits; in three steps nothing stands out."""
    plain, ours = (
        train(iterations=3, **kind, **MODEL)
        for kind in ({}, {"adacc_gradient_guard": "clip", "adacc_dgr_group_size": 1})
    )
    assert plain.losses == ours.losses
    assert "100.0 % of blocks in 32 bits" in ours.text


def test_the_recipe_by_its_names(train, tmp_path):
    """What the preset changes is said."""
    recipe = tmp_path / "recipe.yaml"
    policy = "{text: fp16, image: [fp8, fp16]}"
    recipe.write_text(
        f"plan: recompute\noptim: {{macro_architecture: true, group_size: 2, precision_policy: {policy}}}\n"
    )
    settings = {"adacc_config": recipe, "adacc_state_plan": "8", "adacc_lr_preset": "delayed", "lr_warmup_iters": 10}
    run = train(iterations=1, plan=None, lr_decay_iters=20, **settings, **MODEL)
    assert "% of blocks in 16 bits, " in run.text
    assert "adacc: precision_policy: this model has no parameters of 'image'" in run.text
    assert "adacc: --adacc-lr-preset delayed: lr 0.001 -> 0.0012 (times 1.2), lr_warmup_iters 10 -> 13" in run.text
    assert "delayed updates in 2 groups: up to" in run.text


def test_fewer_bits_train_near_the_exact_run(train):
    plain = train(iterations=6, **MODEL)
    few = train(iterations=6, adacc_state_plan="4", **MODEL)
    assert few.code == 0, few.text[-3000:]
    assert few.losses[0] == plain.losses[0]
    assert few.losses != plain.losses
    assert few.losses == pytest.approx(plain.losses, abs=0.05)
    assert static_share(few) == pytest.approx(0.58, abs=0.02)  # small tensors keep 32 bits
    assert bytes_said(few) == of_chunk(tensors(counted(1), Chunk(2)), Training("fp32"), 4)


def test_a_limit_is_kept_and_bits_are_chosen_by_block(train):
    run = train(iterations=110, adacc_state_plan="auto", adacc_state_limit="60%", log_interval=50, **MODEL)
    assert run.code == 0, run.text[-3000:]
    assert static_share(run) <= 0.6
    after = re.search(r"adacc: optimizer state after 100 steps: (.*)", run.text)[1]
    assert "in 8 bits" in after
    assert "in 4 bits" in after


FP16 = {"fp16": True, "initial_loss_scale": 2**10}
KILLED = {**FP16, **DELAYED, "adacc_plan": "auto", "adacc_limit": "25%"}


@pytest.mark.parametrize("kind", [{}, KILLED], ids=["fp32", "fp16-delayed-killed"])
def test_a_resumed_run_has_the_losses_of_one_never_stopped_or_killed(train, tmp_path, kind):
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
    if kind:
        env = {**MODEL["env"], "KILL_AT": "5", "KILL_PACK": "3"}
        settings["adacc_dgr_offload"] = True  # the run that is whole had it not
        killed = train(iterations=6, plan=None, script=FAILING, **saved, **{**settings, "env": env})
        assert killed.code != 0
    else:
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
    [
        ("tensor", {**DELAYED, "adacc_dgr_offload": True}),
        ("pipeline", {**DELAYED, "num_layers": 4}),
        ("pipeline", {"fp16": True, "initial_loss_scale": 2**10}),
    ],
    ids=["tensor-delayed-offload", "pipeline-delayed", "pipeline-fp16"],
)
def test_what_two_ranks_share_stays_alike(train, tmp_path, parallel, kind):
    """Norm weights on tensor-parallel ranks; the embedding that first and last stage have in common."""
    layout = {f"{parallel}_model_parallel_size": 2, "ranks": 2, "save": tmp_path, "save_interval": 4}
    run = train(iterations=4, adacc_state_plan="8", ckpt_format="torch", **MODEL, **layout, **kind)
    assert run.code == 0, run.text[-3000:]
    stage = Chunk(kind.get("num_layers", 2) // 2, last=False) if parallel == "pipeline" else Chunk(2)
    split = 2 if parallel == "tensor" else 1
    assert bytes_said(run) == of_chunk(
        tensors(counted(split), stage, split), Training("fp32"), 8, tensor_parallel=split
    )
    folder, names = tmp_path / "iter_0000004", {"tensor": "mp_rank_0{}", "pipeline": "mp_rank_00_00{}"}
    saved = [
        torch.load(folder / names[parallel].format(rank) / "model_optim_rng.pt", weights_only=False)
        for rank in range(2)
    ]
    if "adacc_gradient_guard" in kind:
        # The guard's norm is Megatron's, each tensor of the two ranks counted once, and the ranks know the same.
        one, other = (entry["optimizer"]["adacc"]["guard"] for entry in saved)
        norms = [float(norm) for norm in re.findall(r"grad norm: ([0-9.]+)", run.text)]
        assert one == other
        assert one["count"] == len(norms) == 4
        # The loss is known to both, though only the last stage computes it; a mean of the four.
        losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", run.text)]
        assert one["loss"] == pytest.approx(sum(losses) / 4, abs=1e-2)
        assert one["mean"] == pytest.approx(sum(map(math.log, norms)) / 4, abs=1e-3)
        factors = [entry["optimizer"]["adacc"]["groups"]["factors"] for entry in saved]
        assert factors[0] == factors[1] != [1.0, 1.0]
    first, last = ({name: t for name, t in entry["model"].items() if isinstance(t, torch.Tensor)} for entry in saved)
    if parallel == "tensor":
        alike = [(first[name], last[name]) for name in first if "norm" in name]
        assert len(alike) >= 4
    else:
        alike = [(first["embedding.word_embeddings.weight"], last["output_layer.weight"])]
    assert all(torch.equal(one, other) for one, other in alike)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}], ids=["dp", "tp"])
def test_the_distributed_optimizer_resumes_and_goes_to_another_number_of_ranks(train, tmp_path, layout):
    settings = {"adacc_state_plan": "8", "use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
    settings |= {"lr_decay_iters": 6, **FP16, **MODEL, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    folder = tmp_path / "saved"
    whole = train(ranks=2, iterations=6, save=folder, save_interval=3, **layout, **settings)
    assert whole.code == 0, whole.text[-3000:]
    assert static_share(whole) < (0.85 if not layout else 0.75)  # of a rank: half the moments, but all gradients
    settings |= {"load": folder, "ckpt_step": 3}
    rest = train(ranks=2, iterations=6, **layout, **settings)
    assert rest.code == 0, rest.text[-3000:]
    assert rest.losses == whole.losses[3:]
    parallel = 2 if layout else 1
    training = Training("fp16", zero=1, data_parallel=2 // parallel)
    own = tensors(counted(parallel), Chunk(2), parallel)
    assert bytes_said(whole) == of_chunk(own, training, 8, tensor_parallel=parallel, rank=0)
    if not layout:
        alone = train(ranks=1, iterations=6, **settings)
        assert alone.code == 0, alone.text[-3000:]
        assert alone.losses == pytest.approx(whole.losses[3:], abs=3e-3)  # blocks lie elsewhere in a shard of all


def test_float32_shards_of_the_distributed_optimizer(train, tmp_path):
    """They are views of the model's parameters."""
    settings = {"adacc_state_plan": "8", "use_distributed_optimizer": True, "lr_decay_iters": 4, **MODEL}
    whole = train(iterations=4, save=tmp_path, save_interval=2, **settings)
    assert whole.code == 0, whole.text[-3000:]
    assert whole.losses[-1] < whole.losses[0]
    rest = train(iterations=4, load=tmp_path, ckpt_step=2, **settings)
    assert rest.code == 0, rest.text[-3000:]
    assert rest.losses == whole.losses[2:]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"adacc_state_plan": "7"}, "--adacc-state-plan is '7', but the known ones are full, 16, 8, 4, auto."),
        ({"adacc_state_plan": "auto"}, "--adacc-state-plan auto needs --adacc-state-limit, such as 60%, or"),
        ({"adacc_state_plan": "8", "adacc_state_limit": "60%"}, "the state plan 8 does not look at it: leave it out."),
        ({"adacc_state_price": 0.1}, "--adacc-state-price is for --adacc-state-plan auto without --adacc-state-limit"),
        ({"adacc_state_plan": "auto", "adacc_state_limit": "60"}, "--adacc-state-limit is '60', but it is a share of"),
        ({"adacc_state_plan": "8", "optimizer_cpu_offload": True}, "--optimizer-cpu-offload does not know"),
        ({**DELAYED, "use_distributed_optimizer": True}, "and --use-distributed-optimizer divides it: leave out one"),
        ({"adacc_lr_preset": "delayed"}, "--adacc-lr-preset delayed is for delayed groups: give"),
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
