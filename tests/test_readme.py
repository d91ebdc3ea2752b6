"""The README runs as written: every command in it is run here, or by the tests named beside it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Commands that other tests, or what calls this suite, run.
RUN_ELSEWHERE = {
    "source .venv/bin/activate": "tests/test_readme.py",
    "bash scripts/demo.sh": "tests/scripts/test_demo.py",
    "bash scripts/test.sh": ".ci/run",
    "bash scripts/reproduce_117m.sh": "tests/scripts/test_reproduce.py",
    "docker ": "tests/test_dockerfile.py",
    "torchrun --nproc-per-node N pretrain_gpt.py <Megatron's flags>": "tests/megatron/test_strategies.py",
    "adacc run --nproc-per-node 8 Megatron-LM/pretrain_gpt.py": "tests/megatron/test_run.py",
}


def commands():
    """The indented lines of the README outside its code blocks, with continued lines joined and comments cut."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    text = re.sub(r"\\\n\s*", "", text)
    return [line.split("  # ")[0].split("      #")[0].strip() for line in text.splitlines() if line.startswith("    ")]


RUN_HERE = [line for line in commands() if not line.startswith(tuple(RUN_ELSEWHERE))]


def test_every_command_is_accounted_for():
    assert len(RUN_HERE) >= 6
    for place in RUN_ELSEWHERE.values():
        assert (ROOT / place).exists(), place


@pytest.mark.parametrize("command", RUN_HERE)
def test_the_command_runs(command, tmp_path):
    tokens = [token.replace("runs/text", str(tmp_path / "text")) for token in shlex.split(command)]
    # What `source .venv/bin/activate` does.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(tokens, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_the_hugging_face_example_runs():
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "GPT2" in block
    ]
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "limit 25 % of the plain activations: optimal" in done.stdout


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)h][^)]*)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
