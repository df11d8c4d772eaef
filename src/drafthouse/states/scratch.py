"""A directory for unfinished shards that a killed worker cannot leave behind for ever."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafthouse.errors import StatesError
from drafthouse.store.translate import explain

_PREFIX = "drafthouse-states-"
_LOCK = "lock"


@contextmanager
def scratch(parent: str | None) -> Iterator[Path]:
    """A fresh directory under `parent` (none: the system's temporary directory), removed at the end.

    Directories of workers that were killed are removed first: their lock is free then, whoever held it.

    Raises:
        StatesError: `parent` is not a directory.
        StoreError: it cannot be written.
    """
    root = Path(parent or tempfile.gettempdir())
    if not root.is_dir():
        raise StatesError("there is no such directory", where=str(root), fix="create it, or set extract.scratch")
    for rest in root.glob(f"{_PREFIX}*"):
        _remove_if_abandoned(rest)
    try:
        folder, descriptor = _locked_folder(root)
        while not os.fstat(descriptor).st_nlink:
            # Another worker's start took it for abandoned, between the making of the lock and its taking.
            os.close(descriptor)
            folder, descriptor = _locked_folder(root)
    except OSError as error:
        raise explain(error, str(root)) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_folder(root: Path) -> tuple[Path, int]:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return folder, descriptor


def _remove_if_abandoned(folder: Path) -> None:
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return  # not ours to open, or its owner has not locked it yet
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # its worker lives
    finally:
        os.close(descriptor)
