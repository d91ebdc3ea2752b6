"""Prices on disk: found again, and never in the way."""

import errno
import json
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import megatron_adacc
from megatron_adacc.cost import cache as cache_module
from megatron_adacc.cost.cache import PriceCache, cache_folder, header_for

HEADER = {"device": "test", "torch": "1", "triton": "none", "threads": 1, "megatron_adacc": "0"}


@pytest.fixture
def fresh(tmp_path):
    """`fresh()`: the cache as another process sees it."""
    return lambda header=HEADER: PriceCache(tmp_path / "prices", header)


def leftovers(cache):
    return sorted(p.name for p in cache.path.parent.iterdir() if p != cache.path)


def test_prices_are_found_by_another_process(fresh):
    first = fresh()
    assert first.get("op a", 1) is None
    first.update({"op a": [1.5], "codec b": [2, 3]})
    assert first.get("op a", 1) == [1.5]
    second = fresh()
    assert second.get("op a", 1) == [1.5]
    assert second.get("codec b", 2) == [2.0, 3.0]
    assert second.get("codec b", 1) is None  # another kind of price
    assert leftovers(first) == []


def test_another_device_or_version_has_its_own_file(fresh):
    fresh().update({"op a": [1.5]})
    other = fresh(HEADER | {"threads": 2})
    assert other.get("op a", 1) is None
    other.update({"op a": [9.0]})
    assert fresh().get("op a", 1) == [1.5]


def test_what_others_wrote_meanwhile_stays(fresh):
    one, two = fresh(), fresh()
    assert one.get("op a", 1) is None
    assert two.get("op a", 1) is None
    one.update({"op a": [1.0], "op both": [1.0]})
    two.update({"op b": [2.0], "op both": [2.0]})
    assert json.loads(one.path.read_text()) == {
        "header": HEADER,
        "prices": {"op a": [1.0], "op b": [2.0], "op both": [2.0]},
    }
    assert two.get("op a", 1) == [1.0]


