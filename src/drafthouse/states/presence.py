"""What a worker says of itself for people who look: an object of its own, written over every few seconds.

It stands beside the leases and decides nothing. So it costs no shard anything, and who holds none is seen too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch

from drafthouse.errors import DrafthouseError, StoreError
from drafthouse.gpu import read_gpu, uuid_of
from drafthouse.states.pressure import Waiting
from drafthouse.store import Board, FencedError

EVERY_S = 15.0
"""One small put a worker in this time, or four in a time to live that is shorter."""
CHANGED_S = 2.0
"""A new reason to wait is told sooner."""
_JOIN_S = 5.0


class Presence:
    """Tells the board what `worker` does, from its own thread; a context manager around its work.

    A store that does not answer costs nothing but the news. An ending by an error is told and stays to be read.

    Args:
        about: what never changes (node, ...).
        now: what it does now; asked at every telling.
    """

    def __init__(
        self,
        board: Board,
        worker: str,
        device: torch.device,
        waiting: Waiting,
        about: Mapping[str, Any],
        now: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._board, self._worker, self._waiting, self._now = board, worker, waiting, now
        self._uuid = uuid_of(device)
        self._about = {**about, "device": str(device), "ttl_s": board.ttl_s}
        self._every_s = min(EVERY_S, board.ttl_s / 4)
        self._stop = threading.Event()
        self._telling = threading.Lock()  # held around every word, so that nothing is told behind the last one
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def __enter__(self) -> Presence:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)  # the driver's library may hang with a broken driver
        try:
            with self._telling:
                if isinstance(error, Exception) and not isinstance(error, FencedError):
                    self._board.present(self._worker, {**self._about, **self._now(), "failed": reason_of(error)})
                else:
                    self._board.absent(self._worker)
        except StoreError:
            return  # it will be taken for one that was killed

    def _run(self) -> None:
        told: str | None = None
        due = time.monotonic()
        while not self._stop.is_set():
            now, waiting = time.monotonic(), self._waiting.reason
            if now >= due or (waiting != told and now >= due - self._every_s + CHANGED_S):
                due, told = now + self._every_s, waiting
                self._tell(waiting)
            self._stop.wait(min(self._every_s, CHANGED_S) / 2)

    def _tell(self, waiting: str | None) -> None:
        found = None if self._uuid is None else read_gpu(self._uuid)
        gpus = [] if found is None else [found.as_dict()]
        with self._telling, suppress(StoreError):
            if not self._stop.is_set():  # the driver's library may have taken long
                self._board.present(self._worker, {**self._about, **self._now(), "waiting": waiting, "gpus": gpus})


def reason_of(error: BaseException) -> str:
    """The sentence of an error that ended a worker."""
    return str(error) if isinstance(error, DrafthouseError) else f"{type(error).__name__}: {error}"
