"""`adacc prepare-data`: what Megatron reads back, what is said, and what is refused."""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_adacc import cli
from megatron_adacc.megatron import prepare_data

VOCAB = 300
# No document here ends another: the one with Megatron's end of document in it is text like the rest.
TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n" * 20,
    "dos\r\nline ends\r\n\r\n",
    "\ufeffa byte order mark, and \u00fc\u00e9\u4e2d\u6587 \U0001f600\U0001f3fd \u202e\n",
    "ends <|endoftext|> not <|padding|> here",
    "  leading and trailing white space \t ",
    "control characters \x01\x1f\x7f\x85",
]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of TEXTS, one a file."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of TEXTS, made once; not to be changed."""
    top = tmp_path_factory.mktemp("made")
    (top / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (top / "texts" / f"{number}.txt").write_bytes(text.encode())
    assert prepare(top / "data", "--input", str(top / "texts")) == 0
    return top / "data"


def prepare(output: Path, *flags: str) -> int:
    return cli.main(["prepare-data", "--output", str(output), "--vocab-size", str(VOCAB), *flags])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def manifest(output: Path) -> dict:
    return json.loads((output / "dataset.json").read_text())


def read_back(output: Path) -> list[np.ndarray]:
    from megatron.core.datasets import indexed_dataset

    data = indexed_dataset.IndexedDataset(str(output / "text_document"))
    assert data.document_indices.tolist() == list(range(len(data) + 1))
    return [np.array(data[number]) for number in range(len(data))]


def megatron_tokenizer(output: Path):
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(str(output / "tokenizer"), metadata_path={"library": "huggingface"})


def start(output: Path, *flags: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_adacc.cli", "prepare-data", "--output", str(output)]
    return subprocess.Popen(
        [*command, "--vocab-size", str(VOCAB), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# What Megatron reads


def test_megatron_reads_back_exactly_what_the_files_hold(made: Path):
    tokenizer = megatron_tokenizer(made)
    documents = read_back(made)
    assert [ids.dtype for ids in documents] == [np.uint16] * len(TEXTS)
    assert [int(ids[-1]) for ids in documents] == [tokenizer.eod] * len(TEXTS)
    assert not any(tokenizer.eod in ids[:-1] or tokenizer.pad in ids for ids in documents)
    order = np.random.RandomState(1234).permutation(len(TEXTS))
    assert [tokenizer.detokenize(ids[:-1].tolist()) for ids in documents] == [TEXTS[number] for number in order]


def test_manifest_tells_what_was_made(made: Path):
    values = manifest(made)
    tokens = sum(len(ids) for ids in read_back(made))
    sizes = {name: len(content) for name, content in files(made).items() if name != "dataset.json"}
    assert sorted(sizes) == [
        "text_document.bin",
        "text_document.idx",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ]
    assert sizes["text_document.bin"] == 2 * tokens
    assert {name: values[name] for name in values if not name.endswith("sha256")} == {
        "kind": "megatron-adacc text data set",
        "format_version": 1,
        "source": str(made.parent / "texts"),
        "options": {"inputs": [str(made.parent / "texts")], "vocab_size": VOCAB, "seed": 1234, "json_key": "text"},
        "documents": 6,
        "tokens": tokens,
        "bytes": sum(len(text.encode()) for text in TEXTS),
        "vocab_size": VOCAB,
        "eod_id": 0,
        "pad_id": 1,
        "dtype": "uint16",
        "skipped": {},
        "files": sizes,
        "versions": {"megatron-core": "0.19.2", "tokenizers": values["versions"]["tokenizers"]},
    }
    assert re.fullmatch("[0-9a-f]{64}", values["options_sha256"])
    assert re.fullmatch("[0-9a-f]{64}", values["inputs_sha256"])


def test_default_corpus_is_the_standard_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["prepare-data", "--output", str(tmp_path / "data"), "--vocab-size", "1000"]) == 0
    values = manifest(tmp_path / "data")
    version = ".".join(map(str, sys.version_info[:3]))
    assert values["source"] == f"the standard library of Python {version}"
    assert values["options"]["inputs"] is None
    assert values["bytes"] > 5_000_000
    assert values["vocab_size"] == 1000
    documents = read_back(tmp_path / "data")
    assert len(documents) == values["documents"] > 300
    tokenizer = megatron_tokenizer(tmp_path / "data")
    written = {tokenizer.detokenize(ids[:-1].tolist()) for ids in documents[:40]}
    library = Path(sysconfig.get_path("stdlib"))
    assert written <= {path.read_bytes().decode() for path in library.rglob("*.py") if "test" not in path.parts}
    assert len(capsys.readouterr().err.splitlines()) < 12


def test_the_same_input_gives_the_same_bytes(made: Path, tmp_path: Path):
    """In another process, with another hash seed and another number of threads."""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    process = start(tmp_path / "again", "--input", str(made.parent / "texts"), env=environment)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert files(tmp_path / "again") == files(made)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again"]


def test_seed_decides_the_order_and_nothing_else(made: Path, tmp_path: Path):
    assert prepare(tmp_path / "data", "--input", str(made.parent / "texts"), "--seed", "5") == 0
    here, there = ([bytes(ids) for ids in read_back(output)] for output in (tmp_path / "data", made))
    assert here != there
    assert sorted(here) == sorted(there)
    assert files(tmp_path / "data" / "tokenizer") == files(made / "tokenizer")


def test_lines_of_json_and_files_together(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "first line"}\nbroken\n{"body": "second line"}\n')
    (tmp_path / "b.md").write_text("a file")
    inputs = [str(tmp_path / "b.md"), str(tmp_path / "a.jsonl")]
    flags = ["--input", inputs[0], "--input", inputs[1], "--json-key", "body"]
    assert prepare(tmp_path / "data", *flags) == 0
    tokenizer = megatron_tokenizer(tmp_path / "data")
    found = [tokenizer.detokenize(ids[:-1].tolist()) for ids in read_back(tmp_path / "data")]
    assert sorted(found) == ["a file", "first line", "second line"]
    assert manifest(tmp_path / "data")["skipped"] == {"not JSON": 1}


# What is said


def test_skipped_files_are_counted_and_the_first_five_named(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for number in range(6):
        (texts / f"a{number}.bin").write_bytes(b"\0")
    (texts / "b[red].txt").write_bytes(b"\xff")
    assert prepare(tmp_path / "data", "--input", str(texts)) == 0
    lines = capsys.readouterr().err.splitlines()
    at = lines.index("Skipped 7 files and lines: 6 binary, 1 not UTF-8.")
    assert lines[at + 1 : at + 7] == [
        *(f"  {texts}/a{number}.bin: binary (NUL bytes)" for number in range(5)),
        "  and 2 more",
    ]
    assert manifest(tmp_path / "data")["skipped"] == {"binary": 6, "not UTF-8": 1}


def test_a_few_plain_lines_without_a_terminal(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "a folder"
    assert prepare(output, "--input", str(made.parent / "texts")) == 0
    said = capsys.readouterr()
    values = manifest(output)
    assert said.err.splitlines() == [
        f"Reading 6 files ({prepare_data.decimal(values['bytes'])}) of {made.parent / 'texts'}.",
        "Megatron splits by documents and hangs on an empty part, which 6 documents cannot avoid under its default "
        "--split: use --split 1,0,0 --eval-iters 0, or give more files.",
        "Writing 6 documents with 300 tokenizer entries.",
    ]
    assert said.out.splitlines() == [
        f"6 documents, 1.1 kB of text, {values['tokens']} tokens, 300 tokenizer entries. Train on it with",
        f"  --data-path '{output}/text_document' --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        f"'{output}/tokenizer' --split 1,0,0 --eval-iters 0",
    ]


def test_a_progress_bar_on_a_terminal(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert prepare(tmp_path / "data", "--input", str(texts)) == 0
    error = capsys.readouterr().err
    assert "Writing tokens" in error
    assert "━" in error
    assert "Reading 6 files" not in error


def test_a_text_too_small_for_the_vocabulary_gives_a_smaller_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a").write_text("ab ab ab")
    assert prepare(tmp_path / "data", "--input", str(tmp_path / "a"), "--vocab-size", "5000") == 0
    # 2 special tokens, 256 bytes, and the merges "ab" and " ab".
    assert manifest(tmp_path / "data")["vocab_size"] == 260
    assert megatron_tokenizer(tmp_path / "data").vocab_size == 260
    assert "The text is too small for 5,000 tokenizer entries: there are 260." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("documents", "flags"),
    [
        (1, "--split 1,0,0 --eval-iters 0"),
        (9, "--split 1,0,0 --eval-iters 0"),
        (10, "--split 9,1,0"),
        (500, "--split 9,1,0"),
        (501, ""),
    ],
)
def test_the_split_that_is_named_leaves_no_part_empty(documents: int, flags: str):
    """By Megatron's own rule: part i has the documents from round(a_i n) to round(b_i n)."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    def parts(split: str) -> list[int]:
        bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        return [round(part[1] * documents) - round(part[0] * documents) for part in bounds if part is not None]

    assert prepare_data._split_flags(documents) == flags
    assert min(parts(flags.split()[1] if flags else "969, 30, 1")) > 0
    assert (min(parts("969, 30, 1")) == 0) == (flags != "")


# What is refused


def refuse_nothing(folder: Path) -> list[str]:
    (folder / "binary").write_bytes(b"\0")
    (folder / "empty").write_bytes(b"")
    return ["--input", str(folder)]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            lambda folder: ["--vocab-size", "257"],
            "--vocab-size 257 is out of range: it must be from 258 (256 bytes and 2 special tokens) to 1000000.",
        ),
        (
            lambda folder: ["--vocab-size", "1000001"],
            "--vocab-size 1000001 is out of range: it must be from 258 (256 bytes and 2 special tokens) to 1000000.",
        ),
        (lambda folder: ["--seed", "-1"], "--seed -1 is out of range: it must be from 0 to 4294967295."),
        (
            lambda folder: ["--input", f"{folder}/no"],
            "--input {folder}/no does not exist: name files or folders that do.",
        ),
        (
            refuse_nothing,
            "There are no documents: none of the 2 files of {folder} has text in UTF-8 to offer; name others with "
            "--input.",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    tmp_path: Path, flags: Callable[[Path], list[str]], sentence: str, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "input"
    folder.mkdir()
    assert prepare(tmp_path / "data", *flags(folder)) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"adacc prepare-data: error: {sentence.format(folder=folder)}"
    assert said.out == ""
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["input"]


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("name", ["notes", "dataset.json", "file"])
def test_what_is_not_ours_is_left_alone(
    texts: Path, tmp_path: Path, name: str, force: list[str], capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "data"
    if name == "file":
        output.write_text("precious")
    else:
        output.mkdir()
        (output / name).write_text('{"kind": "another"}')
    before = output.read_bytes() if name == "file" else files(output)
    assert prepare(output, "--input", str(texts), *force) == 2
    error = capsys.readouterr().err
    if name == "file":
        assert error == (
            f"adacc prepare-data: error: --output {output} is a file: name a folder that is new, empty, or made by "
            "this command.\n"
        )
    else:
        assert error == (
            f"adacc prepare-data: error: --output {output} is not empty and was not made by this command, so it is "
            "left alone: name a folder that is new or empty.\n"
        )
    assert (output.read_bytes() if name == "file" else files(output)) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "texts"]


def test_a_strangers_file_in_our_folder_is_not_deleted(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "data"
    shutil.copytree(made, output)
    (output / "my notes").write_text("precious")
    assert prepare(output, "--input", str(made.parent / "texts"), "--force") == 2
    assert capsys.readouterr().err == (
        f"adacc prepare-data: error: --output {output} also holds my notes, which this command did not write and "
        "would delete: move it elsewhere, or name another folder.\n"
    )
    assert (output / "my notes").read_text() == "precious"


def test_a_mount_point_is_refused(texts: Path, capsys: pytest.CaptureFixture[str]):
    mounts = [Path(path) for path in ("/dev/shm", "/sys/fs/cgroup", "/dev/pts", "/proc") if Path(path).is_mount()]
    empty = [path for path in mounts if not any(path.iterdir())]
    if not empty:
        pytest.skip("needs an empty mount point")
    assert prepare(empty[0], "--input", str(texts)) == 2
    assert "is a mount point, which cannot be put in place as a whole" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "(No space left on device): free some space or choose another folder."),
        (errno.EROFS, "(Read-only file system): choose another folder."),
    ],
)
def test_a_full_or_read_only_device_is_one_sentence(
    texts: Path,
    tmp_path: Path,
    number: int,
    advice: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(prepare_data, "write", fail)
    assert prepare(tmp_path / "data", "--input", str(texts)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"adacc prepare-data: error: --output {tmp_path / 'data'} cannot be written {advice}"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["texts"]


def test_a_write_that_the_system_refuses_is_one_sentence(texts: Path, tmp_path: Path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    process = start(tmp_path / "data", "--input", str(texts), preexec_fn=limit)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert error.splitlines()[-1] == (
        f"adacc prepare-data: error: --output {tmp_path / 'data'} cannot be written (File too large): choose another "
        "folder."
    )
    assert "Traceback" not in error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["texts"]
