"""One process a folder, for those that would write the same files; the lock ends with its process, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafthouse.errors import ConfigError
from drafthouse.store.translate import explain


@contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold `folder` (made when needed) for this process; `what` says in a message what is done in it.

    Raises:
        ConfigError: another process holds it.
        StoreError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise explain(error, str(folder)) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process {what} in this folder", where=str(folder), fix="wait for it, or stop it first"
            ) from None
        yield
    finally:
        os.close(descriptor)
