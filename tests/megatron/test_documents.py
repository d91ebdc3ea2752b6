"""Documents come out of files exactly, in a fixed order, and whatever is no text is counted and left out."""

import json
import os
import sysconfig
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from megatron_adacc.errors import UserError
from megatron_adacc.megatron import documents
from megatron_adacc.megatron.documents import Corpus, Skipped, find_sources, pieces, printable, signature


def corpus_of(*inputs: Path, json_key: str = "text") -> tuple[Corpus, list[str], Skipped]:
    skipped = Skipped(named=100)
    sources = find_sources([str(path) for path in inputs], str(inputs[0].parent / "no output"), skipped)
    corpus = Corpus(sources, json_key, skipped)
    return corpus, list(corpus.scan(lambda size: None)), skipped


def names(sources: list[documents.Source], top: Path) -> list[str]:
    return [os.path.relpath(source.name, top) for source in sources]


def test_texts_come_back_exactly_and_by_number(tmp_path: Path):
    texts = ["\ufeffdos\r\nlines\r\n", "é\u2028\U0001f600 <|endoftext|>\x0c", " \n x", "no newline at the end"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.any").write_bytes(text.encode())
    corpus, scanned, skipped = corpus_of(tmp_path)
    assert scanned == texts
    assert [corpus.read(number) for number in (3, 1, 0, 2)] == [texts[3], texts[1], texts[0], texts[2]]
    assert len(corpus) == 4
    assert corpus.text_bytes == sum(len(text.encode()) for text in texts) == 15 + 24 + 4 + 21
    assert skipped.counts.total() == 0


def test_lines_of_json_are_documents(tmp_path: Path):
    values = [{"text": "one\n"}, {"id": 2, "text": "zwei \u00fc \U0001f600"}, {"text": "three"}]
    lines = [json.dumps(values[0]), json.dumps(values[1], ensure_ascii=False), json.dumps(values[2])]
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines[0] + "\r\n\n" + lines[1] + "\n" + lines[2])
    (tmp_path / "b.JSON").write_text('{"text": "four"}\n')
    corpus, scanned, skipped = corpus_of(tmp_path)
    assert scanned == ["one\n", "zwei ü \U0001f600", "three", "four"]
    assert [corpus.read(number) for number in range(4)] == scanned
    assert corpus.text_bytes == 4 + 12 + 5 + 4
    assert skipped.counts.total() == 0


def test_the_key_of_the_text_can_be_another(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "content": "yes"}\n')
    assert corpus_of(tmp_path, json_key="content")[1] == ["yes"]


