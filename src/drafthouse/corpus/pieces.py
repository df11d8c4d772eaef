"""Where records lie, cut into pieces that processes read side by side and that memory always holds.

A JSON Lines file is cut by bytes (a piece begins behind the first line break at or after its start), a Parquet
file is one piece that is read batch by batch, a generated source is cut by index.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthouse.corpus.formats import DECODER, RecordError, decoded
from drafthouse.errors import CorpusError

PIECE_BYTES = 8 * 2**20
PIECE_RECORDS = 8192
_READ = 2**20  # characters
_BATCH_ROWS = 256
_LONGEST_RECORD = 64 * 2**20  # characters
_REASON = 160  # characters of what a reader says: it may hold the bytes that it could not read
_SHOWN = 400  # bytes or characters of a record that is not taken
_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".json", ".parquet")
# The longer marks first: UTF-32's little-endian one begins as UTF-16's does.
_WIDE = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_BLANK, _BETWEEN = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")
_MARKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)
_SCALAR_END = re.compile(r"[,\]}\s]")


@dataclass(frozen=True)
class Piece:
    """Records [first, last) of one source: bytes of a JSON Lines file, indices of a generated one, or a whole file."""

    source: int
    path: str
    first: int
    last: int


@dataclass(frozen=True)
class Raw:
    """A record as it lies there, and where: `at` is a line's byte, a row or an index.

    One that cannot be read has a `problem` in words, the `reason` under which it is counted, and how it begins.
    """

    at: int
    value: Any
    problem: str | None = None
    text: str = ""
    reason: str = "not_json"


def cut_file(source: int, path: Path, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of a file.

    Raises:
        CorpusError: it cannot be read, or its kind is not known.
    """
    name = path.name.lower()
    if not name.endswith(_SUFFIXES):
        raise CorpusError("this kind of file is not read", where=str(path), fix=f"use one of {', '.join(_SUFFIXES)}")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorpusError(
            f"cannot be read ({error.strerror})", where=str(path), fix="check the path of the source"
        ) from None
    if name.endswith((".jsonl", ".ndjson")):
        return [Piece(source, str(path), at, min(at + piece_bytes, size)) for at in range(0, size, piece_bytes)]
    return [Piece(source, str(path), 0, size)]


def cut_range(source: int, count: int, piece_records: int = PIECE_RECORDS) -> list[Piece]:
    """The pieces of a source that is made by index."""
    return [Piece(source, "", at, min(at + piece_records, count)) for at in range(0, count, piece_records)]


def read_piece(piece: Piece) -> Iterator[Raw]:
    """The records of a piece of a file, in order.

    Raises:
        CorpusError: the file cannot be read or is damaged, its encoding is another one, an array is broken, or the
            reader of Parquet is not installed.
    """
    path = Path(piece.path)
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path)
        elif name.endswith(".json"):
            yield from _Array(path)
        elif name.endswith(".gz"):
            yield from _compressed(path)
        else:
            yield from _lines(path, piece.first, piece.last)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CorpusError(f"cannot be read ({reason})", where=str(path), fix="fetch the file again") from None


def check_encoding(head: bytes, path: Path) -> None:
    """Refuse a file whose first bytes are not UTF-8's: its lines would be cut in the middle of characters.

    Raises:
        CorpusError: it begins as UTF-16 or UTF-32 does.
    """
    wide = next((name for mark, name in _WIDE if head.startswith(mark)), None)
    if wide is None and 0 in head[:4]:  # no JSON text begins so, unless its characters are wider than a byte
        wide = "UTF-16 or UTF-32"
    if wide is not None:
        raise CorpusError(
            f"the file is {wide} and not UTF-8 (byte 0)",
            where=str(path),
            fix="write it again as UTF-8, e.g. with iconv",
        )


def _lines(path: Path, first: int, last: int) -> Iterator[Raw]:
    with path.open("rb") as file:
        at = first
        if first:
            file.seek(first - 1)
            at = first - 1 + len(file.readline())  # the line across the border belongs to the piece before
        else:
            check_encoding(file.peek(4), path)
        while at < last:
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield _line(at, line)
            at += len(line)


def _compressed(path: Path) -> Iterator[Raw]:
    with gzip.open(path, "rb") as file:
        check_encoding(file.peek(4), path)
        at = 0
        for line in file:
            if line.strip():
                yield _line(at, line)
            at += len(line)


def _line(at: int, line: bytes) -> Raw:
    try:
        return Raw(at, decoded(line))
    except RecordError as error:
        return Raw(at, None, error.detail, line[:_SHOWN].decode("utf-8", "backslashreplace").strip(), error.reason)