BROKEN = {
    "half": '{"header": {"device": "te',
    "empty": "",
    "binary": "\x00\x01",
    "a list": "[]",
    "deep": "[" * 100_000,
    "another header": json.dumps({"header": HEADER | {"threads": 3}, "prices": {}}),
    "no prices": json.dumps({"header": HEADER}),
    "prices that are a list": json.dumps({"header": HEADER, "prices": []}),
    "a text": json.dumps({"header": HEADER, "prices": {"op a": ["1"]}}),
    "NaN": json.dumps({"header": HEADER, "prices": {"op a": [float("nan")]}}),
    "negative": json.dumps({"header": HEADER, "prices": {"op a": [-1.0]}}),
    "a huge integer": json.dumps({"header": HEADER, "prices": {"op a": [10**400]}}),
    "true": json.dumps({"header": HEADER, "prices": {"op a": [True]}}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_said_once_and_rewritten(fresh, caplog, content):
    cache = fresh()
    cache.path.parent.mkdir()
    cache.path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert cache.get("op a", 1) is None
        cache.update({"op a": [1.0]})
    (record,) = [r for r in caplog.records if r.name == cache_module.__name__]
    assert record.getMessage().startswith(f"The cached prices in {cache.path} are not used (")
    assert record.getMessage().endswith("); they are measured again.")
    assert fresh().get("op a", 1) == [1.0]


def test_a_file_of_other_bytes_than_utf8(fresh, caplog):
    cache = fresh()
    cache.path.parent.mkdir()
    cache.path.write_bytes(b"\xff\xfe\xff")
    assert cache.get("op a", 1) is None
    assert "are not used" in caplog.text


def test_a_file_that_is_too_large_is_not_read(fresh, monkeypatch, caplog):
    fresh().update({"op a": [1.0]})
    monkeypatch.setattr(cache_module, "MOST_BYTES", 10)
    assert fresh().get("op a", 1) is None
    assert "it has more than 10 bytes" in caplog.text


def test_the_oldest_prices_go(fresh, monkeypatch):
    monkeypatch.setattr(cache_module, "MOST_PRICES", 3)
    cache = fresh()
    for i in range(5):
        cache.update({f"op {i}": [float(i)]})
    cache.update({"op 2": [9.0]})  # measured again, it is the newest
    cache.update({"op 5": [5.0]})
    assert list(json.loads(cache.path.read_text())["prices"]) == ["op 4", "op 2", "op 5"]


def test_the_file_is_bounded_in_bytes(fresh, monkeypatch):
    monkeypatch.setattr(cache_module, "MOST_BYTES", cache_module.HEADER_BYTES + 1000)
    cache = fresh()
    cache.update({f"op {i} " + "x" * 90: [float(i)] for i in range(100)})
    assert cache.path.stat().st_size <= cache_module.MOST_BYTES
    kept = list(json.loads(cache.path.read_text())["prices"])
    assert len(kept) == 8  # of about 113 bytes each
    assert kept[-1].startswith("op 99 ")


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = PriceCache(tmp_path / "file" / "prices", HEADER)
    cache.update({"op a": [1.0]})
    cache.update({"op b": [1.0]})
    assert cache.get("op a", 1) == [1.0]  # for this process
    (record,) = [r for r in caplog.records if r.name == cache_module.__name__]
    assert record.getMessage().startswith("Prices are not cached: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(fresh, caplog):
    cache = fresh()
    cache.path.parent.mkdir()
    cache.path.parent.chmod(0o500)
    cache.update({"op a": [1.0]})
    assert "Prices are not cached" in caplog.text


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_disk_or_one_that_refuses(fresh, monkeypatch, caplog, error):
    fresh().update({"op a": [1.0]})

    def refuse(path, text):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(cache_module, "write_text", refuse)
    cache = fresh()
    cache.update({"op b": [2.0]})
    assert f"cannot be written ([Errno {error}]" in caplog.text
    assert cache.get("op b", 1) == [2.0]
    monkeypatch.undo()
    assert fresh().get("op a", 1) == [1.0]
    assert leftovers(cache) == []


def test_what_a_killed_writer_left_is_removed(fresh):
    cache = fresh()
    cache.update({"op a": [1.0]})
    remains = cache.path.parent / f".{cache.path.name}.{'0' * 32}.tmp"
    remains.write_text("half")
    cache.update({"op b": [1.0]})
    assert leftovers(cache) == []


def test_threads_that_write_at_once_lose_nothing(fresh):
    caches = [fresh() for _ in range(8)]

    def write(i):
        for j in range(5):
            caches[i].update({f"op {i} {j}": [float(i)]})

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json.loads(caches[0].path.read_text())["prices"]
    assert set(found) == {f"op {i} {j}" for i in range(8) for j in range(5)}
    assert leftovers(caches[0]) == []


def test_processes_that_write_at_once_lose_nothing(fresh):
    cache = fresh()
    code = (
        "import sys, json; from pathlib import Path; from megatron_adacc.cost.cache import PriceCache\n"
        "folder, header, i = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]\n"
        "cache = PriceCache(folder, header)\n"
        "for j in range(10): cache.update({f'op {i} {j}': [1.0]})\n"
    )
    arguments = [str(cache.path.parent), json.dumps(HEADER)]
    started = [subprocess.Popen([sys.executable, "-c", code, *arguments, str(i)]) for i in range(3)]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert len(json.loads(cache.path.read_text())["prices"]) == 30
    assert leftovers(cache) == []


@pytest.mark.parametrize("value", ["", "off", "OFF", " off "])
def test_it_can_be_turned_off(value):
    assert cache_folder({"ADACC_CACHE_DIR": value, "HOME": "/home/x"}) is None
    cache = PriceCache(None, HEADER)
    cache.update({"op a": [1.0]})
    assert cache.get("op a", 1) == [1.0]
    assert cache.path is None


def test_where_it_lies(monkeypatch):
    assert str(cache_folder({"ADACC_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"})) == "/a/b"
    assert str(cache_folder({"XDG_CACHE_HOME": "/c"})) == "/c/megatron-adacc"
    monkeypatch.setenv("HOME", "/home/x")
    assert str(cache_folder({"XDG_CACHE_HOME": "relative"})) == "/home/x/.cache/megatron-adacc"
    assert str(cache_folder({})) == "/home/x/.cache/megatron-adacc"
    assert str(cache_folder({"ADACC_CACHE_DIR": "~/y"})) == "/home/x/y"


def test_the_header_of_this_machine():
    header = header_for(torch.device("cpu"))
    assert list(header) == ["device", "torch", "triton", "threads", "megatron_adacc"]
    assert str(header["device"]).startswith("cpu ")
    assert header["torch"] == torch.__version__
    assert header["threads"] == torch.get_num_threads()
    assert header["megatron_adacc"] == megatron_adacc.__version__
