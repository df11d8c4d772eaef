"""Files that a server on this node writes for its askers: which of them belong to workers that are dead.

A server goes on with what a killed worker had asked for, and its files stay, often in memory. So every batch of
requests has a number, which stands in the ids of its requests and thereby in the names of the server's files; and as
long as the batch is waited for, its worker holds a lock (flock) on a file of that number beside them. What has a number
that nobody holds is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drafthouse.errors import StatesError

_HELD, _UNFINISHED = ".worker", ".part"
# A request's id is `plugins.sglang_states.OURS`; engines put words of their own around it.
_OURS = re.compile(r"drafthouse-([0-9a-f]{12})(?:[0-9a-f]{20}|\.worker$)")


@contextmanager
def asking(folder: Path, unfinished_s: float) -> Iterator[Callable[[], str]]:
    """Ids for requests whose files the server writes to `folder`, from the block's beginning to its end; removes what
    dead workers' requests have left there first.

    Args:
        unfinished_s: age from which on a file that is still being written is taken for abandoned. The server would
            stumble over one that it is about to rename, and drop what others wait for.

    Raises:
        StatesError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number, held = _number(folder)
    except OSError as error:
        raise StatesError(
            f"the server's folder cannot be written to ({error.strerror or error})",
            where=str(folder),
            fix="run this on the server's node, as a user who may write there",
        ) from None
    try:
        _sweep(folder, unfinished_s)
        yield lambda: f"drafthouse-{number}{secrets.token_hex(10)}"
    finally:
        _place(folder, number).unlink(missing_ok=True)
        os.close(held)


def _place(folder: Path, number: str) -> Path:
    return folder / f"drafthouse-{number}{_HELD}"


def _number(folder: Path) -> tuple[str, int]:
    """A new number, and the descriptor that holds its lock."""
    while True:
        number = secrets.token_hex(6)
        held = os.open(_place(folder, number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.fstat(held).st_nlink:
            return number, held
        os.close(held)  # another worker took it for abandoned, between the making of the file and its lock


def _sweep(folder: Path, unfinished_s: float) -> None:
    # Listed before anybody is asked whether he lives: files of a number come after its lock.
    found: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        if match := _OURS.search(path.name):
            found.setdefault(match[1], []).append(path)
    for number, paths in found.items():
        if _lives(_place(folder, number)):
            continue
        for path in paths:
            with suppress(FileNotFoundError, PermissionError):  # another worker sweeps, too
                if path.suffix != _UNFINISHED or time.time() - path.stat().st_mtime > unfinished_s:
                    path.unlink()


def _lives(place: Path) -> bool:
    try:
        held = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to open
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        place.unlink(missing_ok=True)  # while it is locked: who has just made it sees that it is gone
    except OSError:
        return True
    finally:
        os.close(held)
    return False
