"""Files and folders appear whole or not at all, whatever happens to their writer."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_adacc import atomic

# A writer that has begun, says so, and waits to be killed.
WRITER = """
import sys, time
from megatron_adacc import atomic
with atomic.sole_writer(sys.argv[1]), atomic.atomic_folder(sys.argv[1]) as folder:
    (folder / "part").write_text("half")
    print("begun", flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def build(target: Path, content: str) -> None:
    with atomic.sole_writer(target), atomic.atomic_folder(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text(content)


@pytest.fixture
def started(tmp_path: Path):
    """Start a writer of tmp_path/data that stays inside its block."""
    processes = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_file_is_not_there_until_the_block_ends(tmp_path: Path):
    path = tmp_path / "report.json"
    with atomic.atomic_file(path) as stream:
        stream.write(b"\x00\xffwhole\r\n")
        assert not path.exists()
        assert len(names(tmp_path)) == 1
    assert path.read_bytes() == b"\x00\xffwhole\r\n"
    assert names(tmp_path) == ["report.json"]


@pytest.mark.parametrize("exception", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_file_keeps_its_earlier_content_when_the_block_raises(tmp_path: Path, exception: BaseException):
    path = tmp_path / "report.json"
    atomic.write_text(path, "earlier")

    def write_and_raise() -> None:
        with atomic.atomic_file(path) as stream:
            stream.write(b"later")
            raise exception

    with pytest.raises(type(exception)):
        write_and_raise()
    assert path.read_text() == "earlier"
    assert names(tmp_path) == ["report.json"]


def test_write_text_writes_utf8_untranslated_and_follows_a_link(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    atomic.write_text(tmp_path / "link", "é\r\n\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_bytes() == b"\xc3\xa9\r\n\n"


def test_file_and_folder_get_the_modes_that_the_umask_gives(tmp_path: Path):
    earlier = os.umask(0o027)
    try:
        atomic.write_text(tmp_path / "file", "x")
        build(tmp_path / "data", "x")
    finally:
        os.umask(earlier)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o750


def test_a_missing_parent_is_an_oserror_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        atomic.write_text(tmp_path / "no" / "file", "x")
    assert names(tmp_path) == []


@pytest.mark.parametrize("before", ["absent", "empty"])
def test_folder_appears_whole(tmp_path: Path, before: str):
    target = tmp_path / "data"
    if before == "empty":
        target.mkdir()
    with atomic.sole_writer(target), atomic.atomic_folder(target) as folder:
        (folder / "file").write_text("whole")
        assert folder.parent == tmp_path
        assert re.fullmatch(r"\.data\.[0-9a-f]{32}\.tmp", folder.name)
        assert not (target / "file").exists()
    assert (target / "file").read_text() == "whole"
    assert names(tmp_path) == ["data"]


def test_folder_replaces_an_earlier_one_as_a_whole(tmp_path: Path):
    target = tmp_path / "data"
    build(target, "earlier")
    (target / "stale").write_text("from elsewhere")
    build(target, "later")
    assert (target / "inner" / "file").read_text() == "later"
    assert names(target) == ["inner"]
    assert names(tmp_path) == ["data"]


@pytest.mark.parametrize("exception", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_folder_stays_as_it_was_when_the_block_raises(tmp_path: Path, exception: BaseException):
    target = tmp_path / "data"
    build(target, "earlier")

    def build_and_raise() -> None:
        with atomic.sole_writer(target), atomic.atomic_folder(target) as folder:
            (folder / "file").write_text("half")
            raise exception

    with pytest.raises(type(exception)):
        build_and_raise()
    assert (target / "inner" / "file").read_text() == "earlier"
    assert names(target) == ["inner"]
    assert names(tmp_path) == ["data"]


def test_folder_stays_as_it_was_when_the_second_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "data"
    build(target, "earlier")
    rename, calls = os.rename, []

    def refuse_second(source: Path, destination: Path) -> None:
        calls.append((Path(source).suffix, Path(destination).suffix))
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", refuse_second)
    with pytest.raises(OSError, match="Input/output"):
        build(target, "later")
    assert calls == [("", ".old"), (".tmp", ""), (".old", "")]
    assert (target / "inner" / "file").read_text() == "earlier"
    assert names(tmp_path) == ["data"]


def test_a_killed_writer_leaves_no_target_and_the_next_writer_clears_its_remains(tmp_path: Path, started):
    process = started()
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = names(tmp_path)
    assert len(left) == 2
    assert re.fullmatch(r"\.data\.[0-9a-f]{32}\.tmp", left[0])
    assert left[1] == ".data.lock"
    build(tmp_path / "data", "whole")
    assert names(tmp_path) == ["data"]


def test_an_earlier_folder_comes_back_when_its_writer_died_between_the_renames(tmp_path: Path):
    target = tmp_path / "data"
    build(target, "earlier")
    target.rename(tmp_path / f".data.{'0' * 32}.old")
    with atomic.sole_writer(target):
        assert (target / "inner" / "file").read_text() == "earlier"
    assert names(tmp_path) == ["data"]


def test_a_retired_folder_goes_when_its_writer_died_after_the_renames(tmp_path: Path):
    target = tmp_path / "data"
    build(target, "earlier")
    target.rename(tmp_path / f".data.{'0' * 32}.old")
    target.mkdir()
    (target / "file").write_text("later")
    with atomic.sole_writer(target):
        assert names(target) == ["file"]
    assert names(tmp_path) == ["data"]


def test_only_remains_of_this_very_target_are_cleared(tmp_path: Path):
    others = [f".data.b.{'0' * 32}.tmp", ".data.notes.tmp", f".data.{'0' * 31}.tmp", f"data.{'0' * 32}.tmp"]
    for name in [*others, f".data.{'f' * 32}.tmp"]:
        (tmp_path / name).mkdir()
    with atomic.sole_writer(tmp_path / "data"):
        pass
    assert names(tmp_path) == sorted(others)


def test_a_second_writer_waits_says_so_once_and_spares_the_living(tmp_path: Path, started):
    process = started()
    target = tmp_path / "data"
    events: list[str] = []

    def second() -> None:
        with atomic.sole_writer(target, on_wait=lambda: events.append("waits")):
            events.append("has it")

    thread = threading.Thread(target=second)
    thread.start()
    deadline = time.monotonic() + 60
    while not events and time.monotonic() < deadline:
        time.sleep(0.01)
    assert events == ["waits"]
    assert sum(name.endswith(".tmp") for name in names(tmp_path)) == 1
    process.kill()
    thread.join(60)
    assert events == ["waits", "has it"]
    assert names(tmp_path) == []


def test_many_writers_of_one_folder_come_one_at_a_time(tmp_path: Path):
    """The lock file is unlinked by each holder: a waiter must not take the unlinked one for the lock."""
    target = tmp_path / "data"
    inside: list[int] = []
    most: list[int] = []

    def write(number: int) -> None:
        for _ in range(10):
            with atomic.sole_writer(target):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.001)
                inside.remove(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 40
    assert names(tmp_path) == []


def test_without_locks_the_folder_is_written_and_nothing_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    perhaps_alive = f".data.{'0' * 32}.tmp"
    (tmp_path / perhaps_alive).mkdir()
    monkeypatch.setattr(atomic.fcntl, "flock", no_locks)
    build(tmp_path / "data", "whole")
    assert names(tmp_path) == sorted([perhaps_alive, "data"])
    assert caplog.messages == [
        f"{tmp_path} has no file locks (Function not implemented): nothing keeps two writers apart there"
    ]
