"""`adacc prepare-data`: what Megatron reads back, what is refused, and what a killed run leaves."""

import errno
import functools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_adacc import atomic, cli
from megatron_adacc.megatron import prepare_data, text_dataset

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


def megatron_tokenizer(output: Path, **changes: object):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = SimpleNamespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(output / "tokenizer"),
        metadata_path=None,
        chat_template=None,
        vocab_file=None,
        merge_file=None,
        special_tokens=None,
        tokenizer_hf_no_use_fast=False,
        tokenizer_hf_no_include_special_tokens=False,
        trust_remote_code=False,
        pad_vocab_size=True,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        rank=0,
    )
    for name, value in changes.items():
        setattr(args, name, value)
    return build_tokenizer(args), args


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


# What Megatron reads


def test_megatron_reads_back_exactly_what_the_files_hold(made: Path):
    tokenizer, _ = megatron_tokenizer(made)
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


def test_megatron_loads_the_tokenizer_without_a_network(made: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection was tried: {arguments}")

    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setattr(socket.socket, "connect", refuse)
    tokenizer, args = megatron_tokenizer(made)
    assert (tokenizer.eod, tokenizer.eos, tokenizer.bos, tokenizer.pad) == (0, 0, 0, 1)
    assert tokenizer.vocab_size == VOCAB
    assert args.padded_vocab_size == 384
    # In a prompt the end of a document is one token, unlike in a document.
    assert tokenizer.tokenize("<|endoftext|>") == [0]


@pytest.mark.parametrize("include_special", [True, False])
def test_source_text_survives_megatrons_tokenizer(made: Path, include_special: bool):
    tokenizer, _ = megatron_tokenizer(made, tokenizer_hf_no_include_special_tokens=not include_special)
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()[:20_000]
    assert tokenizer.detokenize(tokenizer.tokenize(source)) == source


@functools.cache
def cached_tokenizer(output: Path):
    return megatron_tokenizer(output)[0]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_megatrons_tokenizer(made: Path, text: str):
    tokenizer = cached_tokenizer(made)
    ids = tokenizer.tokenize(text)
    assert all(0 <= token < VOCAB for token in ids)
    assert tokenizer.detokenize(ids) == text


def test_the_number_of_tokens_decides_the_type_of_the_ids(tmp_path: Path):
    for vocab_size, name, itemsize in ((65_499, "uint16", 2), (65_500, "int32", 4)):
        ids = np.array([1, vocab_size - 1, 0], dtype=np.int32)
        prefix = tmp_path / str(vocab_size) / "text_document"
        prefix.parent.mkdir()
        assert text_dataset.write(prefix, [ids, ids[1:]], vocab_size) == (5, name)
        assert prefix.with_suffix(".bin").stat().st_size == 5 * itemsize
        assert [document.tolist() for document in read_back(prefix.parent)] == [ids.tolist(), ids[1:].tolist()]


def test_a_long_document_is_encoded_in_batches_and_stays_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_dataset, "_BATCH_CHARS", 1000)
    monkeypatch.setattr(text_dataset, "pieces", lambda text: [text[at : at + 300] for at in range(0, len(text), 300)])
    tokenizer = text_dataset.train_tokenizer(["ab " * 50], VOCAB)
    texts = ["long " * 1000, "short", "x" * 299, "y" * 1200]
    documents = list(text_dataset.encode(iter(texts), tokenizer))
    assert [tokenizer.decode(ids[:-1].tolist()) for ids in documents] == texts
    assert [int(ids[-1]) for ids in documents] == [0] * 4


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
    tokenizer = cached_tokenizer(tmp_path / "data")
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
    tokenizer, _ = megatron_tokenizer(tmp_path / "data")
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
    assert cached_tokenizer(tmp_path / "data").vocab_size == 260
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


# What a second run does


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A data set of tmp_path/texts that may be changed."""
    shutil.copytree(made.parent / "texts", tmp_path / "texts")
    assert prepare(tmp_path / "data", "--input", str(tmp_path / "texts")) == 0
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


def test_a_second_writer_waits_and_finds_the_work_done(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    output = tmp_path / "data"
    with atomic.sole_writer(output):
        process = start(output, "--input", str(made.parent / "texts"))
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
    assert len(read_back(output)) == len(TEXTS)
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
