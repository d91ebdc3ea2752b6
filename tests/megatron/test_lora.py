"""LoRA in Megatron: the base's losses at the start, plans that change no bit, layouts, checkpoints, refusals."""

import shutil
from argparse import Namespace

import pytest
import torch
from checkpoints import tensors
from megatron_models import MODELS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_adacc.errors import UserError
from megatron_adacc.megatron import lora

RANK = 4
# (in + out) of the linear layers of a layer of the tests' model: qkv, proj, fc1, fc2.
IN_PLUS_OUT = (32 + 96) + (32 + 32) + (32 + 128) + (128 + 32)
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXACT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
COMMON = {"make_vocab_size_divisible_by": 64, "ckpt_format": "torch_dist"}
TENSOR = {"ranks": 2, "tensor_model_parallel_size": 2}
LAYOUTS = {
    "tensor": TENSOR,
    "sequence": {**TENSOR, "sequence_parallel": True},
    "pipeline": {"ranks": 2, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where the tests of this module keep what they make once: bases by model, and runs of one rank beside them."""
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def base(trained, folders):
    """base(model): the folder of a base of two steps, whole or on any number of ranks."""

    def made(model="gpt"):
        folder = folders / model
        if not folder.exists():
            trained(iterations=2, save=folder, save_interval=2, report=False, **COMMON, **EXACT, **MODELS[model])
        return folder

    return made


@pytest.fixture
def adapted(trained, base):
    """adapted(model, ...): four steps of adapters beside that base."""

    def run(model="gpt", **settings):
        settings = {"iterations": 4, **COMMON, **MODELS[model], **settings}
        return trained(pretrained_checkpoint=base(model), adacc_lora_rank=RANK, **settings)

    return run


@pytest.fixture
def one_rank(adapted, folders):
    """one_rank(model): the run of one rank without dropout, and the folder of its checkpoints after 2 and 4 steps."""
    runs = {}

    def made(model="gpt"):
        folder = folders / f"{model}-one"
        if not folder.exists():
            runs[model] = adapted(model, save=folder, save_interval=2, **EXACT)
            torch.save(runs[model].losses, folder / "losses.pt")
        return torch.load(folder / "losses.pt"), folder

    return made


def saved(folder, tmp_path, iteration=4):
    """Every tensor of a distributed checkpoint by name, whole, whatever ranks wrote it."""
    dcp_to_torch_save(folder / f"iter_{iteration:07d}", tmp_path / "whole.pt")
    found = dict(tensors(torch.load(tmp_path / "whole.pt", weights_only=False)))
    return {name: tensor for name, tensor in found.items() if "lora_" in name}


def test_the_first_loss_is_the_bases_and_plans_change_no_bit(trained, adapted, base, tmp_path):
    alone = trained(iterations=1, load=base(), finetune=True, **COMMON, **DROPOUT)
    runs = {}
    for plan in ("off", "full", "recompute"):
        runs[plan] = adapted(plan=plan, save=tmp_path / plan, save_interval=4, **DROPOUT)
    assert runs["off"].losses[0] == alone.losses[0]
    assert len(set(runs["off"].losses)) == 4
    states = {plan: saved(tmp_path / plan, tmp_path) for plan in runs}
    for plan in ("full", "recompute"):
        assert runs[plan].losses == runs["off"].losses
        assert states[plan].keys() == states["off"].keys()
        assert all(torch.equal(states[plan][name], tensor) for name, tensor in states["off"].items())
    held = {plan: sum(run.report["layer_held_bytes"].values()) for plan, run in runs.items()}
    assert held["recompute"] < 0.3 * held["off"]
    trained_parameters = 2 * RANK * IN_PLUS_OUT
    assert f"it trains {trained_parameters:,} of" in runs["off"].text


@pytest.mark.distributed
@pytest.mark.parametrize(("model", "layout"), [("gpt", "sequence"), ("llama", "tensor"), ("gpt", "pipeline")])
def test_two_ranks_train_the_adapters_of_one(model, layout, adapted, one_rank, tmp_path):
    losses, folder = one_rank(model)
    together = adapted(model, save=tmp_path / "off", save_interval=4, **LAYOUTS[layout], **EXACT)
    assert together.losses == pytest.approx(losses, abs=1e-4)
    expected, found = saved(folder, tmp_path), saved(tmp_path / "off", tmp_path)
    # Adam's moments are of the gradients' size, which the weights do not show; a distributed optimizer stores them in
    # another form.
    compared = [
        name for name in expected if "optimizer" not in name or "use_distributed_optimizer" not in LAYOUTS[layout]
    ]
    assert len(compared) == (8 if layout == "pipeline" else 24)
    for name in compared:
        assert (expected[name] - found[name]).norm() <= 2e-3 * expected[name].norm(), name
        assert expected[name].norm() > 0
    if layout == "sequence":
        again = adapted(model, plan="recompute", save=tmp_path / "ours", save_interval=4, **LAYOUTS[layout], **EXACT)
        ours = saved(tmp_path / "ours", tmp_path)
        assert again.losses == together.losses
        assert all(torch.equal(ours[name], tensor) for name, tensor in found.items())


def test_a_checkpoint_has_the_adapters_alone_and_goes_on_beside_its_base(adapted, trained, one_rank, base, tmp_path):
    losses, folder = one_rank()
    names = saved(folder, tmp_path)
    whole = tmp_path / "whole.pt"
    everything = {name for name, tensor in tensors(torch.load(whole, weights_only=False)) if tensor.dim() > 1}
    assert everything == {name for name, tensor in names.items() if tensor.dim() > 1}
    shutil.copytree(folder, tmp_path / "c")
    # As if it had been killed after its second step.
    shutil.rmtree(tmp_path / "c" / "iter_0000004")
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = adapted(load=tmp_path / "c", **EXACT)
    assert resumed.losses == losses[2:]
    assert f"adapters go on from {tmp_path / 'c'}" in resumed.text


def test_what_is_no_checkpoint_of_adapters_is_refused(train, base, one_rank, tmp_path):
    _, folder = one_rank()
    settings = {"report": False, **COMMON, **EXACT}
    asked = {**settings, "adacc_lora_rank": RANK}
    for given, words in (
        ({**settings, "load": folder}, "holds LoRA adapters without their base"),
        ({**asked, "load": folder}, "holds LoRA adapters without their base"),
        (
            {**asked, "adacc_lora_rank": 8, "pretrained_checkpoint": base(), "load": folder},
            "--adacc-lora-rank 4, not 8",
        ),
        ({**asked, "adacc_lora_targets": "linear_qkv,wrong", "load": base()}, "asked for 'wrong'"),
    ):
        run = train(**given)
        assert run.code == 2, run.text[-3000:]
        assert words in run.sentence()


class TestSentences:
    @pytest.fixture
    def args(self):
        return Namespace(
            adacc_lora_rank=4,
            adacc_lora_alpha=None,
            adacc_lora_targets=None,
            adacc_plan="off",
            adacc_limit=None,
            transformer_impl="local",
            ckpt_format="torch",
            save=None,
            load=None,
            pretrained_checkpoint="base",
        )

    def test_defaults(self, args):
        lora.complete(args)
        lora.check(args)
        assert args.adacc_lora_alpha == 8.0
        assert lora.targets_of(args) == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"adacc_lora_rank": None, "adacc_lora_alpha": 2.0}, "--adacc-lora-alpha needs --adacc-lora-rank"),
            ({"adacc_lora_rank": 0}, "rank of an adapter is 0"),
            ({"adacc_lora_targets": "linear_qkv,"}, "names of layers with commas"),
            ({"transformer_impl": "transformer_engine"}, "--transformer-impl local"),
            ({"adacc_state_plan": "8"}, "--adacc-state-plan cannot go with"),
            ({"num_experts": 4}, "--num-experts cannot go with"),
            ({"use_megatron_fsdp": True}, "--use-megatron-fsdp cannot go with"),
            ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 cannot go with"),
            ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute cannot go with"),
            ({"ckpt_format": "torch_dcp"}, "--ckpt-format torch or torch_dist"),
            ({"save": "here", "pretrained_checkpoint": None}, "a base that is nowhere"),
            ({"save": "base"}, "among the checkpoints of their base"),
        ],
    )
    def test_what_cannot_be_meant(self, args, change, words):
        vars(args).update(change)
        with pytest.raises(UserError, match=words):  # noqa: PT012
            lora.complete(args)
            lora.check(args)
