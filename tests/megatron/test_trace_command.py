"""adacc trace: one layer's table, its JSON, its plan file and its picture."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from megatron_adacc import cli
from megatron_adacc.megatron.trace_flags import flags_of_file, model_flags
from megatron_adacc.planner import Keep, Plan, Recompute

ROOT = Path(__file__).resolve().parents[2]

# hidden 32, 4 heads, sequence 16, micro-batch 2, fp32, nothing fused, no dropout; what belongs to the job is unread
MODEL = [
    *("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--micro-batch-size", "2"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--no-bias-dropout-fusion", "--no-bias-gelu-fusion"),
    *("--num-layers", "20", "--data-path", "0.5", "no-such-data", "--tokenizer-type", "HuggingFaceTokenizer"),
]
HIDDEN = 16 * 2 * 32 * 4
STATISTICS = 16 * 2 * 4
MASK = 2 * 16 * 16
# two layer norms of three outputs, inputs of two linears and the residual, q k v, probabilities, MLP twice 4 h
AUTOGRAD_BYTES = 6 * HIDDEN - HIDDEN + 4 * STATISTICS + 3 * HIDDEN + 2 * 4 * 16 * 16 * 4 + MASK + 2 * 4 * HIDDEN


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One call in a process of its own, with every output."""
    folder = tmp_path_factory.mktemp("trace")
    html, plan = folder / "layer.html", folder / "plan.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megatron_adacc.cli", "trace"),
            *MODEL,
            "--json",
            "-",
            "--html",
            str(html),
            "-o",
            str(plan),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stderr.splitlines() if line.startswith("wrote ")] == [
        f"wrote {html}",
        f"wrote {plan}",
    ]
    return SimpleNamespace(content=json.loads(done.stdout), html=html.read_text(), plan=plan)


