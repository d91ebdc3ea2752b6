"""adacc compare-training: runs, resuming, figures, planted channels."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_adacc.cli import main
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import compare_command, compare_job, compare_study
from megatron_adacc.megatron.compare_command import strategies, table
from megatron_adacc.megatron.compare_job import plant
from megatron_adacc.megatron.compare_study import Outcome, Run, compare, outcome_of

SMALL = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "2", "--global-batch-size", "2"),
]


def outcome(strategy, seed, validation, outliers=False, errors=()):
    return Outcome(strategy, seed, outliers, (3.0, validation), validation, 10.0, 100, 200, tuple(errors))


def test_losses_are_compared_seed_by_seed():
    rows = compare(
        [
            outcome("off", 1, 2.0), outcome("off", 2, 4.0),
            outcome("quantize", 1, 2.2, errors=[(1, 0.5), (2, 0.1)]), outcome("quantize", 2, 4.0, errors=[(2, 0.3)]),
            outcome("quantize", 1, math.inf, outliers=True),
        ]
    )  # fmt: skip
    off, quantize, planted = rows
    assert (off.validation, off.seeds, off.beside_off, off.gradient_error) == (3.0, 2, None, None)
    assert off.validation_sd == pytest.approx(math.sqrt(2))
    assert (quantize.beside_off, quantize.beside_off_sd) == pytest.approx((0.05, math.sqrt(0.005)))
    assert (quantize.gradient_error, quantize.held_bytes, quantize.peak_bytes) == (0.3, 100, 200)
    assert (planted.validation, planted.validation_sd, planted.beside_off) == (math.inf, None, None)
    assert table(rows, 2).row_count == 3


def test_a_loss_that_is_no_number_is_infinite():
    rows = [{"lm_loss": loss, "step_ms": 1.0, "held_bytes": 5, "peak_bytes": None} for loss in (2.0, math.nan, None)]
    errors = [{"step": 2, "layer": n, "error": e} for n, e in ((1, 0.1), (2, 0.4))]
    found = outcome_of(Run("off", 1, False), {"iterations": rows, "gradient_errors": errors}, math.nan)
    assert found.losses == (2.0, math.inf, math.inf)
    assert (found.validation, found.gradient_errors) == (math.inf, ((2, 0.4),))


def test_lossy_strategies_are_watched_and_left_alone():
    flags = strategies("20%", "8%", "0.1", 600)
    assert flags["off"] == ("--adacc-plan", "off")
    for name in ("auto lossy", "compress", "quantize"):
        given = dict(zip(flags[name][::2], flags[name][1::2], strict=True))
        assert given["--adacc-warmup-steps"] == given["--adacc-check-gradients-every"] == "60"


class Layer(nn.Module):
    """As much of a transformer layer as channels are planted in."""

    def __init__(self, zero_centered):
        super().__init__()
        self.config = SimpleNamespace(layernorm_zero_centered_gamma=zero_centered)
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(128), nn.LayerNorm(128)
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        self.self_attention.linear_qkv, self.mlp.linear_fc1 = nn.Linear(128, 8), nn.Linear(128, 8)
        if zero_centered:
            nn.init.zeros_(self.input_layernorm.weight)

    def norm(self, x):
        weight = self.input_layernorm.weight + float(self.config.layernorm_zero_centered_gamma)
        return nn.functional.layer_norm(x, (128,), weight, self.input_layernorm.bias)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_planted_channels_are_large_and_change_nothing(zero_centered):
    torch.manual_seed(1)
    layer, x = Layer(zero_centered), torch.randn(64, 128)
    nn.init.normal_(layer.input_layernorm.bias)
    norm, out = layer.norm(x), layer.self_attention.linear_qkv(layer.norm(x))
    assert plant(list(layer.modules()), 20) == 4
    grown = layer.norm(x).abs().mean(0) / norm.abs().mean(0)
    assert sorted(grown.tolist())[-3:] == pytest.approx([1, 20, 20], rel=1e-4)
    assert torch.allclose(layer.self_attention.linear_qkv(layer.norm(x)), out, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--iterations", "3"], "--output is missing"),
        (["--output", "x", "--iterations", "0"], "--iterations is '0'"),
        (["--output", "x", "--strategies", "none"], "'none', but there are"),
        (["--output", "x", "--factor", "0.5"], "--factor is '0.5'"),
        (["--output", "x", "--outliers", "maybe"], "is one of without, with, both"),
        (["--output", "x", "--adacc-plan", "auto"], "sets the --adacc-* flags"),
    ],
)
def test_mistakes(capsys, options, words):
    assert main(["compare-training", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    (tmp_path / "data" / "tokenizer").mkdir(parents=True)

    def execute(settings, run, tell):
        if run.strategy == "off":
            raise UserError("off failed.")
        return outcome(run.strategy, run.seed, 2.0)

    monkeypatch.setattr(compare_command, "execute", execute)
    given = ["compare-training", "--output", str(tmp_path / "s"), "--data", str(tmp_path / "data"), "--seeds", "1"]
    assert main([*given, "--outliers", "without", "--strategies", "off", "full"]) == 2
    captured = capsys.readouterr()
    assert "error: off failed." in captured.err
    assert "2.0000" in captured.out
    assert [one["strategy"] for one in json.loads((tmp_path / "s" / "study.json").read_text())["runs"]] == ["full"]


def forked(zygote, output):
    """In place of Child: the job runs in a process that has imported Megatron already."""

    class Forked:
        def __init__(self, command, environment, log):
            script, *arguments = map(str, command[1:])
            if script == "-m":
                script, *arguments = compare_job.__file__, *arguments[1:]
            self.code = zygote.run(script, arguments, 1, {}, output)
            self.tail = output.read_text().splitlines(keepends=True)
            log.write_text(output.read_text())
            output.unlink()

        def lines(self):
            return iter(self.tail)

    return lambda *arguments: nullcontext(Forked(*arguments))


def test_two_strategies_and_what_is_done_is_not_run_again(tmp_path, monkeypatch, capfd, zygote):
    monkeypatch.setattr(compare_study, "Child", forked(zygote, tmp_path / "output.txt"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"Text {n}: " + "so it goes on. " * (n + 9)}) + "\n" for n in range(60))
    )
    data = str(tmp_path / "data")
    assert main(["prepare-data", "--output", data, "--input", str(texts), "--vocab-size", "280"]) == 0
    given = [
        *(
            "compare-training",
            "--output",
            str(tmp_path / "study"),
            "--data",
            data,
            "--seeds",
            "1",
            "--outliers",
            "with",
        ),
        *("--strategies", "quantize", "off", "--eval-iterations", "2", *SMALL),
    ]
    assert main([*given, "--iterations", "3"]) == 0
    assert "quantize" in capfd.readouterr().out
    content = json.loads((tmp_path / "study" / "study.json").read_text())
    off, quantize = content["runs"]
    assert [len(one["losses"]) for one in content["runs"]] == [3, 3]
    assert off["losses"][0] == quantize["losses"][0]  # forwards are exact, and the first has no update behind it
    assert off["losses"][2] != quantize["losses"][2]
    assert quantize["gradient_errors"][-1][1] > 0.1
    assert content["compared"][1]["beside_off"] == pytest.approx(quantize["validation"] / off["validation"] - 1)
    assert "planted" in (tmp_path / "study" / "quantize-outliers-seed1.log").read_text()
    assert (tmp_path / "study" / "curves.png").read_bytes()[1:4] == b"PNG"

    monkeypatch.setattr(compare_study, "Child", None)  # nothing may be started
    (tmp_path / "study" / "study.json").unlink()
    assert main([*given, "--iterations", "3"]) == 0
    assert json.loads((tmp_path / "study" / "study.json").read_text()) == content
    assert main([*given, "--iterations", "4"]) == 2
    assert "other settings (flags)" in capfd.readouterr().err
