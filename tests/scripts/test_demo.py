"""The demo, shortened: equal losses of its plans, a summary."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_adacc.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_compares_the_plans(tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"Text {n}: " + "so it goes on. " * 99}) + "\n" for n in range(60)))
    data = str(tmp_path / "data")
    assert main(["prepare-data", "--output", data, "--input", str(texts), "--vocab-size", "280"]) == 0
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "demo.py",
            "--iterations",
            "2",
            "--output",
            tmp_path,
            "--data",
            data,
            "--plans",
            "recompute",
            "auto",
        ],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [row["strategy"] for row in rows] == ["off", "full", "auto", "recompute"]
    assert all(
        set(row)
        == {
            "strategy",
            "iterations",
            "final_lm_loss",
            "step_ms_median",
            "held_bytes",
            "peak_bytes",
            "peak_rss_bytes",
        }
        for row in rows
    )
    assert {row["iterations"] for row in rows} == {2}
    assert len({row["final_lm_loss"] for row in rows}) == 1
    off, full, auto, recompute = rows
    assert off["held_bytes"] > full["held_bytes"]
    assert off["peak_bytes"] > full["peak_bytes"] >= auto["peak_bytes"] / 1.05
    assert auto["held_bytes"] > recompute["held_bytes"]
    assert recompute["held_bytes"] < 0.5 * off["held_bytes"]
    assert "final loss" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--iterations", "0"], "at least 1"), (["--what"], "unrecognized"), (["--data", "/nowhere"], "has no tokenizer")],
)
def test_a_wrong_option_is_a_sentence(arguments, words):
    done = subprocess.run([sys.executable, ROOT / "scripts" / "demo.py", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_help_needs_no_set_up():
    done = subprocess.run(["bash", ROOT / "scripts" / "demo.sh", "--help"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0
    assert "--iterations N" in done.stdout
