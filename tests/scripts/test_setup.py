"""scripts/setup.sh, scripts/test.sh and .ci/run, in a copy of the tree with pretended Pythons, offline."""

import glob
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# A Python that lies in one of the fixed folders is found on this machine whatever PATH is.
ELSEWHERE = glob.glob("/usr/local/bin/python3.1[2-9]") + glob.glob("/opt/*/bin/python3.1[2-9]")
nothing_elsewhere = pytest.mark.skipif(bool(ELSEWHERE), reason=f"setup.sh would find {ELSEWHERE}")

# Does what setup.sh asks of a Python: says its version, makes a venv whose python is itself, and writes
# down what it is told to install.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
    "-c "*version_info*) echo {version} ;;
    "-c "*ensurepip*) exit {venv_exit} ;;
    "-c "*_base_executable*) readlink -f "$0" ;;
    "-c "*) exit 0 ;;
    "-m venv")
        echo "venv" >>"$FAKE_LOG"
        rm -rf "$4"
        mkdir -p "$4/bin"
        echo "command = $0 -m venv --clear $4" >"$4/pyvenv.cfg"
        ln -s "$0" "$4/bin/python"
        touch "$4/bin/activate"
        ;;
    "-m pip")
        [[ $3 == --version ]] && exit 0
        shift 2
        echo "pip $* PYTHONPATH=${{PYTHONPATH-unset}}" >>"$FAKE_LOG"
        echo "WARNING: Location '/somewhere' is ignored: it is neither a file nor a folder." >&2
        echo "reason of pip" >&2
        sleep "${{FAKE_PIP_SLEEP:-0}}"
        exit "${{FAKE_PIP_EXIT:-0}}"
        ;;
    *) exit 99 ;;
esac
"""
BROKEN_SHIM = "#!/usr/bin/env bash\necho 'pyenv: command not found' >&2\nexit 127\n"
TOOLS = (
    "bash",
    "cat",
    "cut",
    "dirname",
    "env",
    "flock",
    "grep",
    "head",
    "ln",
    "mkdir",
    "mv",
    "readlink",
    "rm",
    "sha256sum",
    "sleep",
    "sort",
    "touch",
)


def write_executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Tree:
    """A copy of what setup.sh needs, and the only folders that are on PATH."""

    root: Path
    bin: Path
    log: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def stamp(self) -> Path:
        return self.venv / "adacc-setup.stamp"

    def environment(self, **changes: str) -> dict[str, str]:
        tools = self.bin.parent / "tools"
        fixed = {"PATH": f"{self.bin}:{tools}", "HOME": str(self.bin.parent), "FAKE_LOG": str(self.log)}
        return fixed | changes

    def python(self, name: str, version: str, *, venv: bool = True) -> Path:
        """Put a pretended Python on PATH."""
        text = FAKE_PYTHON.format(version=version, venv_exit=0 if venv else 1)
        return write_executable(self.bin / name, text)

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.root / "scripts" / "setup.sh"), *arguments],
            cwd="/",
            env=self.environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def setup(self, *arguments: str, **changes: str) -> tuple[int, str, str]:
        """Run setup.sh from another folder: (exit code, stdout, stderr)."""
        process = self.start(*arguments, **changes)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """What the pretended Pythons were told since the last time."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def pip_calls(self, *extra: str, constraints: Path | None = None) -> list[str]:
        """The two calls of pip that a complete set-up makes."""
        start = f"pip install --log {self.venv / 'adacc-setup.log'} -c {constraints or self.root / 'requirements.lock'}"
        options = "".join(f" {argument}" for argument in extra)
        return [
            f"{start}{options} setuptools PYTHONPATH=unset",
            f"{start}{options} --no-build-isolation -e {self.root}[dev,plots] PYTHONPATH=unset",
        ]


@pytest.fixture
def tree(tmp_path) -> Tree:
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", root / "scripts")
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, root)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    (tmp_path / "bin").mkdir()
    return Tree(root, tmp_path / "bin", tmp_path / "log")


# ---- finding a Python ----


