"""--adacc-base in Megatron: each format on one rank and two, plans that change no bit, memory, resuming, refusals."""

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from checkpoints import tensors
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_adacc.cost.finetuning import Adapters, linears
from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, count
from megatron_adacc.cost.static_memory import Training, of_chunk
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import base_format, lora

RANK = 4
EXACT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# Nothing for torch.compile to do: compiling takes longer than these jobs.
UNFUSED = {"no_bias_gelu_fusion": True, "no_bias_swiglu_fusion": True, "no_bias_dropout_fusion": True}
COMMON = {"make_vocab_size_divisible_by": 64, "ckpt_format": "torch_dist", **UNFUSED}
# Elements of the linear layers of the two layers of the tests' model.
ELEMENTS = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)
ROWS = 2 * (96 + 32 + 128 + 32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 127, (16 * 40,), generator=generator).tolist()
    (folder / "text.txt").write_text(" ".join(map(str, ids)))
    return folder


@pytest.fixture
def adapted(trained, folders):
    """adapted(format, ...): a job beside a base of two steps."""

    def run(format, **settings):
        base = folders / "base"
        if not base.exists():
            trained(iterations=2, save=base, save_interval=2, report=False, **COMMON, **EXACT)
        if format in ("int8", "gptq4"):
            settings["adacc_base_text"] = folders / "text.txt"
        settings = {"pretrained_checkpoint": base, "adacc_lora_rank": RANK, "adacc_base": format, **settings}
        return trained(**{"iterations": 3, **COMMON, **settings})

    return run


def saved(folder, tmp_path, iteration):
    dcp_to_torch_save(folder / f"iter_{iteration:07d}", tmp_path / "whole.pt")
    return {
        name: tensor
        for name, tensor in tensors(torch.load(tmp_path / "whole.pt", weights_only=False))
        if tensor.dim() > 1
    }


def rounding(text):
    """Squared output errors of GPTQ and of round-to-nearest, and on how many layers of how many GPTQ's is lower."""
    found = re.search(r"squared output error (\S+) .* has (\S+), lower on (\d+) of (\d+)", text)
    return float(found[1]), float(found[2]), int(found[3]), int(found[4])


BYTES = {
    "nf4": ELEMENTS * 4.5 / 8,
    # Of each layer 48, 16, 64 and 64 scales of a byte, one float32 maximum and one mean.
    "nf4-double": ELEMENTS * 4.125 / 8 + 2 * 4 * 8,
    "int8": ELEMENTS + 4 * ROWS,
    # Blocks of 32 columns, and of 128 in the last.
    "gptq4": ELEMENTS / 2 + 5 * (ROWS - 2 * 32 + 2 * 32),
}


@pytest.fixture
def one_rank(adapted, folders, tmp_path):
    """one_rank(format): three steps without a plan: text, losses, and the folder of its checkpoints."""

    def made(format):
        folder = folders / f"one-{format}"
        if not folder.exists():
            run = adapted(format, save=folder, save_interval=1, **DROPOUT)
            torch.save((run.text, run.losses), folder / "run.pt")
        return *torch.load(folder / "run.pt"), folder

    return made


# nf4-double, on two ranks below.
@pytest.mark.parametrize("format", ["nf4", "int8", "gptq4"])
def test_a_plan_changes_no_bit_beside_any_base(format, adapted, one_rank, tmp_path):
    text, losses, folder = one_rank(format)
    run = adapted(format, plan="recompute", save=tmp_path / "ours", save_interval=3, **DROPOUT)
    assert len(set(losses)) == 3
    assert run.losses == losses
    expected, found = saved(folder, tmp_path, 3), saved(tmp_path / "ours", tmp_path, 3)
    assert expected.keys() == found.keys()
    assert all("lora_" in name for name in expected)
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    assert f"8 linear layers of rank 0 are in {format}: {BYTES[format] / 2**20:.2f} MiB in place of" in text
    assert f"{4 * ELEMENTS / 2**20:.2f} MiB" in text
    assert "still held" not in text
    if format == "gptq4":
        error, nearest, lower, layers = rounding(text)
        assert lower == layers == 8
        assert error < 0.9 * nearest


@pytest.mark.distributed
@pytest.mark.parametrize(("format", "sequence"), [("nf4-double", False), ("int8", True), ("gptq4", True)])
def test_two_tensor_parallel_ranks(format, sequence, adapted, one_rank, tmp_path):
    _, losses, _ = one_rank("nf4" if format == "nf4-double" else format)
    layout = {"ranks": 2, "tensor_model_parallel_size": 2, "sequence_parallel": sequence, **EXACT}
    states = []
    for plan in ("off", "recompute"):
        folder = tmp_path / plan
        run = adapted(format, plan=plan, iterations=2, save=folder, save_interval=2, **layout)
        states.append((run.losses, saved(folder, tmp_path, 2)))
    (plain, expected), (ours, found) = states
    assert ours == plain
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    # Another rounding than on one rank, of what would give the same.
    assert plain == pytest.approx(losses[:2], abs=0.1)


