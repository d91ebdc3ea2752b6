"""Documents out of text files, in an order that depends on nothing but the files.

    inputs --find--> sources --scan--> documents (text, and where it stands) --read--> the same text again

A source is one file. Its documents are its lines where the name ends in .jsonl or .json, and otherwise
the file as a whole, whatever its name. Nothing is held in memory but 24 bytes a document: a corpus is read
twice, once to learn its vocabulary and once to be encoded.
"""

import collections
import hashlib
import json
import os
import re
import stat
import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron_adacc.errors import UserError

# Megatron's index counts the tokens of a document in int32. A byte is at most one token, and one is the end.
MAX_DOCUMENT_BYTES = 2**31 - 2
# A binary file gives itself away here, before the rest of it is read.
_HEAD_BYTES = 2**16
_LINE_SUFFIXES = (".jsonl", ".json")
# Folders of the standard library that are no text to learn from: tests, installed packages, caches.
_NO_LIBRARY_CODE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Where a text can be cut so that a byte-level pre-tokenizer cuts there too: before a single space between
# two words, and after a single newline between two lines.
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class Source:
    """One file: its real path, its name in messages, its size, and when it was last changed (ns since 1970)."""

    path: str
    name: str
    size_bytes: int
    mtime_ns: int

    @property
    def has_lines(self) -> bool:
        """Whether each line is a document (JSON lines), and not the file."""
        return self.name.lower().endswith(_LINE_SUFFIXES)


class Skipped:
    """What was left out: how many for each reason, and the first few by name."""

    def __init__(self, named: int = 5) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.first: list[str] = []
        self._named = named

    def add(self, name: str, reason: str, detail: str = "") -> None:
        """Count one file or line as skipped for `reason`; `detail` is shown if it is among the first few."""
        self.counts[reason] += 1
        if len(self.first) < self._named:
            self.first.append(f"{printable(name)}: {reason}{f' ({detail})' if detail else ''}")

    def summary(self) -> str:
        """Such as "3 binary, 1 empty", the most frequent reason first."""
        return ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common())


def printable(name: str) -> str:
    """`name` on one line of valid Unicode: a file may be called anything, newlines and stray bytes included."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def find_sources(inputs: Sequence[str], output: str, skipped: Skipped) -> list[Source]:
    """The files of `inputs`, in the order given and sorted by name within a folder.

    Folders are taken recursively, through symbolic links, without names that begin with a dot and without
    the folder `output`. A file that can be reached twice is taken where it comes first.

    Raises:
        UserError: an input does not exist, or lies in `output`.
    """
    output = os.path.realpath(output)
    sources: list[Source] = []
    seen = {output}
    for top in inputs:
        if not os.path.exists(top):
            raise UserError(f"--input {printable(top)} does not exist: name files or folders that do.")
        real = os.path.realpath(top)
        if os.path.commonpath([real, output]) == output:
            raise UserError(f"--input {printable(top)} lies in the --output folder: choose another --output.")
        paths = _walk(top, seen, skipped, lambda name: not name.startswith(".")) if os.path.isdir(top) else [top]
        sources.extend(_as_sources(paths, "", seen, skipped))
    return sources


def standard_library(skipped: Skipped) -> list[Source]:
    """The Python files of the standard library of the running interpreter, without its tests."""
    top = sysconfig.get_path("stdlib")
    paths = _walk(top, set(), skipped, lambda name: name not in _NO_LIBRARY_CODE)
    return list(_as_sources((path for path in paths if path.endswith(".py")), top, set(), skipped))


def standard_library_name() -> str:
    """What `standard_library` is called in messages and manifests."""
    return f"the standard library of Python {'.'.join(map(str, sys.version_info[:3]))}"


def signature(sources: Iterable[Source]) -> str:
    """SHA-256 over paths, sizes and times of change: another value means that the files have changed."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(os.fsencode(source.path))
        digest.update(f"\0{source.size_bytes}\0{source.mtime_ns}\0".encode())
    return digest.hexdigest()


def pieces(text: str, size: int = 2**18) -> Iterator[str]:
    """`text` in pieces of about `size` characters, which tokenize as the whole does.

    Where there is no such place to cut within another `size` characters, the cut is anywhere: the tokens at
    the seam may then differ, the text that they decode to does not.
    """
    start = 0
    while len(text) - start > 2 * size:
        cut = _CUT.search(text, start + size, start + 2 * size)
        end = cut.start() if cut else start + 2 * size
        yield text[start:end]
        start = end
    yield text[start:]


