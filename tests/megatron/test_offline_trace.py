"""adacc trace --device: a layer as on a GPU that is not there."""

import json
from pathlib import Path

import pytest

from megatron_adacc import cli
from megatron_adacc.planner import Compress, Keep, Plan, Recompute

MODEL = [
    *("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--micro-batch-size", "2", "--fp16"),
    *("--transformer-impl", "local", "--no-masked-softmax-fusion", "--vocab-size", "127"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
]
DEVICE = ["--device", "v100-32gb"]
TOKENS, HIDDEN, PAIRS = 16 * 2, 32, 2 * 4 * 16 * 16


def test_table_json_picture_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page, plan, table = tmp_path / "layer.html", tmp_path / "plan.json", tmp_path / "table.json"
    outputs = ["--html", str(page), "-o", str(plan), "--json", str(table)]
    assert cli.main(["trace", *MODEL, *DEVICE, *outputs]) == 0
    lines = capsys.readouterr().out.splitlines()
    content = json.loads(table.read_text())
    totals = content["totals"]
    masks = PAIRS + 2 * TOKENS * HIDDEN
    held = TOKENS * HIDDEN * 2 + 2 * 16 * 16 + 4 * TOKENS * 4  # boundary, attention mask, statistics
    assert totals["autograd_bytes"] == TOKENS * HIDDEN * 2 * 16 + 2 * PAIRS * 2 + masks + held - TOKENS * HIDDEN * 2
    assert held + masks // 8 <= totals["held_bytes"] <= held + masks // 8 + 3 * 64
    assert totals["measured_bytes"] is None
    assert lines[0].startswith(f"AdaccTransformerLayer {content['fingerprint']}: ")
    assert "As on NVIDIA Tesla V100 SXM2 32 GB, which computes nothing here: recipes are not verified." in lines
    assert lines[-3:] == [f"wrote {path}" for path in (page, table, plan)]
    assert not any(line.startswith(("settled:", "kept as")) for line in lines)
    (layer,) = Plan.load(plan).layers
    actions = {row["site"]: layer.action(row["site"]) for row in content["rows"]}
    assert {site: str(action) for site, action in actions.items()} == {r["site"]: r["action"] for r in content["rows"]}
    assert {type(action) for action in actions.values()} == {Keep, Compress, Recompute}
    # A dropped-out tensor comes from its mask: here the products that follow are larger than the mask.
    (dropped,) = [row for row in content["rows"] if row["site"].endswith("attention_dropout/native_dropout.0")]
    assert (dropped["action"], dropped["recipe_ops"], dropped["bytes"]) == ("recompute", 8, PAIRS * 2)
    (row,) = [line for line in lines if line.startswith(f"{dropped['site']}  ")]
    assert "recompute, 8 ops" in row
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "on v100-32gb under recompute" in page.read_text()
    assert cli.main(["trace", *MODEL, *DEVICE, "--plan", str(plan)]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:-3]


def test_a_share_of_a_tensor_parallel_layer(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["trace", *MODEL, *DEVICE, "--tensor-model-parallel-size", "2", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    (probabilities,) = [row for row in rows if row["site"].endswith("_softmax.0")]
    assert probabilities["shape"] == [2, 2, 16, 16]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*MODEL, "--device", "abacus"], "'abacus'"),
        ([*DEVICE, "--hidden-size", "32"], "--num-attention-heads is missing: give the model by Megatron's flags"),
        ([*MODEL, *DEVICE, "--bogus"], "unrecognized arguments: --bogus"),
        ([*MODEL, *DEVICE, "--num-experts", "2"], "--num-experts cannot be planned for a device that is not there"),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["trace", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("adacc trace: error: ")
    assert sentence in err
    assert out == ""
