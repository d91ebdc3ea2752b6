"""Training runs, small enough for a test: pretrain_gpt.py in processes of its own."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]

MODEL = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "micro-batch-size": 2,
    "global-batch-size": 4,
    "lr": 1e-2,
    "lr-decay-style": "constant",
    "seed": 1234,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 127,
    "eval-iters": 0,
    "eval-interval": 1000,
    "log-interval": 1,
    "num-workers": 0,
}


@dataclass
class Run:
    """A finished job: exit code, everything it printed, and its report (None where it wrote none)."""

    code: int
    text: str
    report: dict | None = field(repr=False)

    @property
    def losses(self) -> list[float | None]:
        """The loss of every iteration, at full precision."""
        assert self.report is not None, self.text[-4000:]
        return [row["lm_loss"] for row in self.report["iterations"]]

    @property
    def summary(self) -> dict:
        """The report's one-line summary."""
        assert self.report is not None, self.text[-4000:]
        return self.report["summary"]

    def sentence(self, program: str = "pretrain_gpt.py") -> str:
        """What the user is told: the one line that begins with the program's name."""
        lines = [line for line in self.text.splitlines() if line.startswith(f"{program}: ")]
        assert len(lines) == 1, self.text[-4000:]
        return lines[0]


def flags(settings: dict[str, object]) -> list[str]:
    """{'name': value} as --name value; True is a flag without a value, None leaves it out."""
    tokens: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        tokens += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tokens


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """The command in a session of its own, output and errors in one stream."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def launcher(ranks: int) -> list[str]:
    """Python for one rank, torchrun for more."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def finish(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    """Wait for it; a job that hangs is ended, with all its ranks, and fails the test."""
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        pytest.fail(f"the job did not end within {seconds} s:\n{text[-4000:]}")
    return process.returncode, text


@pytest.fixture
def jobs() -> SimpleNamespace:
    """The pieces of `train`, for tests that watch a job while it runs."""
    return SimpleNamespace(ROOT=ROOT, MODEL=MODEL, flags=flags, launcher=launcher, start=start, finish=finish)


class Zygote:
    """A process that forks jobs (zygote.py); started by the first job, ended with the session."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: Path, arguments: list[str], ranks: int, environment: dict[str, str], output: Path) -> int:
        """The job's exit code; its output is in the file."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("zygote.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
            self._answer(120)
        job = {
            "script": str(script),
            "arguments": arguments,
            "ranks": ranks,
            "environment": environment,
            "output": str(output),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = self._answer(240)
        if code is None:
            pytest.fail(f"the job did not end in time:\n{output.read_text()[-4000:]}")
        return code["code"]

    def _answer(self, seconds: float) -> dict | None:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            self.close()
            return None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it, and what it forked."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One for the session."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture
def train(tmp_path: Path, zygote: Zygote) -> Callable[..., Run]:
    """train(iterations=4, ranks=1, plan='off', script=..., env=..., **flags) -> Run; names use _ for -."""
    count = 0

    def run(
        *,
        iterations: int = 4,
        ranks: int = 1,
        plan: str | None = "off",
        report: bool = True,
        script: Path = ROOT / "pretrain_gpt.py",
        env: dict[str, str] | None = None,
        **settings: object,
    ) -> Run:
        nonlocal count
        count += 1
        path = tmp_path / f"report{count}.json"
        own = {name.replace("_", "-"): value for name, value in settings.items()}
        own.setdefault("mock-data", "data-path" not in own)
        tokens = flags({**MODEL, "train-iters": iterations, "adacc-plan": plan, **own})
        if report:
            tokens += ["--adacc-report", str(path)]
        output = tmp_path / f"output{count}.txt"
        code = zygote.run(script, tokens, ranks, env or {}, output)
        return Run(code, output.read_text(), json.loads(path.read_text()) if path.exists() else None)

    return run


@pytest.fixture
def trained(train: Callable[..., Run]) -> Callable[..., Run]:
    """As `train`, for jobs that must succeed."""

    def run(**settings: object) -> Run:
        result = train(**settings)
        assert result.code == 0, result.text[-6000:]
        return result

    return run
