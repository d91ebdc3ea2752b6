"""scripts/test.sh and .ci/run, with a set-up and a Python that only write down how they are called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def stubbed_tree(tmp_path) -> Path:
    for name in ("scripts/test.sh", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts" / "setup.sh").write_text("echo setup\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/usr/bin/env bash\necho "$PWD: $*"\n[[ " $* " != *" $FAKE_FAILURE "* ]]\n')
    python.chmod(0o755)
    return tmp_path


def run_stubbed(tree: Path, script: str, *arguments: str, failure: str = "none") -> tuple[int, list[str]]:
    environment = os.environ | {"FAKE_FAILURE": failure}
    result = subprocess.run(
        [tree / script, *arguments], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout.splitlines()


def test_test_sh_checks_style_and_types_and_ends_with_pytest(stubbed_tree):
    here = f"{stubbed_tree}: -m"
    checks = ["setup", f"{here} ruff check .", f"{here} ruff format --check .", f"{here} mypy"]
    workers = f"{here} pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder"
    assert run_stubbed(stubbed_tree, "scripts/test.sh") == (0, [*checks, workers])
    assert run_stubbed(stubbed_tree, ".ci/run") == (0, [*checks, workers])
    code, lines = run_stubbed(stubbed_tree, "scripts/test.sh", "tests/test_cli.py", "-x")
    assert (code, lines[-1]) == (0, f"{workers} tests/test_cli.py -x")


@pytest.mark.parametrize(("failure", "calls"), [("check", 2), ("format", 3), ("mypy", 4), ("pytest", 5)])
def test_test_sh_stops_at_the_first_failure(stubbed_tree, failure, calls):
    code, lines = run_stubbed(stubbed_tree, "scripts/test.sh", failure=failure)
    assert (code, len(lines)) == (1, calls)


def test_help_runs_nothing(stubbed_tree):
    code, lines = run_stubbed(stubbed_tree, "scripts/test.sh", "--help")
    assert (code, lines[0]) == (0, "usage: scripts/test.sh [pytest arguments]")
    assert "setup" not in lines
