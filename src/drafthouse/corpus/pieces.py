"""Where records lie, cut into pieces that processes read side by side and that memory always holds.

A JSON Lines file is cut by bytes (a piece begins behind the first line break at or after its start), a Parquet
file is one piece that is read batch by batch, a generated source is cut by index.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthouse.errors import CorpusError

PIECE_BYTES = 8 * 2**20
PIECE_RECORDS = 8192
_READ = 2**20
_BATCH_ROWS = 256
_LONGEST_RECORD = 64 * 2**20  # bytes
_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".json", ".parquet")


@dataclass(frozen=True)
class Piece:
    """Records [first, last) of one source: bytes of a JSON Lines file, indices of a generated one, or a whole file."""

    source: int
    path: str
    first: int
    last: int


@dataclass(frozen=True)
class Raw:
    """A record as it lies there, and where: `at` is a line's byte, a row or an index."""

    at: int
    value: Any
    problem: str | None = None
    text: str = ""


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
        CorpusError: the file cannot be read, is no Parquet file, or its reader is not installed.
    """
    path = Path(piece.path)
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path)
        elif name.endswith(".json"):
            yield from _array(path)
        elif name.endswith(".gz"):
            with gzip.open(path, "rb") as file:
                at = 0
                for line in file:
                    yield from _line(at, line)
                    at += len(line)
        else:
            yield from _lines(path, piece.first, piece.last)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CorpusError(f"cannot be read ({reason})", where=str(path), fix="fetch the file again") from None


def _lines(path: Path, first: int, last: int) -> Iterator[Raw]:
    with path.open("rb") as file:
        at = first
        if first:
            file.seek(first - 1)
            at = first - 1 + len(file.readline())  # the line across the border belongs to the piece before
        while at < last:
            line = file.readline()
            if not line:
                return
            yield from _line(at, line)
            at += len(line)


def _line(at: int, line: bytes) -> Iterator[Raw]:
    if not line.strip():
        return
    try:
        yield Raw(at, json.loads(line))
    except (ValueError, RecursionError) as error:
        yield Raw(at, None, f"not JSON ({error})", line[:400].decode("utf-8", "replace").strip())


def _array(path: Path) -> Iterator[Raw]:
    """The elements of a JSON array, one at a time; a broken one ends the file, for nobody knows where it ends."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8", errors="replace") as file:
        buffer, number, inside = "", 0, False
        while True:
            chunk = file.read(_READ)
            buffer += chunk
            while True:
                buffer = buffer.lstrip(" \t\r\n,") if inside else buffer.lstrip("\ufeff \t\r\n")
                if not inside:
                    if not buffer:
                        break
                    if buffer[0] != "[":
                        yield Raw(0, None, "the file is no JSON array", buffer[:400])
                        return
                    buffer, inside = buffer[1:], True
                    continue
                if buffer.startswith("]"):
                    return
                if not buffer:
                    break
                try:
                    value, end = decoder.raw_decode(buffer)
                except (ValueError, RecursionError) as error:
                    if chunk and len(buffer) < _LONGEST_RECORD:
                        break  # it goes on in the next chunk
                    yield Raw(number, None, f"not JSON ({error})", buffer[:400])
                    return
                if end == len(buffer) and chunk:
                    break  # a number may go on
                yield Raw(number, value)
                buffer, number = buffer[end:], number + 1
            if not chunk:
                if buffer or not inside:
                    yield Raw(number, None, "the array does not end", buffer[:400])
                else:
                    yield Raw(number, None, "the array does not end", "")
                return


def _is_parquet(path: Path) -> bool:
    magic = b"PAR1"
    with path.open("rb") as file:
        begins = file.read(len(magic)) == magic
        size = file.seek(0, os.SEEK_END)
        if size < 3 * len(magic):
            return False
        file.seek(-len(magic), os.SEEK_END)
        return begins and file.read() == magic


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
    try:
        for batch in read_parquet(str(path), batch_size=_BATCH_ROWS):
            names = batch.schema.names
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield Raw(at, dict(zip(names, row, strict=True)))
                at += 1
    except Exception as error:  # the reader's own exceptions share no base but this one
        if isinstance(error, (CorpusError, OSError, MemoryError)):
            raise
        raise CorpusError(f"not a readable Parquet file ({error})", where=str(path), fix="fetch it again") from None
