"""Who a process is when the fleet started it: the job, which of its lives this is, the node, the job's store.

A job that moves leaves its old life behind, perhaps running on a node that nobody reaches. Every life therefore has
an epoch, and asks the fence in the job's store whether its own still counts.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drafthouse.errors import ConfigError
from drafthouse.store import Fence, FencedError, Store

JOB, EPOCH, NODE, STORE = "DRAFTHOUSE_JOB", "DRAFTHOUSE_EPOCH", "DRAFTHOUSE_NODE", "DRAFTHOUSE_JOB_STORE"
FENCED = "DRAFTHOUSE_FENCED"
FENCE_EVERY_S = 5.0

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class JobContext:
    """What the environment of a job says.

    Attributes:
        job: its name.
        epoch: which of its lives this is, counted from 1.
        node: name of the node, as the inventory has it.
        store_url: where the job keeps what must survive the node; None: it has no store of its own.
        fenced: the file that tells this life's runtime not to start it again; None: nobody reads one.
    """

    job: str
    epoch: int
    node: str
    store_url: str | None
    fenced: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobContext | None:
        """The job that this process belongs to; None outside of one (DRAFTHOUSE_JOB is not set).

        Raises:
            ConfigError: the job's name or epoch is none, or its node has no name.
        """
        job = environment.get(JOB)
        if not job:
            return None
        if not _NAME.fullmatch(job):
            raise _wrong(JOB, job, "not the name of a job")
        epoch = environment.get(EPOCH, "")
        if not _NUMBER.fullmatch(epoch):
            raise _wrong(EPOCH, epoch, "not an epoch, which is a number from 1 on")
        node = environment.get(NODE, "").strip()
        if not node:
            raise _wrong(NODE, node, "not the name of a node")
        fenced = environment.get(FENCED)
        return cls(job, int(epoch), node, environment.get(STORE) or None, Path(fenced) if fenced else None)

    def store(self, own: Store) -> Store:
        """The job's store; `own`, that of the run, when the job names none."""
        return Store.open(self.store_url) if self.store_url else own

    def watch(self, own: Store) -> FenceWatch:
        """Asks whether this life still counts."""
        return FenceWatch(Fence(self.store(own), self.job), self.epoch, word=self.fenced)


class FenceWatch:
    """Call it as often as you like: it asks the store at once the first time, then at most every `every_s` seconds.

    The exit status of a life that is over (`FencedError.exit_code`) may never reach the runtime: torchrun ends with 1,
    whatever its workers ended with. So the file `word` is left, too, before anybody is told.

    Raises:
        FencedError: (when called) the job was moved elsewhere.
        StoreError: (when called) the store cannot be asked; the next call asks again.
    """

    def __init__(self, fence: Fence, epoch: int, every_s: float = FENCE_EVERY_S, *, word: Path | None = None) -> None:
        self.fence, self.epoch = fence, epoch
        self._every_s, self._word = every_s, word
        self._asked: float | None = None
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._asked is None or time.monotonic() - self._asked >= self._every_s:
                self.now()

    def now(self) -> None:
        """Ask, whenever that was done last."""
        try:
            self.fence.check(self.epoch)
        except FencedError as error:
            self._leave_word(str(error))
            raise
        self._asked = time.monotonic()

    def _leave_word(self, sentence: str) -> None:
        if self._word is not None:
            with suppress(OSError):  # then the exit status alone has to tell it
                self._word.write_text(f"{sentence}\n", encoding="utf-8")


def _wrong(name: str, value: str, what: str) -> ConfigError:
    return ConfigError(
        f"{name}='{value[:60]}' is {what}",
        where="the environment",
        fix="start jobs with `fab deploy`, or unset DRAFTHOUSE_JOB",
    )
