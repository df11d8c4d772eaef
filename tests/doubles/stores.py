"""Test doubles of `Store`: a clock that tests move, and operations that tests let happen one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from drafthouse.store import ObjectInfo, Store

Hook = Callable[[str], None]


class Clock:
    """A server's clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.written: dict[str, datetime] = {}

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class ClockStore(Store):
    """A store (memory, best) whose times come from a `Clock` instead of the machine."""

    clock: Clock
    on_operation: Hook | None = None

    @classmethod
    def over(cls, store: Store, clock: Clock, on_operation: Hook | None = None) -> ClockStore:
        """The same objects as `store`; `on_operation` is called before every single request."""
        made = cls(store._backend, store._prefix)
        made.clock, made.on_operation = clock, on_operation
        return made

    def child(self, prefix: str) -> ClockStore:
        return ClockStore.over(super().child(prefix), self.clock, self.on_operation)

    def server_time(self) -> datetime:
        self._request("server_time")
        return self.clock.now

    def get(self, key: str, *, most: int | None = None) -> bytes:
        self._request(f"get {key}")
        return super().get(key, most=most)

    def put(self, key: str, data: bytes) -> None:
        self._request(f"put {key}")
        super().put(key, data)
        self._stamp(key)

    def create(self, key: str, data: bytes) -> bool:
        self._request(f"create {key}")
        # Straight to the parent's request: its read back is part of one atomic step here.
        hook, self.on_operation = self.on_operation, None
        try:
            created = super().create(key, data)
        finally:
            self.on_operation = hook
        if created:
            self._stamp(key)
        return created

    def upload(self, key: str, path: Path) -> ObjectInfo:
        self._request(f"upload {key}")
        super().upload(key, path)
        self._stamp(key)
        return ObjectInfo(key, path.stat().st_size, self.clock.now)

    def head(self, key: str) -> ObjectInfo | None:
        self._request(f"head {key}")
        info = super().head(key)
        return None if info is None else self._timed(info)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._request(f"list {prefix}")
        return [self._timed(info) for info in super().list(prefix)]

    def delete(self, key: str) -> None:
        self._request(f"delete {key}")
        super().delete(key)

    def _request(self, what: str) -> None:
        if self.on_operation is not None:
            self.on_operation(what)

    def _stamp(self, key: str) -> None:
        self.clock.written[self._key(key)] = self.clock.now

    def _timed(self, info: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(info.key, info.size, self.clock.written.get(self._key(info.key), self.clock.now))


class Crash(BaseException):
    """The process dies here. A BaseException, so that no handler for errors can save it."""


class Stepper:
    """Runs a function in a thread and lets it make one request to its store at a time.

    `due` names the request that waits; `step` lets it happen and returns when the next one is due or the
    function has ended; `crash` kills the function in front of its next request.
    """

    def __init__(self, work: Callable[[Hook], Any]) -> None:
        self._go, self._due = threading.Semaphore(0), threading.Semaphore(0)
        self._dead = False
        self.finished = False
        self.due = ""
        self.result: Any = None
        self.error: BaseException | None = None
        self.log: list[str] = []
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._due.acquire()

    def step(self) -> None:
        if not self.finished:
            self._go.release()
            self._due.acquire()

    def run_to(self, request: str) -> bool:
        """Go on until a request that begins with `request` is due; False when the function ended before."""
        while not self.finished and not self.due.startswith(request):
            self.step()
        return not self.finished

    def run(self) -> None:
        """Go on to the end."""
        while not self.finished:
            self.step()

    def crash(self) -> None:
        if not self.finished:
            self._dead = True
            self.step()
        self._thread.join()

    def _gate(self, what: str) -> None:
        self.due = what
        self._due.release()
        self._go.acquire()
        if self._dead:
            raise Crash
        self.log.append(what)

    def _run(self, work: Callable[[Hook], Any]) -> None:
        try:
            self.result = work(self._gate)
        except Crash:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.finished, self.due = True, ""
            self._due.release()