@pytest.mark.distributed
def test_pipeline_stages_are_calibrated_together(adapted, one_rank):
    _, losses, _ = one_rank("gptq4")
    # DDP's hooks are on modules, some of which the new base replaces.
    hooks = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    settings = {"ranks": 2, "pipeline_model_parallel_size": 2, "plan": "recompute", **hooks, **EXACT}
    run = adapted("gptq4", iterations=2, **settings)
    error, nearest, lower, layers = rounding(run.text)
    assert lower == layers == 4
    assert error < 0.9 * nearest
    assert run.losses == pytest.approx(losses[:2], abs=0.1)


def test_resuming_quantizes_the_same_base_again_and_refuses_another(adapted, train, one_rank, folders, tmp_path):
    _, losses, folder = one_rank("gptq4")
    shutil.copytree(folder, tmp_path / "c")
    # As if it had been killed after its first step. What was trained by then plays no part in the calibration.
    for iteration in (2, 3):
        shutil.rmtree(tmp_path / "c" / f"iter_{iteration:07d}")
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("1")
    assert adapted("gptq4", load=tmp_path / "c", **DROPOUT).losses == losses[1:]
    run = train(
        pretrained_checkpoint=folders / "base",
        load=folder,
        adacc_lora_rank=RANK,
        adacc_base="nf4",
        report=False,
        **COMMON,
    )
    assert run.code == 2, run.text[-3000:]
    assert "with --adacc-base gptq4, not nf4" in run.sentence()


def test_a_limit_in_bytes_knows_the_base(trained, tmp_path):
    out = tmp_path / "static"
    settings = {"adacc_lora_rank": RANK, "adacc_base": "nf4-double", "bf16": True, **COMMON, **DROPOUT}
    # Measuring what memory costs takes some itself.
    run = trained(
        iterations=2, plan="auto", adacc_limit="200MiB", env={"STATIC_BYTES": str(out)},
        script=Path(__file__).with_name("static_script.py"), **settings,
    )  # fmt: skip
    assert "plan auto, limit 200.0 MiB" in run.text, run.text[-9000:]
    model = GptModel(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=4, kv_channels=8, ffn_hidden_size=128,
        vocab_size=128, positions=16,
    )  # fmt: skip
    adapters, training = Adapters(RANK, lora.TARGETS, "nf4-double"), Training("bf16", torch_optimizer=True)
    expected = of_chunk(adapters.matrices(linears(model), 2), training)
    frozen = adapters.base_bytes(linears(model), Chunk(2), count(model), 2)
    found = json.loads(Path(f"{out}.0").read_text())
    assert found["buffers"] == BYTES["nf4-double"]
    assert found["buffers"] + found["parameters"] == frozen + expected.parameters
    for part in ("gradients", "master", "moments", "counters"):
        assert found[part] == getattr(expected, part)


class TestSentences:
    @pytest.fixture
    def args(self, folders):
        return Namespace(
            adacc_lora_rank=4, adacc_base="gptq4", adacc_base_text=str(folders / "text.txt"), context_parallel_size=1
        )

    def test_the_texts_digest_is_noted(self, args):
        base_format.complete(args)
        base_format.check(args)
        assert len(args.adacc_base_digest) == 64

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"adacc_base": "nf3"}, "must be one of 16bit, nf4, nf4-double, int8, gptq4"),
            ({"adacc_lora_rank": None}, "gptq4 needs --adacc-lora-rank"),
            ({"adacc_base_text": None}, "gptq4 is calibrated on text"),
            ({"adacc_base": "nf4"}, "nf4 looks at no text"),
            ({"adacc_base_text": "nowhere.txt"}, "nowhere.txt cannot be read: No such file"),
            ({"context_parallel_size": 2}, "cannot be calibrated with --context-parallel-size 2"),
            ({"qk_clip": True}, "--qk-clip cannot go with --adacc-base gptq4"),
            ({"fp8": "hybrid"}, "--fp8-format cannot go with"),
        ],
    )
    def test_what_cannot_be_meant(self, args, change, words):
        vars(args).update(change)
        with pytest.raises(UserError, match=words):  # noqa: PT012
            base_format.complete(args)
            base_format.check(args)

    def test_a_base_that_adapters_were_not_trained_beside(self, args):
        base_format.complete(args)
        trained = Namespace(**vars(args))
        base_format.refuse_other("here", args, trained)
        for change, words in (
            ({"adacc_base_digest": "0"}, "calibrated on another text than"),
            ({"adacc_base": "nf4"}, "with --adacc-base nf4, not gptq4"),
        ):
            with pytest.raises(UserError, match=words):
                base_format.refuse_other("here", args, Namespace(**{**vars(trained), **change}))
        with pytest.raises(UserError, match="with --adacc-base 16bit, not gptq4"):
            base_format.refuse_other("here", args, Namespace(adacc_lora_rank=4))

    def test_a_text_is_cut_into_sequences(self, args, monkeypatch):
        args.seq_length = 4
        monkeypatch.setattr(base_format, "_tokens", lambda path: iter([[1, 2, 3], [4, 5, 6, 7, 8, 9]]))
        assert base_format._sequences(args).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
        monkeypatch.setattr(base_format, "SEQUENCES", 1)
        assert base_format._sequences(args).tolist() == [[1, 2, 3, 4]]
        args.seq_length = 10
        with pytest.raises(UserError, match="has 9 tokens, but one sequence has 10"):
            base_format._sequences(args)
