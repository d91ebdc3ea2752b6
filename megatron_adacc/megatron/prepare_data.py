"""`adacc prepare-data`: from text files to a tokenizer and a data set that Megatron trains on.

The folder DIR that it writes appears whole, in one rename, and holds

    DIR/tokenizer/           for --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR/tokenizer
    DIR/text_document.bin    for --data-path DIR/text_document
    DIR/text_document.idx
    DIR/dataset.json         what it was made from, so that the same command has nothing to do

The same options and files give the same bytes. Options other than those that DIR was made with are refused
without --force; files that have changed since mean that DIR is made anew.
"""

import argparse
import errno
import hashlib
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_adacc import atomic
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.documents import (
    Corpus,
    Skipped,
    Source,
    find_sources,
    printable,
    signature,
    standard_library,
    standard_library_name,
)
from megatron_adacc.megatron.text_dataset import (
    EOD_ID,
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    PAD_ID,
    encode,
    save_tokenizer,
    train_tokenizer,
    write,
)

KIND = "megatron-adacc text data set"
# To be raised when other bytes come out of the same options and files.
FORMAT_VERSION = 1
MANIFEST = "dataset.json"
PREFIX = "text_document"
TOKENIZER = "tokenizer"
# Megatron keeps its sample indices in a folder named like the prefix. They go when the data set is replaced,
# as they must: Megatron looks them up by the path of the data set, not by what is in it.
_WRITTEN = frozenset({MANIFEST, f"{PREFIX}.bin", f"{PREFIX}.idx", TOKENIZER, PREFIX})
# Megatron's default --split is 969,30,1 and it rounds: of fewer documents, none are left for the test set, and
# megatron-core 0.19.2 counts the epochs of an empty set for ever (GPTDataset._get_num_epochs).
_ENOUGH_FOR_DEFAULT_SPLIT = 501
_ENOUGH_FOR_VALIDATION = 10