def test_the_first_python_that_runs_and_is_new_enough_is_found(tree):
    write_executable(tree.bin / "python3.12", BROKEN_SHIM)
    tree.python("python3", "3.11.2")
    good = tree.python("python3.13", "3.13.0")
    assert tree.setup("--find-python") == (0, f"{good}\n", "")
    assert not tree.venv.exists()


def test_a_broken_shim_does_not_hide_a_good_python_of_the_same_name(tree):
    write_executable(tree.bin / "python3.12", BROKEN_SHIM)
    later = tree.bin.parent / "later"
    good = write_executable(later / "python3.12", FAKE_PYTHON.format(version="3.12.1", venv_exit=0))
    path = f"{tree.environment()['PATH']}:{later}"
    assert tree.setup("--find-python", PATH=path) == (0, f"{good}\n", "")


@pytest.mark.parametrize("version", ["3.12.0", "3.13.0", "3.100.1", "4.0.0"])
def test_new_enough(tree, version):
    good = tree.python("python3", version)
    assert tree.setup("--find-python")[:2] == (0, f"{good}\n")


def test_pyenv_is_searched_when_its_shims_fail(tree):
    write_executable(tree.bin / "python3.12", BROKEN_SHIM)
    versions = tree.bin.parent / ".pyenv" / "versions"
    for version in ("3.9.18", "3.12.1"):
        text = FAKE_PYTHON.format(version=version, venv_exit=0)
        python = write_executable(versions / version / "bin" / "python", text)
    assert tree.setup("--find-python") == (0, f"{python}\n", "")


@nothing_elsewhere
def test_without_a_python_one_error_says_what_was_seen_and_how_to_get_it(tree):
    shim = write_executable(tree.bin / "python3.12", BROKEN_SHIM)
    old = tree.python("python3", "3.11.2")
    code, out, err = tree.setup()
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[0] == "setup: error: no Python 3.12 or newer was found, and megatron-adacc needs one."
    assert lines[1:3] == [f"  seen: {shim} does not run", f"  seen: {old} is 3.11.2"]
    for way in ("apt-get install python3 python3-venv", "deadsnakes", "pyenv install 3.12", "ADACC_PYTHON="):
        assert way in err
    assert not tree.venv.exists()
    assert tree.calls() == []


@nothing_elsewhere
def test_no_python_at_all(tree):
    code, _, err = tree.setup()
    assert code == 1
    assert "  seen: no Python at all\n" in err


@nothing_elsewhere
def test_a_python_without_venv_names_the_missing_package(tree):
    python = tree.python("python3.12", "3.12.3", venv=False)
    assert tree.setup() == (
        1,
        "",
        f"setup: error: {python} is Python 3.12.3 but cannot make a virtual environment: its venv or ensurepip "
        "module is missing; on Debian and Ubuntu, apt-get install python3.12-venv and run this again.\n",
    )
    assert not tree.venv.exists()


def test_a_python_without_venv_is_passed_over_for_one_with(tree):
    tree.python("python3.12", "3.12.3", venv=False)
    good = tree.python("python3.13", "3.13.1")
    assert tree.setup("--find-python") == (0, f"{good}\n", "")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("old", "ADACC_PYTHON=old is Python 3.11.9, and megatron-adacc needs 3.12 or newer."),
        ("shim", "ADACC_PYTHON=shim does not run as a Python."),
        ("missing", "ADACC_PYTHON=missing is not an executable file or command."),
    ],
)
def test_a_wrong_adacc_python_is_an_error_even_if_there_is_a_good_one(tree, value, sentence):
    tree.python("python3.12", "3.12.1")
    tree.python("old", "3.11.9")
    write_executable(tree.bin / "shim", BROKEN_SHIM)
    assert tree.setup(ADACC_PYTHON=value) == (1, "", f"setup: error: {sentence}\n")
    assert not tree.venv.exists()


# ---- making .venv, once ----


def test_set_up_installs_with_the_lock_and_a_second_call_does_nothing(tree):
    tree.python("python3.12", "3.12.1")
    code, out, err = tree.setup(PYTHONPATH="/somewhere")
    assert code == 0, err
    assert tree.calls() == ["venv", *tree.pip_calls()]
    assert "making .venv with Python 3.12.1" in out
    assert "is ignored" not in err
    assert "reason of pip" in err
    assert len(tree.stamp.read_text().strip()) == 64

    started = time.monotonic()
    assert tree.setup() == (0, "setup: nothing to do, .venv is complete\n", "")
    assert time.monotonic() - started < 5.0
    assert tree.calls() == []


