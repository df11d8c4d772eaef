"""The thread that shows that a worker lives, for every shard it holds, and notices what it has lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from drafthouse.errors import StoreError
from drafthouse.store import Board, Lease


class Heartbeat:
    """Beats for all held leases every quarter of the time to live.

    A beat that fails is tried again with the next round: an outage shorter than the time to live costs
    nothing, a longer one costs double work and never wrong output.
    """

    def __init__(self, board: Board, device: str) -> None:
        self._board = board
        self._device = device
        self._held: dict[Lease, int] = {}
        self._lost: set[Lease] = set()
        self._beating = threading.Lock()  # held around every beat, so that a dropped lease is never beaten again
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def hold(self, lease: Lease) -> None:
        """Beat for this lease from now on."""
        with self._beating:
            self._held[lease] = 0

    def report(self, lease: Lease, tokens: int) -> None:
        """Let the next beats say how many tokens of the shard are captured."""
        if lease in self._held:
            self._held[lease] = tokens

    def drop(self, lease: Lease, then: Callable[[Lease], None] | None = None) -> None:
        """Stop beating for this lease, and call `then` with it; a lease that is not held any more is left
        alone."""
        with self._beating:
            if self._held.pop(lease, None) is not None and then is not None:
                then(lease)

    def lost(self, lease: Lease) -> bool:
        """True when somebody else has taken over or finished the shard."""
        return lease in self._lost

    @property
    def held(self) -> list[Lease]:
        """The leases that are beaten for."""
        return list(self._held)

    @property
    def captured(self) -> dict[Lease, int]:
        """The same leases with the tokens that are captured of their shards."""
        return dict(self._held)

    def _run(self) -> None:
        while not self._stop.wait(self._board.ttl_s / 4):
            for lease in self.held:
                with self._beating:
                    if lease in self._held and lease not in self._lost:
                        self._beat(lease)

    def _beat(self, lease: Lease) -> None:
        body = {"shard": lease.shard, "tokens": self._held[lease], "device": self._device}
        try:
            self._board.heartbeat(lease, body)
            if self._board.lost(lease):
                self._lost.add(lease)
        except StoreError:
            return