class Corpus:
    """The documents of `sources`: `scan` finds them, after which `read` gives any of them by its number.

    A document is text in UTF-8 with something besides white space in it; everything else is counted in
    `skipped`. Of a line of JSON, the document is the string under `json_key`.
    """

    def __init__(self, sources: Sequence[Source], json_key: str, skipped: Skipped) -> None:
        self._sources = sources
        self._json_key = json_key
        self._skipped = skipped
        # One entry a document: number of its source, first byte in it, bytes there (of JSON: the line's).
        self._source_of = array("q")
        self._offsets = array("q")
        self._lengths = array("q")
        self.text_bytes = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def length(self, document: int) -> int:
        """Bytes of the document in its file."""
        return self._lengths[document]

    def scan(self, advance: Callable[[int], None]) -> Iterator[str]:
        """The text of each document, from the first to the last; to be run through once.

        `advance` is called with the bytes of each file that are done with.
        """
        for number, source in enumerate(self._sources):
            for offset, length, text in self._lines(source) if source.has_lines else self._file(source):
                self._source_of.append(number)
                self._offsets.append(offset)
                self._lengths.append(length)
                self.text_bytes += len(text.encode("utf-8"))
                yield text
            advance(source.size_bytes)

    def read(self, document: int) -> str:
        """The text of one document, from its file.

        Raises:
            UserError: the file is not what it was when it was scanned.
        """
        source = self._sources[self._source_of[document]]
        length = self._lengths[document]
        try:
            with open(source.path, "rb") as stream:
                status = os.fstat(stream.fileno())
                stream.seek(self._offsets[document])
                raw = stream.read(length)
            unchanged = (status.st_size, status.st_mtime_ns) == (source.size_bytes, source.mtime_ns)
            if unchanged and len(raw) == length:
                return _json(raw)[self._json_key] if source.has_lines else raw.decode("utf-8")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(_changed(source)) from error
        raise UserError(_changed(source))

    def _file(self, source: Source) -> Iterator[tuple[int, int, str]]:
        try:
            with open(source.path, "rb") as stream:
                raw = self._text_bytes(stream, source)
        except OSError as error:
            self._skipped.add(source.name, "unreadable", error.strerror or "")
            return
        if raw is None:
            return
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self._skipped.add(source.name, "not UTF-8", f"byte {error.start}")
            return
        if text.strip():
            yield 0, len(raw), text
        else:
            self._skipped.add(source.name, "empty")

    def _text_bytes(self, stream: BinaryIO, source: Source) -> bytes | None:
        head = stream.read(_HEAD_BYTES)
        if b"\0" not in head:
            if source.size_bytes > MAX_DOCUMENT_BYTES:
                self._skipped.add(source.name, "too large", f"more than {MAX_DOCUMENT_BYTES} bytes")
                return None
            raw = head + stream.read()
            if b"\0" not in raw:
                return raw
        self._skipped.add(source.name, "binary", "NUL bytes")
        return None

    def _lines(self, source: Source) -> Iterator[tuple[int, int, str]]:
        offset, number = 0, 0
        try:
            with open(source.path, "rb") as stream:
                if source.size_bytes == 0:
                    self._skipped.add(source.name, "empty")
                while line := stream.readline(MAX_DOCUMENT_BYTES):
                    number += 1
                    name = f"{source.name} line {number}"
                    length = len(line)
                    if length == MAX_DOCUMENT_BYTES and not line.endswith(b"\n"):
                        while rest := stream.readline(MAX_DOCUMENT_BYTES):
                            length += len(rest)
                            if rest.endswith(b"\n"):
                                break
                        self._skipped.add(name, "too large", f"{MAX_DOCUMENT_BYTES} bytes or more")
                    elif (text := self._line_text(line, name)) is not None:
                        yield offset, length, text
                    offset += length
        except OSError as error:
            self._skipped.add(source.name, "unreadable", error.strerror or "")

    def _line_text(self, line: bytes, name: str) -> str | None:
        if not line.strip():
            return None  # A blank line, such as one at the end, is no mistake.
        try:
            value = _json(line)
        except UnicodeDecodeError as error:
            self._skipped.add(name, "not UTF-8", f"byte {error.start}")
            return None
        except (ValueError, RecursionError) as error:
            self._skipped.add(name, "not JSON", str(error))
            return None
        if not isinstance(value, dict) or self._json_key not in value:
            self._skipped.add(name, "without the key", self._json_key)
            return None
        text = value[self._json_key]
        if not isinstance(text, str):
            self._skipped.add(name, "not a string", f"{self._json_key}: {type(text).__name__}")
            return None
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self._skipped.add(name, "not Unicode", "half of a surrogate pair")
            return None
        if not text.strip():
            self._skipped.add(name, "empty")
            return None
        return text


def _json(line: bytes) -> Any:
    # Decoded here, because json.loads(bytes) guesses at encodings. The first line may begin with a byte order mark.
    return json.loads(line.decode("utf-8-sig"))


def _changed(source: Source) -> str:
    return f"{printable(source.name)} changed while it was being read: run this again when it is complete."


def _walk(top: str, seen: set[str], skipped: Skipped, wanted: Callable[[str], bool]) -> Iterator[str]:
    """The paths of the files under `top`; `seen` holds the real paths of folders, so that loops end."""

    def unreadable(error: OSError) -> None:
        skipped.add(str(error.filename), "unreadable", error.strerror or "")

    def first_visit(path: str) -> bool:
        real = os.path.realpath(path)
        new = real not in seen
        seen.add(real)
        return new

    if not first_visit(top):
        return
    for parent, folders, names in os.walk(top, onerror=unreadable, followlinks=True):
        folders[:] = [name for name in sorted(folders) if wanted(name) and first_visit(os.path.join(parent, name))]
        yield from (os.path.join(parent, name) for name in sorted(names) if wanted(name))


def _as_sources(paths: Iterable[str], top: str, seen: set[str], skipped: Skipped) -> Iterator[Source]:
    """Sources for the regular files among `paths`, named relative to `top` if there is one."""
    for path in paths:
        name = os.path.relpath(path, top) if top else path
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        try:
            status = os.stat(path)
        except OSError as error:
            skipped.add(name, "unreadable", error.strerror or "")
            continue
        if stat.S_ISREG(status.st_mode):
            yield Source(real, name, status.st_size, status.st_mtime_ns)
        else:
            skipped.add(name, "not a regular file")