def test_repair_runs_pip_again_in_the_same_venv(tree):
    tree.python("python3.12", "3.12.1")
    assert tree.setup()[0] == 0
    tree.calls()
    assert tree.setup("--repair")[0] == 0
    assert tree.calls() == tree.pip_calls()


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock"])
def test_a_changed_pin_or_requirement_installs_again_in_the_same_venv(tree, name):
    tree.python("python3.12", "3.12.1")
    assert tree.setup()[0] == 0
    tree.calls()
    with (tree.root / name).open("a") as file:
        file.write("# changed\n")
    assert tree.setup()[0] == 0
    assert tree.calls() == tree.pip_calls()
    assert tree.setup()[1] == "setup: nothing to do, .venv is complete\n"


def test_a_failed_pip_names_the_log_and_the_next_call_goes_on(tree):
    tree.python("python3.12", "3.12.1")
    code, _, err = tree.setup(FAKE_PIP_EXIT="1")
    assert code == 1
    assert err.endswith(
        f"setup: error: pip install failed; the reason is above, and in full in {tree.venv}/adacc-setup.log. "
        "Run this again when it is mended: what was installed is kept.\n"
    )
    assert "reason of pip" in err
    assert not tree.stamp.exists()
    assert tree.calls() == ["venv", tree.pip_calls()[0]]
    assert tree.setup()[0] == 0
    assert tree.calls() == tree.pip_calls()


