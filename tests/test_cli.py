"""The `adacc` command: how errors and interruptions reach the shell."""

import subprocess
import sys
import types

import pytest

import megatron_adacc
from megatron_adacc import cli
from megatron_adacc.errors import UserError


def run_adacc(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_adacc.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def raising_command(monkeypatch):
    """A function that makes `adacc doctor` raise the given exception."""

    def install(error: BaseException) -> None:
        def run(args):
            raise error

        module = types.ModuleType("raising")
        module.configure = lambda parser: None
        module.run = run
        monkeypatch.setitem(sys.modules, "raising", module)
        monkeypatch.setitem(cli.COMMANDS, "doctor", ("raising", "raises"))

    return install


def test_version():
    result = run_adacc("--version")
    assert (result.returncode, result.stdout) == (0, f"megatron-adacc {megatron_adacc.__version__}\n")


def test_help_lists_every_command():
    result = run_adacc("--help")
    assert result.returncode == 0
    for name, (_, help_line) in cli.COMMANDS.items():
        assert name in result.stdout
        assert help_line.split()[0] in result.stdout


def test_help_is_in_the_order_of_the_work():
    lines = [line.strip() for line in run_adacc("--help").stdout.splitlines()]
    first = lines.index("this machine and your data:")
    named = [line.split()[0] for line in lines[first:] if line and not line.endswith(":")]
    assert named == list(cli.COMMANDS)
    found = [named.index(name) for name in ("doctor", "trace", "plan", "explain", "run", "report", "bench")]
    assert found == sorted(found)
    headings = [line for line in lines[first:] if line.endswith(":")]
    assert headings == [f"{heading}:" for heading in cli.GROUPS]


@pytest.mark.parametrize("arguments", [["heal"], []])
def test_unknown_or_no_command_is_refused_without_a_traceback(arguments):
    result = run_adacc(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "COMMAND" in result.stderr


def test_unknown_command_names_the_known_ones():
    assert all(name in run_adacc("heal").stderr for name in cli.COMMANDS)


def test_unknown_argument_of_a_command_is_refused():
    result = run_adacc("doctor", "--cure")
    assert result.returncode == 2
    assert "unrecognized arguments: --cure" in result.stderr


def test_user_error_is_one_sentence_and_exit_code_2(raising_command, capsys):
    raising_command(UserError("--a is 1, but it must be 2."))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "adacc doctor: error: --a is 1, but it must be 2.\n"


def test_interrupt_is_exit_code_130(raising_command, capsys):
    raising_command(KeyboardInterrupt())
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "adacc doctor: interrupted\n"


def test_a_bug_of_ours_keeps_its_traceback(raising_command):
    raising_command(RuntimeError("ours"))
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["doctor"])


def test_exit_code_of_a_command_is_handed_on(monkeypatch):
    module = types.ModuleType("seven")
    module.configure = lambda parser: parser.add_argument("--number", type=int)
    module.run = lambda args: args.number
    monkeypatch.setitem(sys.modules, "seven", module)
    monkeypatch.setitem(cli.COMMANDS, "doctor", ("seven", "seven"))
    assert cli.main(["doctor", "--number", "7"]) == 7
