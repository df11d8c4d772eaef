"""What a disk refuses while a corpus is made, as one sentence; and files that appear at once and whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from drafthouse.errors import StoreError
from drafthouse.store.translate import explain


@contextmanager
def told(where: Path) -> Iterator[None]:
    """Tell what the operating system refuses inside as one sentence about `where`.

    Raises:
        StoreError: the disk is full or read-only, or something is in the way.
    """
    try:
        yield
    except OSError as error:
        sentence = explain(error, str(where))
        if sentence.fix is None:
            reason = error.strerror or sentence.what
            sentence = StoreError(f"cannot be used ({reason})", where=str(where), fix="choose another folder")
        raise sentence from error


class Parts:
    """Files that are written beside their places and moved there together; none of them is left behind half-written.

    The names are this process' own: one that outlives the run that started it cannot cut off the files of the next.
    """

    def __init__(self) -> None:
        self._open: dict[Path, IO[bytes]] = {}

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Move the files to their places, in the order in which they were begun; after an error, remove them."""
        try:
            if kind is None:
                for file in self._open.values():
                    file.close()
                for path in self._open:
                    part_of(path).replace(path)
        finally:
            for path, file in self._open.items():
                with suppress(OSError):  # what is still buffered may find the disk as full as the rest did
                    file.close()
                part_of(path).unlink(missing_ok=True)

    def begin(self, path: Path) -> IO[bytes]:
        """A file to write, which will be `path`."""
        self._open[path] = part_of(path).open("wb")
        return self._open[path]


def part_of(path: Path) -> Path:
    """Where this process writes what will be `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def sweep(folder: Path) -> None:
    """Remove what killed processes left half-written; only whoever holds the folder may."""
    for path in folder.glob("*.part"):
        path.unlink(missing_ok=True)
