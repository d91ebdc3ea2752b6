"""--adacc-dgr-offload in Megatron's loop: no bit differs, and the device holds what was predicted."""

import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, tensors
from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.cost.static_memory import StaticBytes
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import delayed_bytes, state_flags
from megatron_adacc.megatron.joint_states import offer
from megatron_adacc.megatron.state_plan import StateAdamW
from megatron_adacc.optim.offload_file import FilePlace

CLI = Path(__file__).resolve().parents[2] / "megatron_adacc" / "cli.py"
MODEL = {"hidden_size": 64, "seq_length": 16, "lr": 1e-3, "hidden_dropout": 0.1, "attention_dropout": 0.1}
MODEL["env"] = {"TORCH_COMPILE_DISABLE": "1"}
FLAGS = {"adacc_state_plan": "8", "adacc_dgr_group_size": 2, "adacc_gradient_guard": "clip", "clip_grad": 0.1}
SIZES = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--vocab-size", "127", "--device", "cpu", "--adacc-state-plan", "8"),
    *("--adacc-dgr-group-size", "2", "--adacc-dgr-offload"),
]


def args_of(**given: object) -> Namespace:
    return Namespace(
        **{
            "adacc_state_plan": "8", "adacc_state_limit": None, "adacc_state_price": state_flags.DEFAULT_PRICE,
            "adacc_plan": "auto", "adacc_limit": None, "adacc_dgr_group_size": 2, "adacc_dgr_offload": True,
            "adacc_dgr_offload_dir": None, "adacc_gradient_guard": None, "adacc_lora_rank": None, "save": None,
            "load": None, "optimizer": "adam", "global_batch_size": 1, "micro_batch_size": 1, "data_parallel_size": 1,
            **given,
        }
    )  # fmt: skip


def test_offload_changes_no_loss_and_holds_what_adacc_memory_predicts(train, zygote, tmp_path):
    plain = train(iterations=5, **FLAGS, **MODEL)
    away = train(iterations=5, adacc_dgr_offload=True, adacc_dgr_offload_dir=tmp_path, **FLAGS, **MODEL)
    assert away.code == 0, away.text[-3000:]
    assert away.losses == plain.losses
    figures, table = tmp_path / "memory.json", tmp_path / "table.txt"
    assert zygote.run(CLI, ["memory", *SIZES, "--json", str(figures)], 1, {"COLUMNS": "120"}, table) == 0, (
        table.read_text()
    )
    (stage,) = json.loads(figures.read_text())["stages"]
    delayed = stage["delayed"]
    eight = delayed["offload"]["8"]
    said = f"state offload: at most {eight['device_bytes']:,} bytes on the device, {eight['away_bytes']:,} in a file in"
    assert f"{said} {tmp_path}\n" in away.text
    assert f"2 groups: up to {written_bytes(delayed['waiting_bytes'])} of gradients wait" in away.text
    # What was fetched before the first step is older than the meter's table: that step's figure is an upper bound.
    rows = zip(plain.report["iterations"][1:], away.report["iterations"][1:], strict=True)
    for row, own in rows:
        assert row["peak_bytes"] - own["peak_bytes"] >= eight["away_bytes"] - eight["device_bytes"] > 100_000
    assert eight["total_bytes"] == (
        stage["total_bytes"] - stage["bytes"]["moments"] + eight["device_bytes"] + delayed["waiting_bytes"]
    )
    shown = re.search(r"moments in 8 bits, offloaded: on the device +([0-9,]+)", table.read_text())
    assert shown[1] == f"{eight['device_bytes']:,}"


def test_a_tied_embedding_is_in_the_first_group_on_both_of_its_stages():
    model = GptModel(4, 64, 4, 4, 16, 256, 128, 16)
    chunks = [Chunk(2, last=False), Chunk(2, first=False)]
    job = SimpleNamespace(tensor_parallel=1, tensors=lambda stage: (tensors(model, chunks[stage]),))
    for stage, name in enumerate(("embedding.word_embeddings.weight", "output_layer.weight")):
        groups = delayed_bytes.groups_of(job, stage, 2)
        assert [name in [tensor.name for tensor in group] for group in groups] == [True, False]
        held = delayed_bytes.device_moments(job, groups, 4)
        assert held == max(sum(8 * t.elements if t.shared or t.elements < 4096 else t.elements + t.elements // 128
                               for t in group) for group in groups)  # fmt: skip


def test_the_plan_of_activations_counts_what_stays_on_the_device():
    large, small = torch.zeros(64, 256, requires_grad=True), torch.zeros(5000, requires_grad=True)
    for limit_bytes, expected in ((None, 64 * 514), (40_000, 40_000), (10**6, 8 * 64 * 256 + 64 + 20)):
        optimizer = StateAdamW([{"params": [large, small]}], 8, {}, limit_bytes, 0, away=FilePlace())
        optimizer.delay([[large], [small]], None, lambda parameter: True)
        (form,) = offer([optimizer], args_of(), []).forms
        assert form.bytes == expected + 4 * 64 * 256  # and the gradients that wait
        assert optimizer.most_device_bytes() == 64 * 514


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"adacc_dgr_group_size": 1}, "but all layers are in one: give --adacc-dgr-group-size 2 or more as well"),
        (
            {"adacc_dgr_offload": False, "adacc_dgr_offload_dir": "x"},
            "is the folder for --adacc-dgr-offload: give that",
        ),
        ({"adacc_state_plan": "auto"}, "little of the state is there: give --adacc-state-limit, or the bits, such as"),
    ],
)
def test_what_is_refused(given, sentence):
    state_flags.check(args_of())
    with pytest.raises(UserError, match=sentence):
        state_flags.check(args_of(**given))
    if given.get("adacc_dgr_group_size") == 1:
        with pytest.raises(UserError, match=sentence):
            delayed_bytes.of_stage(args_of(**given), SimpleNamespace(), 0, StaticBytes())


def test_a_folder_that_is_not_there_ends_the_job_in_a_sentence(train, tmp_path):
    run = train(iterations=1, adacc_dgr_offload=True, adacc_dgr_offload_dir=tmp_path / "absent", **FLAGS, **MODEL)
    assert run.code == 2
    assert "No file for the optimizer's state can be made in" in run.sentence()
