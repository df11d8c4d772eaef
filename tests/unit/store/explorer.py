"""Every order in which a few programs can make their store requests, and what the store holds at each moment.

A program is an ordinary function over a `Store`. To take a step it is run again from its beginning: what it has asked
before is answered from its record, its next request happens, and at the one after that it is left. So a state is a
value (what the store holds, what each program was told), states that were met before are met once, and all orders are
tried. A crash needs no step of its own: a program that has died is one that is never run again, so whatever holds in
every state with all programs left alone holds after a crash between any two requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from drafthouse.store import ObjectInfo, ObjectMissingError, Store

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
Note = Callable[[str], None]
Program = Callable[[Store, Note], None]
Objects = dict[str, tuple[bytes, datetime]]


class Left(BaseException):
    """The program is left before its next request. A BaseException, so that no handler for errors sees it."""


@dataclass
class Tape:
    """What the store holds, what a program was told so far, and how many further requests it may make."""

    objects: Objects
    now: datetime
    answers: list[Any] = field(default_factory=list)
    live: int | None = None
    cursor: int = 0


class ModelStore(Store):
    """A store as a dictionary; its answers come from a tape first."""

    tape: Tape

    @classmethod
    def over(cls, tape: Tape, prefix: str = "") -> ModelStore:
        made = cls(Store.open("memory://model")._backend, prefix)
        made.tape = tape
        return made

    def child(self, prefix: str) -> ModelStore:
        return ModelStore.over(self.tape, self._full(prefix))

    def get(self, key: str, *, most: int | None = None) -> bytes:
        def ask() -> bytes | None:
            return self.tape.objects[self._key(key)][0] if self._key(key) in self.tape.objects else None

        body = self._answer(ask)
        if body is None:
            raise ObjectMissingError("there is no such object", where=key)
        return bytes(body)

    def put(self, key: str, data: bytes) -> None:
        self._answer(lambda: self.tape.objects.update({self._key(key): (data, self.tape.now)}))

    def create(self, key: str, data: bytes) -> bool:
        def ask() -> bool:
            created = self.tape.objects.setdefault(self._key(key), (data, self.tape.now))
            return created[0] == data

        return bool(self._answer(ask))

    def head(self, key: str) -> ObjectInfo | None:
        def ask() -> ObjectInfo | None:
            found = self.tape.objects.get(self._key(key))
            return None if found is None else ObjectInfo(key, len(found[0]), found[1])

        found: ObjectInfo | None = self._answer(ask)
        return found

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        def ask() -> tuple[ObjectInfo, ...]:
            inside, cut = self._full(prefix), len(self._prefix) + 1 if self._prefix else 0
            return tuple(
                ObjectInfo(key[cut:], len(body), when)
                for key, (body, when) in sorted(self.tape.objects.items())
                if not inside or key.startswith(f"{inside}/")
            )

        return list(self._answer(ask))

    def delete(self, key: str) -> None:
        def ask() -> None:
            self.tape.objects.pop(self._key(key), None)

        self._answer(ask)

    def server_time(self) -> datetime:
        when: datetime = self._answer(lambda: self.tape.now)
        return when

    def _answer(self, ask: Callable[[], Any]) -> Any:
        tape = self.tape
        if tape.cursor == len(tape.answers):
            if tape.live is not None:
                if tape.live == 0:
                    raise Left
                tape.live -= 1
            tape.answers.append(ask())
        tape.cursor += 1
        return tape.answers[tape.cursor - 1]


@dataclass(frozen=True)
class Life:
    """A program in a state: what it was told, what it has noted, whether it has come to its end."""

    answers: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    ended: bool = False


@dataclass(frozen=True)
class State:
    """What the store holds (key, body, time), what time it is, and how far each program is."""

    objects: frozenset[tuple[str, bytes, datetime]]
    now: datetime
    lives: tuple[Life, ...]
    ticks: int

    @property
    def notes(self) -> list[str]:
        return [note for life in self.lives for note in life.notes]

    def store(self) -> ModelStore:
        """The store as it is now, for whoever looks or comes after: changes stay outside this state."""
        return ModelStore.over(self.tape())

    def tape(self, answers: Sequence[Any] = (), live: int | None = None) -> Tape:
        return Tape({key: (body, when) for key, body, when in self.objects}, self.now, list(answers), live)


def explore(
    programs: Mapping[str, Program],
    check: Callable[[State, State], None],
    *,
    ticks: int = 0,
    tick: timedelta = timedelta(seconds=1),
    start: Objects | None = None,
) -> int:
    """Call `check` with every step that can happen, as (before, after); returns the number of states.

    Args:
        programs: by name; all begin at once. A program that raises fails the exploration.
        check: raises AssertionError when a step must not be, or leads where nobody may come.
        ticks: how often time may pass, by `tick`, at any moment.
        start: what the store holds at first.
    """
    objects = frozenset((key, body, when) for key, (body, when) in (start or {}).items())
    first = State(objects, BEGIN, tuple(Life() for _ in programs), ticks)
    seen, waiting = {first}, [first]
    while waiting:
        state = waiting.pop()
        following = [
            _step(state, index, name, program)
            for index, (name, program) in enumerate(programs.items())
            if not state.lives[index].ended
        ]
        if state.ticks:
            following.append(State(state.objects, state.now + tick, state.lives, state.ticks - 1))
        for each in following:
            check(state, each)
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return len(seen)


def alone(store: Store, name: str, program: Program) -> list[str]:
    """Run a program to its end over a store; returns its notes."""
    notes: list[str] = []
    _run(store, name, program, notes)
    return notes


def _step(state: State, index: int, name: str, program: Program) -> State:
    life = state.lives[index]
    tape = state.tape(life.answers, live=1)
    notes: list[str] = []
    ended = _run(ModelStore.over(tape), name, program, notes)
    objects = frozenset((key, body, when) for key, (body, when) in tape.objects.items())
    lives = list(state.lives)
    lives[index] = Life(tuple(tape.answers), tuple(notes), ended)
    return State(objects, state.now, tuple(lives), state.ticks)


def _run(store: Store, name: str, program: Program, notes: list[str]) -> bool:
    # Random tokens would make every run different; they only have to differ between programs.
    numbers = itertools.count()
    with patch("secrets.token_hex", lambda _=None: f"{name}-{next(numbers)}"):
        try:
            program(store, notes.append)
        except Left:
            return False
    return True
