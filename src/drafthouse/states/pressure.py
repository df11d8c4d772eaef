"""Back-pressure: bounded bytes in memory, and no new shard while a disk is nearly full."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Reason = Literal["disk", "memory", "uploads", "leases"]


class Waiting:
    """What holds a worker's own thread up, for other threads to read: a full disk, too many bytes that wait to be
    written, too many shards that wait for their upload, or nothing to claim but what others hold."""

    def __init__(self) -> None:
        self.reason: Reason | None = None

    @contextmanager
    def on(self, reason: Reason) -> Iterator[None]:
        """Say so while the block runs."""
        before, self.reason = self.reason, reason
        try:
            yield
        finally:
            self.reason = before


class ByteBudget:
    """How many bytes may wait to be written. `take` blocks the producer until there is room."""

    def __init__(self, limit: int, waiting: Waiting | None = None) -> None:
        self.limit = limit
        self._waiting = waiting or Waiting()
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
            if self._over(count):
                with self._waiting.on("memory"):
                    while self._over(count):
                        self._changed.wait()
            self.waited_s += time.monotonic() - begin
            if self._failure is not None:
                raise self._failure
            self._used += count

    def _over(self, count: int) -> bool:
        return self._failure is None and self._used > 0 and self._used + count > self.limit

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
    """Says when to stop taking on work because a file system fills up, and when to go on (with hysteresis).

    File systems in memory (/dev/shm, any tmpfs) have limits of their own: what they hold is taken from the
    processes, and a full one ends in the kernel's out-of-memory killer.

    A fraction alone says little: a tenth of a large disk may hold the whole run many times over. So one with `enough`
    bytes free is not full, whatever the fraction.

    Args:
        folders: what is written to; folders that do not exist yet count as their nearest existing parent.
        high: fraction of a file system in use from which on work waits.
        low: fraction that it must fall to before work goes on.
        memory_high, memory_low: the same for file systems in memory; none: as for the others.
        enough: bytes free with which a file system is not full, see `room_for`; none: the fractions alone decide.
        usage: (used, free) bytes of a folder's file system.
        available: bytes of memory that processes may still take; in memory no more than that is free.
        in_memory: whether a folder's file system lies in memory.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        high: float,
        low: float,
        *,
        memory_high: float | None = None,
        memory_low: float | None = None,
        enough: int | None = None,
        usage: Callable[[Path], tuple[int, int]] | None = None,
        available: Callable[[], int] | None = None,
        in_memory: Callable[[Path], bool] | None = None,
    ) -> None:
        self._folders = folders
        self._disk = (high, low)
        self._memory = (high if memory_high is None else memory_high, low if memory_low is None else memory_low)
        self._enough = enough
        self._usage = usage or _usage
        self._available = available or _available
        self._in_memory = in_memory or _in_memory
        self._stopped = False

    def full(self) -> tuple[Path, float] | None:
        """The folder that is furthest over its limit and the fraction in use, while work must wait; otherwise None.

        Once work waits, every folder must fall to its lower limit before it goes on.
        """
        over = []
        for folder in self._folders:
            used, free = self._usage(folder)
            fraction = used / max(1, used + free)
            high, low = self._limits(folder)
            if (fraction > low if self._stopped else fraction >= high) and not self._suffices(folder, free):
                over.append((fraction - high, fraction, folder))
        self._stopped = bool(over)
        if not over:
            return None
        _, fraction, folder = max(over, key=lambda found: found[0])
        return folder, fraction

    def limit(self, folder: Path) -> float:
        """The fraction in use from which on work waits for this folder."""
        return self._limits(folder)[0]

    def _suffices(self, folder: Path, free: int) -> bool:
        if self._enough is None:
            return False
        return (min(free, self._available()) if self._in_memory(folder) else free) >= self._enough

    def _limits(self, folder: Path) -> tuple[float, float]:
        return self._memory if self._in_memory(folder) else self._disk


def room_for(run_bytes: int) -> int:
    """Bytes free with which a file system is not full for a run of `run_bytes`: twice the run (unfinished shards may
    lie beside those in the store, or beside those of somebody else) and 1 GiB for everybody else."""
    return 2 * run_bytes + 2**30


def _usage(folder: Path) -> tuple[int, int]:
    disk = shutil.disk_usage(_existing(folder))
    return disk.used, disk.free


def _available() -> int:
    """MemAvailable of proc(5) meminfo; 0 where that is not known, so that the fractions decide."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _in_memory(folder: Path) -> bool:
    device = _existing(folder).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False  # not Linux: nothing is known, and a disk's limits are the milder ones
    # Fields: id, parent, major:minor, …, "-", type, source, options (proc(5)).
    return any(
        fields[2] == number and fields[fields.index("-") + 1] in {"tmpfs", "ramfs"} for fields in map(str.split, mounts)
    )


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
