"""`adacc bench`: strategies in turn, each in its process, on Megatron's layers."""

import json
import sys
from typing import Any

import pytest

from megatron_adacc.cli import main
from megatron_adacc.megatron import bench_run
from megatron_adacc.megatron.bench_command import SHORT, SUITES, flags_of
from megatron_adacc.megatron.bench_progress import Told
from megatron_adacc.megatron.bench_run import Row
from megatron_adacc.megatron.bench_table import summary

SMALL = [
    *("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--hidden-dropout", "0.1"),
]


def test_strategies_side_by_side(tmp_path):
    written = tmp_path / "bench.json"
    only = ["--only", "plain", "full", "auto", "--percent", "--rounds", "2", "--json", str(written)]
    assert main(["bench", "--suite", "cpu", "--part", "layers", "--model", "llama", *only, *SMALL]) == 0
    content = json.loads(written.read_text())
    (case,) = content["cases"]
    rows = {row["strategy"]: row for row in case["strategies"]}
    plain, full, auto = rows["plain"], rows["full"], rows["auto = full peak"]
    assert 0 < full["held_bytes"] < auto["held_bytes"] < plain["held_bytes"]
    assert full["peak_bytes"] < plain["peak_bytes"]
    assert auto["largest_error"] == full["largest_error"] == 0
    assert auto["loss"] == full["loss"] == plain["loss"]  # after more steps of plain's: the same masks in every step
    assert len(auto["times"]) == 2
    assert len(plain["times"]) >= 4  # it ran beside the peers and again beside the plans
    assert auto["peak_bytes"] <= full["peak_bytes"]
    assert any(line.startswith("full: auto at its peak takes ") for line in case["summary"])


class Answers:
    """Stands for bench_run.Process: every strategy needs the same, and auto has two plans."""

    def __init__(self, name: str, *details: Any) -> None:
        self.name = name

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        if what == "plans":
            return {name: {"plan": json.dumps({"less": name.endswith("%")})} for name in details["limits"]}
        return {"first": 1.0, "held": 1, "peak": 1, "error": 0.0, "cpu": 1.0, "wall": 1.0, "loss": 1.0}

    def end(self) -> None:
        pass


def test_without_a_terminal_a_line_says_what_is_finished(monkeypatch, capsys):
    monkeypatch.setattr(bench_run, "Process", Answers)
    only = ["--only", "plain", "full", "selective", "auto", "--percent", "25", "--rounds", "2", "--json", "-"]
    assert main(["bench", "--suite", "cpu", "--part", "layers", "--model", "llama", *only, *SMALL]) == 0
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("llama, 2 layers, dropout 0: ") for line in said)
    assert [line.removeprefix("llama, 2 layers, dropout 0: ") for line in said] == [
        "plain: first steps done (1 of 6)",
        "full: first steps done (2 of 6)",
        "selective: first steps done (3 of 6)",
        "selective: round 1 of 2 done",
        "selective: round 2 of 2 done",
        "costs of ops and codecs, and plans done",
        "auto = selective peak: the plan of auto = full peak (4 of 6)",
        "auto 25%: first steps done (5 of 6)",
        "auto = full peak: first steps done (6 of 6)",
        "auto 25%, auto = full peak: round 1 of 2 done",
        "auto 25%, auto = full peak: round 2 of 2 done",
    ]


def test_on_a_terminal_a_spinner_says_where_it_is(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Told(4) as told:
        told.case("gpt")
        told.doing("full: first steps", "strategy 2 of 14")
        assert told._bar is not None
        assert told._bar.tasks[0].description == "case 1 of 4, strategy 2 of 14: gpt: full: first steps"


def test_the_short_form_of_the_help(monkeypatch, capsys):
    """Two cases, and of each the strategies that it names, and auto at full's peak."""
    monkeypatch.setattr(bench_run, "Process", Answers)
    assert main(SHORT.split()[1:]) == 0
    said = capsys.readouterr().err.splitlines()
    started = [line for line in said if "first steps done" in line]
    assert [line.split(": ")[1] for line in started] == 2 * ["plain", "full", "auto 25%", "auto = full peak"]
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    options = " ".join(capsys.readouterr().out.split())
    assert SHORT in options
    assert [f"(default: {default})" in options for default in ("7", "1", "6", "both", "5 10 25 50")] == 5 * [True]


def row(name: str, seconds: list[float], plain: list[float], peak: int = 0) -> Row:
    timed = [(s, 2 * s) for s in seconds]
    return Row(name, peak=peak, times=timed, beside={"plain": [(s, 2 * s) for s in plain]})


def test_ratios_are_of_the_same_round():
    """Medians of the rounds' own ratios; strategies of different groups are compared through plain."""
    peer = row("checkpoint", [1.4, 2.8, 4.2], [1.0, 2.0, 3.0], peak=200)
    auto = row("auto = checkpoint peak", [2.2, 1.1, 1.2], [2.0, 1.0, 1.0], peak=190)
    plain = row("plain", [1.0], [1.0])
    assert auto.ratio("plain", 0) == pytest.approx((1.1, 1.1, 1.2))
    (line,) = summary({"plain": plain, "checkpoint": peer, auto.name: auto}, 0)
    assert line == "checkpoint: auto at its peak takes 0.786 of its step; peak 0.0 MB beside 0.0."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "adacc bench needs --suite cpu or --suite gpu."),
        (["--suite", "cpu", "--rounds", "0"], "--rounds must be 1 or more; it is 0."),
        (["--suite", "cpu", "--only", "magic"], "'magic' is none of them."),
        (["--suite", "cpu", "--json", "/none/there.json"], "/none/there.json cannot be written: its folder does not"),
        (["--suite", "cpu", "--percent", "0"], "--percent takes whole numbers from 1 to 100."),
    ],
)
def test_bad_options(arguments, sentence, capsys):
    assert main(["bench", *arguments, *(["--part", "layers"] if arguments else ["--rounds", "1"])]) == 2
    assert sentence in capsys.readouterr().err


def test_flags_of_a_case():
    flags = flags_of(SUITES["cpu"], "llama", 0.0, ["--num-layers", "7", "--hidden-size", "64"])
    assert flags[-2:] == ["--num-layers", "7"]
    assert "--swiglu" in flags
    assert flags.index("64") > flags.index("512")  # what comes last counts