class _Array:
    """The elements of a JSON array, one at a time, with about a chunk of the file in memory.

    An element of other bytes than UTF-8's, or of too many levels, is handed on as a problem: where it ends is known.
    Where an element is no JSON, nobody knows how many records are lost with it, so that is an error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text, self._at, self._behind = "", 0, 0  # what is held, the place in it, characters before it
        self._foreign = self._ended = False

    def __iter__(self) -> Iterator[Raw]:
        with self._path.open("rb") as file:
            check_encoding(file.peek(4), self._path)
            # Other bytes become halves of surrogate pairs, which no UTF-8 holds: so they are found, element by element.
            with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
                yield from self._elements(text)

    def _elements(self, file: io.TextIOWrapper) -> Iterator[Raw]:
        first = self._next(_BLANK, file)
        if first != "[":
            begins = f"begins with {first!r}" if first else "is empty"
            raise self._broken(f"the file {begins} and is no JSON array", self._at, "name it .jsonl if it holds lines")
        self._at += 1
        number = 0
        while (found := self._next(_BETWEEN, file)) != "]":
            if not found:
                raise self._broken(f"the array ends in the midst, behind {number} elements", self._at)
            end, raw = self._element(number, file)
            yield raw
            self._at, number = end, number + 1
        self._at += 1
        if self._next(_BLANK, file):
            raise self._broken(f"something follows the array of {number} elements", self._at)

    def _next(self, skipped: re.Pattern[str], file: io.TextIOWrapper) -> str:
        """The next character that is not skipped, where the place is then; "" at the end of the file."""
        while True:
            match = skipped.match(self._text, self._at)
            assert match is not None, "it may skip nothing"
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(file):
                return ""

    def _element(self, number: int, file: io.TextIOWrapper) -> tuple[int, Raw]:
        """Where the element that begins here ends, and what it is."""
        while True:
            deep = False
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Cut off by the end of the chunk, or broken: read on unless its end can be seen.
                open_, inside = _end_of(self._text, self._at) is None, error.pos - self._at
                if open_ and self._more(file):
                    continue
                longer = f" or longer than {_LONGEST_RECORD} characters" if open_ and not self._ended else ""
                raise self._broken(f"element {number} is not JSON{longer} ({error.msg})", self._at + inside) from None
            except ValueError as error:  # a number of more digits than Python reads
                raise self._broken(f"element {number} is not JSON ({error})", self._at) from None
            except RecursionError:
                seen, deep = _end_of(self._text, self._at), True
                if seen is None:
                    if self._more(file):
                        continue
                    raise self._broken(f"element {number} does not end", self._at) from None
                value, end = None, seen
            if end == len(self._text) and self._more(file):
                continue  # a number may go on
            return end, self._seen(number, value, end, deep)

    def _seen(self, number: int, value: Any, end: int, deep: bool) -> Raw:
        if not (deep or self._foreign):
            return Raw(number, value)
        text = self._text[self._at : end]
        shown = text[:_SHOWN].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        if deep:
            return Raw(number, None, "nested too deeply to be read", shown, "too_deep")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) - 0xDC00
            place = f"character {self._behind + self._at + error.start} is the byte {byte:#04x}"
            return Raw(number, None, f"not UTF-8 ({place})", shown, "not_utf8")
        return Raw(number, value)

    def _more(self, file: io.TextIOWrapper) -> bool:
        """Read a chunk on, and let go of what lies before the place."""
        if self._ended or len(self._text) - self._at > _LONGEST_RECORD:
            return False
        chunk = file.read(_READ)
        self._behind += self._at
        self._text, self._at = self._text[self._at :] + chunk, 0
        self._ended = not chunk
        try:
            chunk.encode()
        except UnicodeEncodeError:
            self._foreign = True
        return bool(chunk)

    def _broken(self, what: str, at: int, fix: str = "mend it or fetch it again") -> CorpusError:
        return CorpusError(what, where=f"{self._path}, character {self._behind + at}", fix=fix)


def _end_of(text: str, at: int) -> int | None:
    """Where the JSON value that begins at `at` ends by its brackets, quotes or commas; None: not in this text."""
    if text[at] not in '[{"':
        match = _SCALAR_END.search(text, at)
        return None if match is None else match.start()
    level = 0
    for match in _MARKS.finditer(text, at):
        mark = match[0]
        if mark in "[{":
            level += 1
        elif mark in "]}":
            level -= 1
        elif mark == '"':
            return None  # a text that does not end here
        if level <= 0:
            return match.end()
    return None


def _is_parquet(path: Path) -> bool:
    magic = b"PAR1"
    with path.open("rb") as file:
        begins = file.read(len(magic)) == magic
        size = file.seek(0, os.SEEK_END)
        if size < 3 * len(magic):
            return False
        file.seek(-len(magic), os.SEEK_END)
        return begins and file.read() == magic


class _Unheard:
    """Blocks without what a panic of the reader's writes to standard error, past Python: it is told as an error."""

    def __init__(self) -> None:
        self._kept, self._nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)

    def __enter__(self) -> None:
        os.dup2(self._nowhere, 2)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 2)

    def close(self) -> None:
        os.close(self._kept)
        os.close(self._nowhere)


def _parquet(path: Path) -> Iterator[Raw]:
    try:
        from arro3.io import read_parquet
    except ImportError:
        raise CorpusError(
            "Parquet files need the package arro3-io", where=str(path), fix="pip install 'drafthouse[corpus]'"
        ) from None
    if not _is_parquet(path):
        # The reader panics on such a file instead of raising.
        raise CorpusError("not a readable Parquet file (no magic number)", where=str(path), fix="fetch it again")
    at = 0
    unheard = _Unheard()
    with closing(unheard):
        try:
            with unheard:
                batches = iter(read_parquet(str(path), batch_size=_BATCH_ROWS))
            while True:
                with unheard:
                    batch = next(batches, None)
                    if batch is None:
                        return
                    names, columns = batch.schema.names, [column.to_pylist() for column in batch.columns]
                for row in zip(*columns, strict=True):
                    yield Raw(at, dict(zip(names, row, strict=True)))
                    at += 1
        except BaseException as error:  # the reader's own exceptions share no base, and its panics are no Exception
            panic = type(error).__name__ == "PanicException"
            if isinstance(error, (CorpusError, OSError, MemoryError)) or not (panic or isinstance(error, Exception)):
                raise
            reason = str(error).splitlines()[0][:_REASON] if str(error) else type(error).__name__
            raise CorpusError(
                f"not a readable Parquet file ({reason})", where=f"{path}, behind row {at}", fix="fetch it again"
            ) from None