def test_a_set_up_killed_in_pip_is_completed(tree):
    tree.python("python3.12", "3.12.1")
    process = tree.start(FAKE_PIP_SLEEP="60")
    deadline = time.monotonic() + 30
    while not (tree.log.exists() and "pip install" in tree.log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not tree.stamp.exists()
    tree.calls()
    assert tree.setup()[0] == 0
    assert tree.calls() == tree.pip_calls()


def test_two_set_ups_at_once_install_once(tree):
    tree.python("python3.12", "3.12.1")
    both = [tree.start(FAKE_PIP_SLEEP="1") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert tree.calls() == ["venv", *tree.pip_calls()]
    waited = [out for out in outputs if "another set-up is running in this checkout; waiting" in out]
    assert len(waited) == 1
    assert waited[0].endswith("setup: nothing to do, .venv is complete\n")


def break_half_made(tree: Tree) -> Tree:
    (tree.venv / "bin" / "activate").unlink()
    return tree


def break_interpreter_gone(tree: Tree) -> Tree:
    (tree.venv / "bin" / "python").unlink()
    return tree


def break_moved(tree: Tree) -> Tree:
    moved = tree.root.rename(tree.root.with_name("moved"))
    return Tree(moved, tree.bin, tree.log)


@pytest.mark.parametrize("damage", [break_half_made, break_interpreter_gone, break_moved])
def test_a_venv_that_cannot_work_is_made_anew(tree, damage):
    tree.python("python3.12", "3.12.1")
    assert tree.setup()[0] == 0
    tree.calls()
    tree = damage(tree)
    code, out, _ = tree.setup()
    assert code == 0
    assert "the .venv that is here is half made, moved or broken; making it anew" in out
    assert tree.calls() == ["venv", *tree.pip_calls()]


def test_a_good_venv_is_never_thrown_away_for_another_python(tree):
    used = tree.python("python3.12", "3.12.1")
    other = tree.python("python3.13", "3.13.0")
    assert tree.setup()[0] == 0
    tree.calls()
    for arguments in ([], ["--repair"]):
        assert tree.setup(*arguments, ADACC_PYTHON=str(other)) == (
            1,
            "",
            f"setup: error: {tree.venv} was made with {used}, not with ADACC_PYTHON={other}; remove .venv to make "
            "it anew.\n",
        )
    assert tree.setup(ADACC_PYTHON=str(used))[0] == 0
    assert tree.calls() == []


def test_a_venv_of_an_older_python_is_left_alone(tree):
    tree.python("python3.12", "3.12.1")
    old = tree.python("old", "3.10.2")
    (tree.venv / "bin").mkdir(parents=True)
    (tree.venv / "bin" / "python").symlink_to(old)
    (tree.venv / "bin" / "activate").touch()
    code, _, err = tree.setup()
    assert code == 1
    assert err == (
        f"setup: error: {tree.venv} is there with Python 3.10.2, and megatron-adacc needs 3.12 or newer; remove "
        ".venv.\n"
    )
    assert tree.calls() == []


# ---- ADACC_PIP_ARGS ----


def test_pip_arguments_are_passed_remembered_and_free_the_cuda_libraries(tree):
    tree.python("python3.12", "3.12.1")
    extra = ["--index-url", "file:///cu126"]
    constraints = tree.venv / "adacc-constraints.txt"
    expected = tree.pip_calls(*extra, constraints=constraints)
    assert tree.setup(ADACC_PIP_ARGS=" ".join(extra))[0] == 0
    assert tree.calls() == ["venv", *expected]
    locked = (tree.root / "requirements.lock").read_text().splitlines()
    kept = [line for line in locked if not re.match("(nvidia|cuda)-", line)]
    assert constraints.read_text().splitlines() == kept
    assert "torch==2.14.1" in kept

    assert tree.setup("--repair")[0] == 0
    assert tree.calls() == expected


def test_other_pip_arguments_for_a_finished_venv_are_refused(tree):
    tree.python("python3.12", "3.12.1")
    assert tree.setup()[0] == 0
    tree.calls()
    assert tree.setup(ADACC_PIP_ARGS="--index-url file:///cu126") == (
        1,
        "",
        f"setup: error: {tree.venv} was made with ADACC_PIP_ARGS='', not '--index-url file:///cu126'; remove .venv "
        "to make it anew.\n",
    )
    assert tree.calls() == []


def test_pip_arguments_may_be_what_an_unfinished_set_up_lacked(tree):
    tree.python("python3.12", "3.12.1")
    assert tree.setup(FAKE_PIP_EXIT="1")[0] == 1
    tree.calls()
    assert tree.setup(ADACC_PIP_ARGS="--proxy there")[0] == 0
    constraints = tree.venv / "adacc-constraints.txt"
    assert tree.calls() == tree.pip_calls("--proxy", "there", constraints=constraints)


# ---- the other scripts ----


@pytest.mark.parametrize("script", ["setup.sh", "test.sh"])
def test_help(script):
    result = subprocess.run(
        ["bash", str(ROOT / "scripts" / script), "--help"], cwd="/", capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(f"usage: scripts/{script}")


def test_an_unknown_option_is_refused(tree):
    code, out, err = tree.setup("--cure")
    assert (code, out) == (2, "")
    assert err.startswith("usage: scripts/setup.sh")


@pytest.fixture
def stubbed_tree(tmp_path) -> Path:
    """scripts/test.sh and .ci/run with a set-up and a Python that only write down how they are called."""
    for name in ("scripts/test.sh", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write_executable(tmp_path / "scripts" / "setup.sh", "echo setup\n")
    python = '#!/usr/bin/env bash\necho "$PWD: $*"\n[[ " $* " != *" $FAKE_FAILURE "* ]]\n'
    write_executable(tmp_path / ".venv" / "bin" / "python", python)
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
    assert run_stubbed(stubbed_tree, "scripts/test.sh") == (0, [*checks, f"{here} pytest"])
    assert run_stubbed(stubbed_tree, ".ci/run") == (0, [*checks, f"{here} pytest"])
    code, lines = run_stubbed(stubbed_tree, "scripts/test.sh", "tests/test_cli.py", "-x")
    assert (code, lines[-1]) == (0, f"{here} pytest tests/test_cli.py -x")


@pytest.mark.parametrize(("failure", "calls"), [("check", 2), ("format", 3), ("mypy", 4), ("pytest", 5)])
def test_test_sh_stops_at_the_first_failure(stubbed_tree, failure, calls):
    code, lines = run_stubbed(stubbed_tree, "scripts/test.sh", failure=failure)
    assert (code, len(lines)) == (1, calls)
