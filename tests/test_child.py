"""Jobs that commands start: what they print, how they end, and that they do not outlive the command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_adacc.child import Child


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    for _ in range(200):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_lines_log_and_code(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import os, sys; print(os.environ['COLOUR']); print('b', file=sys.stderr); sys.exit(3)"
    with Child([sys.executable, "-u", "-c", script], {"COLOUR": "red"}, log) as job:
        assert list(job.lines()) == ["red\n", "b\n"]
    assert (job.code, list(job.tail), log.read_text()) == (3, ["red\n", "b\n"], "red\nb\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_ends_the_job_and_what_it_started() -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(p.pid); p.wait()"
    )
    job = Child([sys.executable, "-u", "-c", script])
    started = []

    def failing() -> None:
        with job:
            started.append(int(next(job.lines())))
            assert alive(started[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert job.code == -signal.SIGTERM
    assert gone(started[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_command_ends_the_job(number: signal.Signals) -> None:
    script = "import os, time; print(os.getpid()); time.sleep(60)"
    command = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup has it ignored
        "from megatron_adacc.child import Child\n"
        f"with Child([sys.executable, '-u', '-c', {script!r}]) as job:\n"
        "    for line in job.lines(): print(line, end='', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    job = int(process.stdout.readline())
    assert alive(job)
    os.kill(process.pid, number)
    code = process.wait(20)
    assert code in (128 + number, -number)
    assert gone(job)
