"""A lock that one operator holds at a time, of create-only objects: nothing is deleted, so nothing races.

Turn n is taken by creating ``lock/<name>/<n>`` and given back by creating ``unlock/<name>/<n>``; turn n + 1 can be
taken only after that. A lock whose holder has died stays taken until somebody breaks it, which is giving its turn
back for it. A holder that was given up is told when it looks (`Held.lost`) or ends; what must stop at once is
fenced besides (`store.fence`).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Self

from drafthouse.errors import StoreError
from drafthouse.store.body import from_body, to_body
from drafthouse.store.keys import check_key, number_of, numbered
from drafthouse.store.objects import Store

_TRIES = 8  # turns that may pass between looking and taking


@dataclass(frozen=True)
class Holder:
    """Who has turn `turn` (counted from 1), for what, and since when by the store's clock."""

    turn: int
    who: str
    action: str
    since: datetime


class Lock:
    """The lock `name` of a store.

    Args:
        store: where the fleet keeps its records; it must honour conditional puts (`Store.probe`).
        name: one key segment.
        breaking: how an operator breaks it (a command), for the sentence of whoever finds it taken; none: by the
            object that gives the turn back.
    """

    def __init__(self, store: Store, name: str, *, breaking: str | None = None) -> None:
        if "/" in name:
            raise StoreError(f"the lock's name '{name}' holds a '/'", fix="use one word")
        self.name = name
        self._turns = store.child(f"lock/{check_key(name)}")
        self._ends = store.child(f"unlock/{name}")
        self._breaking = breaking

    def holder(self) -> Holder | None:
        """Who holds the lock now, or None."""
        turn = self._newest()
        return self._holder(turn) if turn and not self._ended(turn) else None

    def acquire(self, who: str, action: str) -> Held:
        """Take the lock, or fail at once; the result is a context manager that gives it back.

        Args:
            who: the operator, for others to ask.
            action: what it is held for.

        Raises:
            StoreError: somebody holds it: says who, for what, since when, and how to break it.
        """
        token = secrets.token_hex(16)
        body = to_body({"who": who, "action": action, "token": token})
        for _ in range(_TRIES):
            turn = self._newest()
            if turn and not self._ended(turn):
                raise self._taken(self._holder(turn))
            if self._turns.create(numbered(turn + 1), body):
                return Held(self, turn + 1, who, token)
        raise StoreError(
            f"the lock '{self.name}' went from hand to hand {_TRIES} times meanwhile",
            where=self._turns.url,
            fix="try again when the others are through",
        )

    def breaks(self, reason: str, who: str, turn: int | None = None) -> Holder | None:
        """Give the lock back for a holder that has died; returns whom it was taken from.

        Args:
            reason: why, for the record.
            who: the operator that breaks it.
            turn: break only this turn (of a `Holder` that somebody has looked at), not its successor's.

        None when nobody holds it, when `turn` is over, or when it was given back meanwhile.
        """
        holder = self.holder()
        if holder is None or turn not in {None, holder.turn}:
            return None
        end = {"broken_by": who, "reason": reason, "token": secrets.token_hex(16)}
        return holder if self._end(holder.turn, end) else None

    def _newest(self) -> int:
        return max((number_of(info.key) or 0 for info in self._turns.list()), default=0)

    def _ended(self, turn: int) -> bool:
        return self._ends.head(numbered(turn)) is not None

    def _end(self, turn: int, body: dict[str, str]) -> bool:
        return self._ends.create(numbered(turn), to_body(body))

    def _how_it_ended(self, turn: int) -> str:
        body = from_body(self._ends.get(numbered(turn)), f"{self._ends.url}/{numbered(turn)}")
        return f"broken by {body.get('broken_by', 'somebody')} ({body.get('reason', 'no reason given')})"

    def _holder(self, turn: int) -> Holder:
        where = f"{self._turns.url}/{numbered(turn)}"
        body = from_body(self._turns.get(numbered(turn)), where)
        info = self._turns.head(numbered(turn))
        if info is None:
            raise StoreError("a turn that was taken is not there", where=where, fix="see who deletes there")
        return Holder(turn, str(body.get("who")), str(body.get("action")), info.last_modified)

    def _taken(self, holder: Holder) -> StoreError:
        breaking = self._breaking or f"create the object {self._ends.url}/{numbered(holder.turn)}"
        return StoreError(
            f"the lock '{self.name}' is held by {holder.who} for '{holder.action}' since"
            f" {holder.since.isoformat(timespec='seconds')} (turn {holder.turn})",
            where=self._turns.url,
            fix=f"wait until it is given back; when its holder is dead, break it: {breaking}",
        )


class Held:
    """A lock that is held: give it back with `release`, or leave the `with` block."""

    def __init__(self, lock: Lock, turn: int, who: str, token: str) -> None:
        self.turn = turn
        self._lock = lock
        # Always the same bytes: releasing again, after an answer was lost, finds its own object.
        self._end = {"released_by": who, "token": token}
        self._released = False

    def lost(self) -> bool:
        """True when somebody has broken the lock: look before each step that others must not interfere with."""
        return not self._released and self._lock._ended(self.turn)

    def release(self) -> None:
        """Give the lock back; a second time does nothing.

        Raises:
            StoreError: somebody has broken it meanwhile: says who and why.
        """
        if self._released:
            return
        mine = self._lock._end(self.turn, self._end)
        self._released = True
        if not mine:
            raise StoreError(
                f"the lock '{self._lock.name}' was {self._lock._how_it_ended(self.turn)} while this held it",
                where=self._lock._turns.url,
                fix="look at what was done by both",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except StoreError:
            if error is None:  # otherwise that one is what has to be told
                raise