@dataclass(frozen=True)
class Options:
    """What decides the content, besides the files: real paths of the inputs (None: the standard library)."""

    inputs: tuple[str, ...] | None
    vocab_size: int
    seed: int
    json_key: str

    def as_json(self) -> dict[str, Any]:
        """As they come back from a manifest: JSON has lists for tuples."""
        values = asdict(self)
        return {**values, "inputs": None if self.inputs is None else list(self.inputs)}

    def sha256(self) -> str:
        """Hash of the options as canonical JSON."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    """One data set to be made: where, how, and of which files; `source` says in words where they are from."""

    output: Path
    options: Options
    source: str
    files: tuple[Source, ...]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `adacc prepare-data`."""
    parser.description = (
        "Train a byte-level BPE tokenizer on text files and write them as a Megatron data set: one document a "
        "file, or a line of JSON. Documents are shuffled, because Megatron takes its training, validation and "
        "test sets from the beginning, middle and end. Does nothing if DIR holds this data set already."
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make: new, empty, or made before")
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="text files and folders of them, in UTF-8; .jsonl and .json files have a document a line; hidden "
        "files in folders are left out (default: the source of Python's standard library, some 10 MB)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=8192, metavar="N", help="entries of the tokenizer (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="seed of the order of the documents (default: %(default)s)"
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="key of the text in a line of JSON (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="make DIR anew, whatever data set it holds")


def run(args: argparse.Namespace) -> int:
    """Make the data set, or find that it is there; returns 0.

    Raises:
        UserError: an argument is out of range, there are no documents, or DIR is not ours to write.
    """
    console = Console(stderr=True)
    skipped = Skipped()
    request = _request(args, skipped)
    output = request.output
    try:
        manifest = _read_manifest(output)
        if manifest is not None and not args.force and _why_stale(request, manifest) is None:
            sys.stdout.write(f"{output} is complete already, from the same options and files.\n")
        else:
            _check_replaceable(output)
            output.resolve().parent.mkdir(parents=True, exist_ok=True)
            with atomic.sole_writer(output, on_wait=lambda: _say(console, f"Waiting for another writer of {output}.")):
                manifest = _make(request, args.force, skipped, console)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"--output {output} cannot be written ({error.strerror or error}): "
            f"{'free some space or ' if full else ''}choose another folder."
        ) from error
    prefix, tokenizer = (shlex.quote(printable(str(output / name))) for name in (PREFIX, TOKENIZER))
    split = _split_flags(manifest["documents"])
    sys.stdout.write(
        f"{_count(manifest['documents'], 'document')}, {decimal(manifest['bytes'])} of text, "
        f"{manifest['tokens']:,} tokens, {manifest['vocab_size']:,} tokenizer entries. Train on it with\n"
        f"  --data-path {prefix} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
        f"{' ' if split else ''}{split}\n"
    )
    return 0


def _request(args: argparse.Namespace, skipped: Skipped) -> Request:
    if not MIN_VOCAB_SIZE <= args.vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size {args.vocab_size} is out of range: it must be from {MIN_VOCAB_SIZE} (256 bytes and 2 "
            f"special tokens) to {MAX_VOCAB_SIZE}."
        )
    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed {args.seed} is out of range: it must be from 0 to {2**32 - 1}.")
    inputs, source = None, standard_library_name()
    if args.input is None:
        files = standard_library(skipped)
    else:
        files = find_sources(args.input, args.output, skipped)
        inputs = tuple(os.path.realpath(top) for top in args.input)
        source = ", ".join(args.input)
    return Request(Path(args.output), Options(inputs, args.vocab_size, args.seed, args.json_key), source, tuple(files))


def _read_manifest(output: Path) -> dict[str, Any] | None:
    """The manifest in `output`; None where there is nothing, and a UserError where there is something else."""
    if not output.exists():
        return None
    if not output.is_dir():
        raise UserError(f"--output {output} is a file: name a folder that is new, empty, or made by this command.")
    if not any(output.iterdir()):
        return None
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise UserError(
            f"--output {output} is not empty and was not made by this command, so it is left alone: "
            "name a folder that is new or empty."
        )
    return manifest


def _why_stale(request: Request, manifest: dict[str, Any]) -> str | None:
    """Why the data set in DIR is not the requested one, with the same options; None if it is.

    Raises:
        UserError: it was made with other options.
    """
    wanted, found = request.options.as_json(), manifest.get("options")
    if found != wanted:
        found = found if isinstance(found, dict) else {}
        different = ", ".join(
            f"--{name.removesuffix('s').replace('_', '-')}" for name in wanted if found.get(name) != wanted[name]
        )
        raise UserError(
            f"--output {request.output} holds a data set made with another {different}: give --force to replace it, "
            "or another --output."
        )
    if manifest.get("format_version") != FORMAT_VERSION:
        return "it was made by another version of this command"
    if manifest.get("inputs_sha256") != signature(request.files):
        return "its input files have changed"
    if not _is_whole(request.output, manifest):
        return "files in it are missing or damaged"
    return None


def _is_whole(output: Path, manifest: dict[str, Any]) -> bool:
    try:
        return all((output / name).stat().st_size == size for name, size in manifest["files"].items())
    except FileNotFoundError:
        return False


def _check_replaceable(output: Path) -> None:
    if _read_manifest(output) is not None:
        foreign = sorted(entry.name for entry in output.iterdir() if entry.name not in _WRITTEN)
        if foreign:
            raise UserError(
                f"--output {output} also holds {printable(foreign[0])}, which this command did not write and would "
                "delete: move it elsewhere, or name another folder."
            )
    if output.resolve().is_mount():
        raise UserError(
            f"--output {output} is a mount point, which cannot be put in place as a whole: name a folder inside it, "
            f"such as {output / 'dataset'}."
        )


def _make(request: Request, force: bool, skipped: Skipped, console: Console) -> dict[str, Any]:
    """The manifest of the data set in DIR, made now unless the writer that we waited for has made it."""
    manifest = _read_manifest(request.output)
    if manifest is not None and not force:
        reason = _why_stale(request, manifest)
        if reason is None:
            return manifest
        _say(console, f"{request.output} is made anew: {reason}.")
    _check_replaceable(request.output)
    with atomic.atomic_folder(request.output) as folder:
        return _build(request, folder, skipped, console)


def _build(request: Request, folder: Path, skipped: Skipped, console: Console) -> dict[str, Any]:
    """Write everything into `folder` and return the manifest."""
    options = request.options
    corpus = Corpus(request.files, options.json_key, skipped)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bytes_in_files = sum(file.size_bytes for file in request.files)
        _say_plainly(
            console,
            f"Reading {_count(len(request.files), 'file')} ({decimal(bytes_in_files)}) of {printable(request.source)}.",
        )
        reading = progress.add_task("Reading text", total=bytes_in_files)

        def in_order() -> Iterator[str]:
            yield from corpus.scan(lambda done: progress.advance(reading, done))
            progress.update(reading, description="Learning tokens", total=None)

        tokenizer = train_tokenizer(in_order(), options.vocab_size)
        progress.remove_task(reading)
        _report_skipped(skipped, console)
        if len(corpus) == 0:
            raise UserError(
                f"There are no documents: none of the {len(request.files)} files of {printable(request.source)} "
                "has text in UTF-8 to offer; name others with --input."
            )
        vocab_size = tokenizer.get_vocab_size()
        if vocab_size < options.vocab_size:
            _say(
                console,
                f"The text is too small for {options.vocab_size:,} tokenizer entries: there are {vocab_size:,}. "
                "Megatron pads its own vocabulary, so nothing needs to change.",
            )
        if split := _split_flags(len(corpus)):
            _say(
                console,
                f"Megatron splits by documents and hangs on an empty part, which {_count(len(corpus), 'document')} "
                f"cannot avoid under its default --split: use {split}, or give more files.",
            )
        save_tokenizer(tokenizer, folder / TOKENIZER)

        _say_plainly(console, f"Writing {_count(len(corpus), 'document')} with {vocab_size:,} tokenizer entries.")
        writing = progress.add_task("Writing tokens", total=sum(map(corpus.length, range(len(corpus)))))

        def shuffled() -> Iterator[str]:
            # RandomState, because numpy promises that its permutations never change.
            for document in np.random.RandomState(options.seed).permutation(len(corpus)).tolist():
                yield corpus.read(document)
                progress.advance(writing, corpus.length(document))

        tokens, dtype = write(folder / PREFIX, encode(shuffled(), tokenizer), vocab_size)
    manifest = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "source": request.source,
        "options": options.as_json(),
        "options_sha256": options.sha256(),
        "inputs_sha256": signature(request.files),
        "documents": len(corpus),
        "tokens": tokens,
        "bytes": corpus.text_bytes,
        "vocab_size": vocab_size,
        "eod_id": EOD_ID,
        "pad_id": PAD_ID,
        "dtype": dtype,
        "skipped": dict(sorted(skipped.counts.items())),
        "files": {
            str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
        },
        "versions": {name: importlib.metadata.version(name) for name in ("megatron-core", "tokenizers")},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def _report_skipped(skipped: Skipped, console: Console) -> None:
    total = skipped.counts.total()
    if total == 0:
        return
    _say(console, f"Skipped {total:,} files and lines: {skipped.summary()}.")
    for line in skipped.first:
        _say(console, f"  {line}")
    if total > len(skipped.first):
        _say(console, f"  and {total - len(skipped.first):,} more")


def _split_flags(documents: int) -> str:
    """The flags that keep Megatron from an empty validation or test set; "" where its defaults do."""
    if documents >= _ENOUGH_FOR_DEFAULT_SPLIT:
        return ""
    return "--split 9,1,0" if documents >= _ENOUGH_FOR_VALIDATION else "--split 1,0,0 --eval-iters 0"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _say(console: Console, message: str) -> None:
    # Names of files are neither markup nor to be wrapped.
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def _say_plainly(console: Console, message: str) -> None:
    """What a progress bar shows where there is one."""
    if not console.is_terminal:
        _say(console, message)