def test_files_that_are_no_text_are_skipped_with_the_reason(tmp_path: Path):
    (tmp_path / "a_text").write_text("text")
    (tmp_path / "b_binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "c_late_nul").write_bytes(b"x" * 70_000 + b"\0")
    (tmp_path / "d_empty").write_bytes(b"")
    (tmp_path / "e_blank").write_bytes(b" \n\t\n")
    (tmp_path / "f_latin1").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "g_utf16").write_bytes("text".encode("utf-16"))
    (tmp_path / "h_dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "i_fifo")
    (tmp_path / "j_empty.jsonl").write_bytes(b"")
    _, scanned, skipped = corpus_of(tmp_path)
    assert scanned == ["text"]
    # The walk comes before the reading.
    assert [line.removeprefix(f"{tmp_path}/") for line in skipped.first] == [
        "h_dangling: unreadable (No such file or directory)",
        "i_fifo: not a regular file",
        "b_binary: binary (NUL bytes)",
        "c_late_nul: binary (NUL bytes)",
        "d_empty: empty",
        "e_blank: empty",
        "f_latin1: not UTF-8 (byte 3)",
        "g_utf16: binary (NUL bytes)",
        "j_empty.jsonl: empty",
    ]
    assert skipped.summary() == "3 binary, 3 empty, 1 unreadable, 1 not a regular file, 1 not UTF-8"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_skipped(tmp_path: Path):
    (tmp_path / "a").write_text("secret")
    (tmp_path / "a").chmod(0)
    _, scanned, skipped = corpus_of(tmp_path)
    assert scanned == []
    assert skipped.first == [f"{tmp_path}/a: unreadable (Permission denied)"]


def test_a_read_error_skips_the_file(tmp_path: Path):
    """/proc/self/mem: a regular file, of which the first page cannot be read, not even by root."""
    mem = Path("/proc/self/mem")
    if not mem.exists():
        pytest.skip("needs /proc")
    _, scanned, skipped = corpus_of(tmp_path, mem)
    assert scanned == []
    assert skipped.counts == {"unreadable": 1}
    assert skipped.first[0].startswith("/proc/self/mem: unreadable (")


def test_lines_that_are_no_documents_are_skipped_with_the_reason(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "good"}\n'
        b"{not json}\n"
        b'{"other": "x"}\n'
        b'["text"]\n'
        b'{"text": 5}\n'
        b'{"text": ""}\n'
        b'{"text": "\xff"}\n'
        b'{"text": "\\ud800"}\n'
        b'{"text": "\xed\xa0\x80"}\n' + b"[" * 200_000 + b"\n"
        b'{"text": "last"}\n'
    )
    corpus, scanned, skipped = corpus_of(tmp_path)
    assert scanned == ["good", "last"]
    assert corpus.read(1) == "last"
    prefix = f"{tmp_path}/a.jsonl line "
    assert [line.removeprefix(prefix) for line in skipped.first[:8]] == [
        "2: not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        "3: without the key (text)",
        "4: without the key (text)",
        "5: not a string (text: int)",
        "6: empty",
        "7: not UTF-8 (byte 10)",
        "8: not Unicode (half of a surrogate pair)",
        "9: not UTF-8 (byte 10)",
    ]
    assert skipped.first[8].startswith(f"{prefix}10: not JSON (maximum recursion depth exceeded")
    assert skipped.counts.total() == 9


def test_what_is_too_large_is_skipped_without_being_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 20)
    (tmp_path / "a").write_text("x" * 21)
    (tmp_path / "b").write_text("x" * 20)
    (tmp_path / "c.jsonl").write_text('{"text": "' + "y" * 50 + '"}\n{"text": "short"}\n')
    corpus, scanned, skipped = corpus_of(tmp_path)
    assert scanned == ["x" * 20, "short"]
    assert corpus.read(1) == "short"
    assert skipped.first == [
        f"{tmp_path}/a: too large (more than 20 bytes)",
        f"{tmp_path}/c.jsonl line 1: too large (20 bytes or more)",
    ]


def test_only_the_first_few_are_named(tmp_path: Path):
    skipped = Skipped(named=2)
    for number in range(5):
        skipped.add(f"f{number}", "empty")
    skipped.add("g", "binary", "NUL bytes")
    assert skipped.first == ["f0: empty", "f1: empty"]
    assert skipped.summary() == "5 empty, 1 binary"


def test_names_are_shown_on_one_line_of_valid_unicode():
    assert printable("a\nb\udcff\x1b[31m é") == r"a\nb\udcff\x1b[31m é"


def test_order_is_that_of_the_command_line_and_sorted_within_a_folder(tmp_path: Path):
    for name in ("b/2", "b/10", "b/sub/1", "a/x", "z"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    inputs = [str(tmp_path / name) for name in ("z", "b", "a")]
    sources = find_sources(inputs, str(tmp_path / "out"), Skipped())
    assert names(sources, tmp_path) == ["z", "b/10", "b/2", "b/sub/1", "a/x"]


def test_loops_end_and_nothing_is_taken_twice(tmp_path: Path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "file").write_text("text")
    (tmp_path / "in" / "sub" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "self").symlink_to(tmp_path / "in" / "self")
    (tmp_path / "in" / "alias").symlink_to(tmp_path / "in" / "sub" / "file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked").write_text("text")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "elsewhere")
    skipped = Skipped()
    inputs = [str(tmp_path / "in"), str(tmp_path / "in" / "sub"), str(tmp_path / "in" / "sub" / "file")]
    sources = find_sources(inputs, str(tmp_path / "out"), skipped)
    assert names(sources, tmp_path) == ["in/alias", "in/folder/linked"]
    assert skipped.first == [f"{tmp_path}/in/self: unreadable (Too many levels of symbolic links)"]


