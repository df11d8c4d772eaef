"""One background thread that publishes checkpoints while the training goes on: newest wins, memory and disk bounded."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drafthouse.errors import StoreError

RETRY_S = 5.0
# Failures in a row after which the end of a run does not wait any longer: each has its own retries already.
LAST_TRIES = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parcel:
    """Files of one step that wait for their upload, in a folder that belongs to nobody else."""

    step: int
    folder: Path

    @property
    def files(self) -> dict[str, Path]:
        return {path.name: path for path in sorted(self.folder.iterdir())}


class Uploader:
    """Publishes parcels one after the other. A parcel that waits gives way to a newer one.

    The files are hard links, so a checkpoint may be removed from its own place while it is uploaded; at most two
    (one on its way, one waiting) take space beside those that the training keeps.

    Args:
        folder: for parcels; what an earlier process has left there is removed.
        publish: uploads and commits one parcel.
        retry_s: pause after a failed upload.
    """

    def __init__(self, folder: Path, publish: Callable[[Parcel], None], retry_s: float = RETRY_S) -> None:
        self._folder, self._publish, self._retry_s = folder, publish, retry_s
        self._waiting: Parcel | None = None
        self._closing = False
        self._failures = 0
        self._failure: BaseException | None = None
        self._names = itertools.count()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)

    def start(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._thread.start()

    def offer(self, step: int, files: Mapping[str, Path], growing: Mapping[str, Path]) -> None:
        """Have `files` (name -> path) published as those of `step`; does not wait for that.

        Args:
            growing: further files, which others append to: they are copied as they are now.

        Raises:
            OSError: the disk is full or not writable.
        """
        parcel = Parcel(step, self._folder / str(next(self._names)))
        parcel.folder.mkdir(parents=True)
        for name, path in files.items():
            _link(path, parcel.folder / name)
        for name, path in growing.items():
            shutil.copyfile(path, parcel.folder / name)
        with self._changed:
            overtaken, self._waiting = self._waiting, parcel
            self._changed.notify_all()
        if overtaken is not None:
            shutil.rmtree(overtaken.folder, ignore_errors=True)

    def check(self) -> None:
        """Raise what ended the uploads for good: FencedError, or an error that is none of the store's."""
        if self._failure is not None and not isinstance(self._failure, StoreError):
            raise self._failure

    def close(self) -> None:
        """Wait until everything that was offered is published.

        Raises:
            FencedError: the job was moved elsewhere: what was not published yet is given up.
            StoreError: the store failed time and again: the newest parcel is not published.
        """
        with self._changed:
            self._closing, self._failures = True, 0
            self._changed.notify_all()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._failure is not None:
            raise self._failure

    def abandon(self, patience_s: float = 5.0) -> None:
        """Give up what waits. What is on its way is given `patience_s` seconds, and is then left behind."""
        with self._changed:
            self._waiting, self._closing, self._failures = None, True, LAST_TRIES
            self._changed.notify_all()
        self._thread.join(patience_s)
        if not self._thread.is_alive():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while (parcel := self._next()) is not None:
            try:
                self._publish(parcel)
            except StoreError as error:
                if not self._again(parcel, error):
                    return
            except BaseException as error:
                self._failure = error
                return
            else:
                self._failure, self._failures = None, 0
                shutil.rmtree(parcel.folder, ignore_errors=True)

    def _next(self) -> Parcel | None:
        with self._changed:
            while self._waiting is None and not self._closing:
                self._changed.wait()
            parcel, self._waiting = self._waiting, None
            return parcel

    def _again(self, parcel: Parcel, error: StoreError) -> bool:
        """Put a parcel that failed back, unless a newer one waits; False when it is time to give up."""
        _log.warning("the checkpoint of step %d is not stored yet: %s", parcel.step, error)
        with self._changed:
            self._failure, self._failures = error, self._failures + 1
            if not self._over():
                self._changed.wait(self._retry_s)
            if self._over():
                return False
            overtaken = parcel if self._waiting else None
            self._waiting = self._waiting or parcel
        if overtaken is not None:
            shutil.rmtree(overtaken.folder, ignore_errors=True)
        return True

    def _over(self) -> bool:
        return self._closing and self._failures >= LAST_TRIES


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, to)
