"""scripts/setup.sh in a copy of the tree with pretended Pythons, offline."""

import dataclasses
import glob
import os
import re
import signal
import time

import pytest

# A Python that lies in one of the fixed folders is found on this machine whatever PATH is.
ELSEWHERE = glob.glob("/usr/local/bin/python3.1[2-9]") + glob.glob("/opt/*/bin/python3.1[2-9]")
nothing_elsewhere = pytest.mark.skipif(bool(ELSEWHERE), reason=f"setup.sh would find {ELSEWHERE}")


# ---- finding a Python ----


def test_the_first_python_that_runs_and_is_new_enough_is_found(tree):
    tree.broken_shim("python3.12")
    tree.python("python3", "3.11.2")
    good = tree.python("python3.13", "3.13.0")
    assert tree.setup("--find-python") == (0, f"{good}\n", "")
    assert not tree.venv.exists()


def test_a_broken_shim_does_not_hide_a_good_python_of_the_same_name(tree):
    tree.broken_shim("python3.12")
    later = tree.bin.parent / "later"
    good = tree.python("python3.12", "3.12.1", folder=later)
    path = f"{tree.environment()['PATH']}:{later}"
    assert tree.setup("--find-python", PATH=path) == (0, f"{good}\n", "")


@pytest.mark.parametrize("version", ["3.12.0", "3.13.0", "3.100.1", "4.0.0"])
def test_new_enough(tree, version):
    good = tree.python("python3", version)
    assert tree.setup("--find-python")[:2] == (0, f"{good}\n")


def test_pyenv_is_searched_when_its_shims_fail(tree):
    tree.broken_shim("python3.12")
    versions = tree.bin.parent / ".pyenv" / "versions"
    for version in ("3.9.18", "3.12.1"):
        python = tree.python("python", version, folder=versions / version / "bin")
    assert tree.setup("--find-python") == (0, f"{python}\n", "")


@nothing_elsewhere
def test_without_a_python_one_error_says_what_was_seen_and_how_to_get_it(tree):
    shim = tree.broken_shim("python3.12")
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
    tree.broken_shim("shim")
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


def break_half_made(tree):
    (tree.venv / "bin" / "activate").unlink()
    return tree


def break_interpreter_gone(tree):
    (tree.venv / "bin" / "python").unlink()
    return tree


def break_moved(tree):
    moved = tree.root.rename(tree.root.with_name("moved"))
    return dataclasses.replace(tree, root=moved)


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


# ---- its own options ----


def test_help(tree):
    code, out, err = tree.setup("--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: scripts/setup.sh")


def test_an_unknown_option_is_refused(tree):
    code, out, err = tree.setup("--cure")
    assert (code, out) == (2, "")
    assert err.startswith("usage: scripts/setup.sh")