@pytest.fixture
def trace(zygote, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """trace(*arguments) -> exit code, and output and errors together; in a fork, which is quicker."""

    def call(*arguments: str) -> tuple[int, str]:
        output = tmp_path / "output.txt"
        output.unlink(missing_ok=True)
        code = zygote.run(ROOT / "megatron_adacc" / "cli.py", ["trace", *arguments], 1, {}, output)
        return code, output.read_text()

    return call


def test_rows_and_totals(traced):
    rows, totals = traced.content["rows"], traced.content["totals"]
    assert totals["autograd_bytes"] == sum(row["autograd_bytes"] for row in rows) == AUTOGRAD_BYTES == 74_752
    assert totals["held_bytes"] == sum(row["held_bytes"] for row in rows)
    # The boundary, the attention mask and four statistics of 128 bytes, which are too small to bother.
    assert totals["held_bytes"] == HIDDEN + MASK + 4 * STATISTICS == 5_120
    assert totals["measured_bytes"] == totals["held_bytes"]
    roles = [row["role"] for row in rows]
    assert {role: roles.count(role) for role in roles} == {
        "residual": 3,  # the layer's input, its attention mask, the sum after the attention
        "statistics": 4,
        "norm output": 2,
        "query/key/value": 1,
        "attention probabilities": 1,
        "linear input": 2,
        "other": 1,  # what the MLP's activation function reads
    }
    (probabilities,) = [row for row in rows if row["role"] == "attention probabilities"]
    assert (probabilities["shape"], probabilities["bytes"]) == ([2, 4, 16, 16], 8_192)
    assert (probabilities["action"], probabilities["held_bytes"]) == ("recompute", 0)
    assert probabilities["recipe_ops"] >= 4  # norm, projection, scores, softmax at least


def test_table_and_plan_file_agree(traced):
    (layer,) = Plan.load(traced.plan).layers
    expected = {row["site"]: row["action"] for row in traced.content["rows"]}
    assert {site: str(layer.action(site)) for site in expected} == expected
    assert layer.fingerprint == traced.content["fingerprint"]
    assert {type(layer.action(site)) for site in expected} == {Keep, Recompute}


def test_a_plan_file_is_shown(traced, trace):
    code, text = trace(*MODEL, "--plan", str(traced.plan))
    assert code == 0, text[-4000:]
    table = text[text.index("TransformerLayer ") :]
    for row in traced.content["rows"]:
        (line,) = [line for line in table.splitlines() if line.startswith(f"{row['site']}  ")]
        assert row["action"] in line
        assert f"{row['bytes']:,}" in line
    assert table.splitlines()[-1] == (
        f"autograd would hold 74,752 bytes for this layer; under the plan 5,120 bytes ({5_120 / 74_752:.1%}) are "
        "held, measured after a forward: 5,120."
    )
    assert table.splitlines()[0].endswith("; settled")
    assert table.splitlines()[-3].startswith("settled: two traces, on other inputs, agreed")
    assert table.splitlines()[-4].startswith("N ops: as many are run again to rebuild the tensor")


def test_training_takes_the_plan(traced, trained):
    settings = {
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "no_bias_dropout_fusion": True,
        "no_bias_gelu_fusion": True,
        "iterations": 2,
    }
    planned = trained(plan=str(traced.plan), **settings)
    plain = trained(plan="off", **settings)
    assert planned.losses == plain.losses
    assert len(planned.losses) == 2
    # Two layers hold what the plan says, whatever the rest of the model holds.
    held = [run.report["iterations"][-1]["held_bytes"] for run in (plain, planned)]
    assert held[0] - held[1] == 2 * (74_752 - 5_120)


@pytest.mark.parametrize("plan", ["keep", "compress"])
def test_held_is_what_is_measured(trace, tmp_path, plan):
    code, text = trace(*MODEL, "--plan", plan, "--json", str(tmp_path / "table.json"))
    assert code == 0, text[-4000:]
    content = json.loads((tmp_path / "table.json").read_text())
    totals = content["totals"]
    assert totals["autograd_bytes"] == 74_752
    assert totals["held_bytes"] == totals["measured_bytes"] == sum(row["held_bytes"] for row in content["rows"])
    if plan == "keep":
        assert totals["held_bytes"] == 74_752
    else:
        assert 74_752 // 8 < totals["held_bytes"] < 74_752 // 2


def test_a_layer_that_cannot_be_planned_is_shown_as_kept(trace, tmp_path):
    experts = ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"]
    outputs = ["--json", str(tmp_path / "table.json"), "-o", str(tmp_path / "plan.json")]
    code, text = trace(*MODEL, *experts, *outputs)
    assert code == 2
    assert "kept as autograd would: no two traces agreed, and so there is no plan." in text.splitlines()
    assert text.splitlines()[-2] == f"wrote {tmp_path / 'table.json'}"
    assert text.splitlines()[-1] == (
        "adacc trace: error: TransformerLayer runs other ops from call to call, so that no plan can be made for it: "
        "leave out -o."
    )
    content = json.loads((tmp_path / "table.json").read_text())
    assert {row["action"] for row in content["rows"]} == {"keep"}
    assert content["totals"]["held_bytes"] == content["totals"]["autograd_bytes"] > 74_752
    assert content["totals"]["measured_bytes"] is None
    assert not (tmp_path / "plan.json").exists()


def test_picture(traced):
    class Strict(HTMLParser):
        """Counts open elements by name."""

        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag, attrs):
            self.open.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    parser = Strict()
    parser.feed(traced.html)
    assert parser.open == []
    assert "http:" not in traced.html
    assert "https:" not in traced.html
    root = ElementTree.fromstring(traced.html.removeprefix("<!DOCTYPE html>"))
    groups = [(group.get("class", ""), group) for group in root.iter("g")]
    assert sum(name.split()[0] == "op" for name, _ in groups) == traced.content["ops"]
    kinds = {}
    for name, group in groups:
        if name.startswith("buffer"):
            site = (group.findtext("title") or "").splitlines()[0]
            assert site not in kinds
            kinds[site] = name.split()[1]
    saved = {row["site"]: row["action"] for row in traced.content["rows"]}
    assert {site: kind for site, kind in kinds.items() if site in saved} == saved
    assert {kind for site, kind in kinds.items() if site not in saved} == {"unsaved", "outside"}
    assert kinds["parameter:self_attention.linear_qkv.weight"] == "outside"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--hidden-size and --num-attention-heads are missing: give the model by"),
        (["--hidden-size", "32"], "--num-attention-heads is missing: give the model by"),
        ([*MODEL, "--plan", "off"], "--plan is 'off', but adacc trace shows keep, recompute, compress, or the path"),
        (
            [*MODEL, "--plan", "auto"],
            "--plan is 'auto', but adacc trace shows keep, recompute, compress, or the path of a plan file. For auto, "
            "use adacc plan --device NAME, or a job with --adacc-plan auto.",
        ),
        ([*MODEL, "--plan", "README.md"], "README.md: A plan file must hold JSON"),
        (["--config", "no.yaml"], "The config no.yaml cannot be read: No such file or directory."),
        (["--config", "README.md"], "The config README.md"),
        ([*MODEL, "--html", "no/such/folder.html"], "no/such/folder.html cannot be written: its folder does not"),
        ([*MODEL, "--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size 2 needs as many processes"),
        ([*MODEL, "--yaml-cfg", "x"], "adacc trace takes Megatron's settings as flags or by --config, not by"),
    ],
)
def test_mistakes(arguments, sentence, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(["trace", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"adacc trace: error: {sentence}")
    assert out == ""


def test_not_under_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["trace", *MODEL]) == 2
    assert (
        capsys.readouterr().err == "adacc trace: error: adacc trace runs in one process: start it without torchrun.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--micro-batch-size", "100000000"], "Tracing a layer of this size needs about "),
        (["--bogus", "2"], "unrecognized arguments: --bogus 2"),
        (["--num-attention-heads", "5"], "Megatron refuses these arguments: "),
        (
            ["--num-experts", "4"],
            "Megatron cannot run this layer: Output 0 of _ReduceFromModelParallelRegion is a view",
        ),
        (["--recompute-activations"], "--adacc-plan recompute decides what is recomputed, and so does"),
    ],
)
def test_mistakes_that_megatron_has_to_see(trace, arguments, sentence):
    code, text = trace(*MODEL, *arguments)
    assert code == 2, text[-4000:]
    (line,) = [line for line in text.splitlines() if line.startswith("adacc trace: ")]
    assert line.startswith(f"adacc trace: error: {sentence}")


def test_flags_of_the_job_are_left_out():
    flags = model_flags(["--hidden-size=8", "--num-attention-heads", "2", "--seq-length=32", "--load", "x", "--bf16"])
    assert flags[:6] == [
        "--hidden-size=8",
        "--num-attention-heads",
        "2",
        "--seq-length=32",
        "--bf16",
        "--micro-batch-size",
    ]
    assert flags[flags.index("--max-position-embeddings") + 1] == "32"
    assert "--load" not in flags


def test_config_as_flags(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("hidden-size: 8\nbf16: true\nswiglu: false\ndata_path: [a, b]\nlr: null\n")
    assert flags_of_file(str(path)) == ["--hidden-size", "8", "--bf16", "--data-path", "a", "b"]
