"""Back-pressure: bounded bytes in memory, and no new shard while a disk is nearly full."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path


class ByteBudget:
    """How many bytes may wait to be written. `take` blocks the producer until there is room."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waited_s = 0.0
        self._used = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def take(self, count: int) -> None:
        """Reserve `count` bytes. More than the whole limit is granted when nothing else is in use.

        Raises:
            The error that `fail` was called with: then nothing will ever be given back.
        """
        begin = time.monotonic()
        with self._changed:
            while self._failure is None and self._used and self._used + count > self.limit:
                self._changed.wait()
            self.waited_s += time.monotonic() - begin
            if self._failure is not None:
                raise self._failure
            self._used += count

    def give_back(self, count: int) -> None:
        """Return what was taken."""
        with self._changed:
            self._used -= count
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make this and every later `take` raise `error`; the first one stays."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of `fail`, if there was one."""
        with self._changed:
            if self._failure is not None:
                raise self._failure


class DiskGuard:
    """Says when to stop taking on work because a disk fills up, and when to go on (with hysteresis).

    Args:
        folders: what is written to; folders that do not exist yet count as their nearest existing parent.
        high: fraction of a disk in use from which on `full` says so.
        low: fraction that all disks must fall to before it stops saying so.
        usage: (used, free) bytes of a folder's disk.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        high: float,
        low: float,
        usage: Callable[[Path], tuple[int, int]] | None = None,
    ) -> None:
        self._folders = folders
        self._high, self._low = high, low
        self._usage = usage or _usage
        self._stopped = False

    def full(self) -> tuple[Path, float] | None:
        """The fullest folder and the fraction in use while work must wait, otherwise None."""
        fractions = []
        for folder in self._folders:
            used, free = self._usage(folder)
            fractions.append((used / max(1, used + free), folder))
        fraction, folder = max(fractions, key=lambda pair: pair[0])
        self._stopped = fraction > self._low if self._stopped else fraction >= self._high
        return (folder, fraction) if self._stopped else None


def _usage(folder: Path) -> tuple[int, int]:
    while not folder.exists():
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    return disk.used, disk.free
