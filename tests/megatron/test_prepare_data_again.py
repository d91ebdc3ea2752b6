"""`adacc prepare-data` on a folder that holds something already, and runs that do not come to their end."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_adacc import atomic, cli
from megatron_adacc.megatron import prepare_data

VOCAB = 300
TEXTS = [f"The quick brown fox {number} jumps over the lazy dog.\n" * 10 for number in range(6)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of TEXTS, one a file."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


def prepare(output: Path, *flags: str) -> int:
    return cli.main(["prepare-data", "--output", str(output), "--vocab-size", str(VOCAB), *flags])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(output: Path, *flags: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_adacc.cli", "prepare-data", "--output", str(output)]
    return subprocess.Popen(
        [*command, "--vocab-size", str(VOCAB), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_until_half_made(output: Path, process: subprocess.Popen[str]) -> None:
    """Until the tokenizer is there: the import of Megatron, some seconds, comes between it and the tokens."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if list(output.parent.glob(f".{output.name}.*.tmp/tokenizer/tokenizer_config.json")):
            return
        time.sleep(0.005)
    pytest.fail(f"never half made: exit status {process.poll()}")


# What a second run does


@pytest.fixture
def data(texts: Path, tmp_path: Path) -> Path:
    """A data set of `texts`."""
    assert prepare(tmp_path / "data", "--input", str(texts)) == 0
    return tmp_path / "data"


def again(data: Path, *flags: str) -> tuple[int, bool]:
    """Run the same command: (exit status, whether the folder was made anew)."""
    before = data.stat().st_ino, (data / "text_document.idx").stat().st_ino
    status = prepare(data, "--input", str(data.parent / "texts"), *flags)
    return status, (data.stat().st_ino, (data / "text_document.idx").stat().st_ino) != before


def test_a_second_run_has_nothing_to_do(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    capsys.readouterr()
    monkeypatch.chdir(data.parent)
    monkeypatch.setattr(prepare_data, "train_tokenizer", None)
    assert again(data) == (0, False)
    assert prepare(Path("data"), "--input", "texts") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines()[0] == f"{data} is complete already, from the same options and files."
    assert said.out.splitlines()[3:5] == [
        "data is complete already, from the same options and files.",
        said.out.splitlines()[1],
    ]


def test_a_second_run_does_not_import_megatron(data: Path):
    code = (
        "import sys; from megatron_adacc import cli; status = cli.main(sys.argv[1:]); "
        "assert not {'megatron.core', 'torch', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    command = ["prepare-data", "--output", str(data), "--vocab-size", str(VOCAB), "--input", str(data.parent / "texts")]
    assert subprocess.run([sys.executable, "-c", code, *command], timeout=60).returncode == 0


def test_force_makes_it_anew(data: Path):
    before = files(data)
    # Megatron's own cache of sample indices, which must not outlive the data set that it indexes.
    (data / "text_document" / "cache").mkdir(parents=True)
    assert again(data, "--force") == (0, True)
    assert files(data) == before
    assert not (data / "text_document").exists()


@pytest.mark.parametrize(
    ("flags", "different"),
    [
        (["--vocab-size", "301"], "--vocab-size"),
        (["--seed", "5", "--json-key", "body"], "--seed, --json-key"),
        (["--input", "/dev/null"], "--input"),
    ],
)
def test_other_options_need_force(data: Path, flags: list[str], different: str, capsys: pytest.CaptureFixture[str]):
    before = files(data)
    assert again(data, *flags) == (2, False)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"adacc prepare-data: error: --output {data} holds a data set made with another {different}: give --force to "
        "replace it, or another --output."
    )
    assert files(data) == before
    assert again(data, *flags, "--force") == (0, True)
    assert again(data, *flags) == (0, False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: (data.parent / "texts" / "new.txt").write_text("new"), "its input files have changed"),
        (lambda data: (data / "tokenizer" / "tokenizer.json").unlink(), "files in it are missing or damaged"),
        (lambda data: os.truncate(data / "text_document.bin", 100), "files in it are missing or damaged"),
        (
            lambda data: (data / "dataset.json").write_text(
                (data / "dataset.json").read_text().replace('"format_version": 1', '"format_version": 0')
            ),
            "it was made by another version of this command",
        ),
    ],
)
def test_what_is_out_of_date_is_made_anew(
    data: Path, change: Callable[[Path], object], reason: str, capsys: pytest.CaptureFixture[str]
):
    change(data)
    assert again(data) == (0, True)
    assert capsys.readouterr().err.splitlines().count(f"{data} is made anew: {reason}.") == 1
    assert again(data) == (0, False)


def test_a_run_that_fails_keeps_the_earlier_data_set(data: Path, monkeypatch: pytest.MonkeyPatch):
    before = files(data)

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prepare_data, "write", fail)
    assert again(data, "--force") == (2, False)
    assert files(data) == before
    assert sorted(entry.name for entry in data.parent.iterdir()) == ["data", "texts"]


def test_a_second_writer_waits_and_finds_the_work_done(texts: Path, tmp_path: Path):
    made, output = tmp_path / "made", tmp_path / "data"
    assert prepare(made, "--input", str(texts)) == 0
    with atomic.sole_writer(output):
        process = start(output, "--input", str(texts))
        assert process.stderr is not None
        assert process.stderr.readline() == f"Waiting for another writer of {output}.\n"
        with atomic.atomic_folder(output) as folder:
            shutil.copytree(made, folder, dirs_exist_ok=True)
        number = (output / "text_document.idx").stat().st_ino
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0
    assert error == ""
    assert (output / "text_document.idx").stat().st_ino == number


# What a run leaves that does not come to its end


def test_a_killed_run_leaves_nothing_that_could_be_taken_for_whole(texts: Path, tmp_path: Path):
    output = tmp_path / "data"
    process = start(output, "--input", str(texts))
    wait_until_half_made(output, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert len(left) == 3
    assert re.fullmatch(r"\.data\.[0-9a-f]{32}\.tmp", left[0])
    assert left[1:] == [".data.lock", "texts"]
    assert not list(tmp_path.rglob("dataset.json"))

    assert prepare(output, "--input", str(texts)) == 0
    assert json.loads((output / "dataset.json").read_text())["documents"] == len(TEXTS)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "texts"]


def test_an_interrupted_run_leaves_nothing(texts: Path, tmp_path: Path):
    output = tmp_path / "data"
    process = start(output, "--input", str(texts))
    wait_until_half_made(output, process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "adacc prepare-data: interrupted"
    assert "Traceback" not in error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["texts"]