def test_hidden_names_and_the_output_are_left_out_of_folders(tmp_path: Path):
    for name in (".git/config", ".hidden", "out/tokenizer.json", ".out.0.tmp/part", "text"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    sources = find_sources([str(tmp_path)], str(tmp_path / "out"), Skipped())
    assert names(sources, tmp_path) == ["text"]
    sources = find_sources([str(tmp_path / ".hidden")], str(tmp_path / "out"), Skipped())
    assert names(sources, tmp_path) == [".hidden"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "--input {} does not exist: name files or folders that do."),
        ("out/tokenizer", "--input {} lies in the --output folder: choose another --output."),
        ("out", "--input {} lies in the --output folder: choose another --output."),
    ],
)
def test_inputs_that_cannot_be_meant_are_refused(tmp_path: Path, name: str, sentence: str):
    (tmp_path / "out" / "tokenizer").mkdir(parents=True)
    path = str(tmp_path / name)
    with pytest.raises(UserError) as raised:
        find_sources([path], str(tmp_path / "out"), Skipped())
    assert str(raised.value) == sentence.format(path)


@pytest.mark.parametrize("change", ["content", "growth", "removal"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_changes_between_the_passes_is_an_error(tmp_path: Path, name: str, change: str):
    path = tmp_path / name
    path.write_text('{"text": "one"}\n')
    corpus, _, _ = corpus_of(tmp_path)
    if change == "content":
        path.write_text('{"text": "two"}\n')
        os.utime(path, ns=(0, 0))
    elif change == "growth":
        with path.open("a") as stream:
            stream.write("more\n")
    else:
        path.unlink()
    with pytest.raises(UserError) as raised:
        corpus.read(0)
    assert str(raised.value) == f"{path} changed while it was being read: run this again when it is complete."


def test_signature_tells_other_files_sizes_and_times(tmp_path: Path):
    def of() -> str:
        return signature(find_sources([str(tmp_path)], str(tmp_path / "out"), Skipped()))

    path = tmp_path / "a"
    path.write_text("one")
    os.utime(path, ns=(10, 10))
    first = of()
    assert of() == first
    os.utime(path, ns=(10, 11))
    touched = of()
    path.write_text("four")
    os.utime(path, ns=(10, 10))
    grown = of()
    path.rename(tmp_path / "b")
    assert len({first, touched, grown, of()}) == 4


def test_standard_library_is_sorted_and_without_tests():
    sources = documents.standard_library(Skipped())
    found = [source.name for source in sources]
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(found)
    assert not any(
        part in {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
        for name in found
        for part in name.split("/")
    )
    assert all(name.endswith(".py") for name in found)
    assert found == [source.name for source in documents.standard_library(Skipped())]
    assert sum(source.size_bytes for source in sources) > 5_000_000


def test_pieces_are_the_text_and_tokenize_as_the_whole():
    tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()[:60_000]
    parts = list(pieces(text, 500))
    assert "".join(parts) == text
    assert len(parts) > 80
    # Every one of these cuts is at a word or a line, none is the last resort after another 500 characters.
    assert max(len(part) for part in parts[:-1]) < 1000
    whole = [word for word, _ in tokenizer.pre_tokenize_str(text)]
    assert [word for part in parts for word, _ in tokenizer.pre_tokenize_str(part)] == whole


def test_pieces_end_where_there_is_no_place_to_cut():
    assert [len(part) for part in pieces("x" * 65, 10)] == [20, 20, 20, 5]
    assert list(pieces("ab cd", 10)) == ["ab cd"]


def test_pieces_keep_runs_of_white_space_together():
    assert list(pieces("aaaaaaaa  bb cc dd ee", 8)) == ["aaaaaaaa  bb", " cc dd ee"]
    assert list(pieces("aaaaaaaa\n\nb\ncc dd ee ff", 8)) == ["aaaaaaaa\n\nb\n", "cc dd ee ff"]
