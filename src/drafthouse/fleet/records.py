"""What the fleet remembers about its jobs: a chain of lives, as objects that are created once and never changed.

    lives/<job>/<epoch>   begun: where, what, by whom, in place of which life
    live/<job>/<epoch>    it has shown that it works (the gate's evidence)
    ends/<job>/<epoch>    it is over: retired, stopped, failed, lost

A life is one epoch of a job on one node. Because nothing is overwritten, two operators cannot both begin the same
epoch, and a record that was read once stays true. The page and `fab status` read the same objects, also when every
node is gone.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from types import NoneType
from typing import Any, Literal, get_args

from drafthouse.errors import FleetError, StoreError
from drafthouse.fleet.runtime.protocol import unit_name
from drafthouse.store import DamagedObjectError, Store
from drafthouse.store.body import LARGEST, from_body, to_body
from drafthouse.store.keys import numbered

Outcome = Literal["retired", "stopped", "failed", "lost", "finished"]
_READERS = 16
_AGAIN_S = 0.2
"""Records never change, so what cannot be read is asked for once more: it may have been a bad answer."""


@dataclass(frozen=True)
class Life:
    """How one life of a job began.

    Attributes:
        job, epoch: whose life, and its number, counted from 1 over all nodes.
        node: name of the node in the inventory.
        kind: extract, train, serve or command.
        runtime: "docker" or "process".
        image: of the container, by digest; None for a process.
        digest: of the job file as it was resolved.
        spec: that job file (secrets by name only).
        action: what the operator did: deploy, migrate, recover, rollback.
        replaces: the epoch in whose place it was begun; None for a first life.
        who: the operator, for people.
        grace_s: seconds that it is given to end.
    """

    job: str
    epoch: int
    node: str
    kind: str
    runtime: str
    image: str | None
    digest: str
    spec: dict[str, Any] = field(repr=False)
    action: str
    replaces: int | None
    who: str
    grace_s: float

    @property
    def unit(self) -> str:
        """Its name on the node."""
        return unit_name(self.job, self.epoch)


@dataclass(frozen=True)
class LifeState:
    """A life and what became of it. Times are the store's own.

    `status`: "starting" (begun, the gate not passed), "live", or the outcome of its end.
    """

    life: Life
    begun: datetime
    evidence: str | None = None
    live_since: datetime | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    ended: datetime | None = None

    @property
    def status(self) -> str:
        return self.outcome or ("live" if self.live_since else "starting")

    @property
    def open(self) -> bool:
        return self.outcome is None


@dataclass(frozen=True)
class Reading:
    """What the records say, and what of them cannot be read: one of them says nothing against the others.

    Attributes:
        lives: oldest epoch first.
        unreadable: (job, epoch) of a life that is there -> why nothing can be said of it.
    """

    lives: list[LifeState]
    unreadable: dict[tuple[str, int], StoreError]


class Records:
    """The lives of all jobs in the fleet's store."""

    def __init__(self, store: Store) -> None:
        self.objects = store

    def begin(self, life: Life) -> None:
        """Declare a life. From here on its epoch is used, whatever happens to it.

        Raises:
            FleetError: somebody else began that epoch: two operators act on one job.
        """
        token = secrets.token_hex(8)  # two operators may begin equal lives: only one of them did
        if not self.objects.create(_key("lives", life.job, life.epoch), to_body({**asdict(life), "token": token})):
            raise FleetError(
                f"epoch {life.epoch} of '{life.job}' was begun by somebody else",
                where=self.objects.url,
                fix="see `fab status`, then try again",
            )

    def mark_live(self, job: str, epoch: int, evidence: str) -> None:
        """The life has passed its gate. Repeating it changes nothing."""
        self.objects.create(_key("live", job, epoch), to_body({"evidence": evidence}))

    def end(self, job: str, epoch: int, outcome: Outcome, reason: str) -> None:
        """The life is over. The first end counts: a life that was lost is not retired later."""
        self.objects.create(_key("ends", job, epoch), to_body({"outcome": outcome, "reason": reason}))

    def lives(self, job: str | None = None) -> list[LifeState]:
        """All lives (of one job), oldest epoch first: for decisions, which have to know all of them.

        Raises:
            StoreError: one of them cannot be read.
        """
        reading = self.read(job)
        for error in reading.unreadable.values():
            raise error
        return reading.lives

    def read(self, job: str | None = None) -> Reading:
        """The lives (of one job) that can be read, and those that cannot: for whoever only looks.

        Raises:
            StoreError: the store cannot be asked what there is.
        """
        found = self._listed(job)
        keys = sorted(found["lives"])

        def read(key: tuple[str, int]) -> LifeState | StoreError:
            try:
                return self._state(key, found)
            except StoreError as error:
                return error

        with ThreadPoolExecutor(_READERS) as pool:
            states = dict(zip(keys, pool.map(read, keys), strict=True))
        return Reading(
            [state for state in states.values() if not isinstance(state, StoreError)],
            {key: state for key, state in states.items() if isinstance(state, StoreError)},
        )

    def _listed(self, job: str | None) -> dict[str, dict[tuple[str, int], datetime]]:
        wanted = "" if job is None else f"/{job}"
        found: dict[str, dict[tuple[str, int], datetime]] = {}
        for name in ("ends", "live", "lives"):  # the beginnings last: an end without a beginning is not seen
            found[name] = {
                (match[1], int(match[2])): info.last_modified
                for info in self.objects.list(f"{name}{wanted}")
                if (match := re.fullmatch(rf"{name}/([^/]+)/(\d+)", info.key))
            }
        return found

    def next_epoch(self, job: str) -> int:
        """The number of the life that would be begun next."""
        return 1 + max((epoch for _, epoch in self._listed(job)["lives"]), default=0)

    def current(self, job: str) -> LifeState | None:
        """The life that counts: the newest that works, else the newest that is not over; None when there is none."""
        return current_of(self.lives(job))

    def on_node(self, node: str, job: str | None = None) -> list[LifeState]:
        """The lives (of one job) that are not over on a node: what a migration has to move. Records of other jobs than
        the one that is named need not be readable."""
        return [state for state in self.lives(job) if state.open and state.life.node == node]

    def _state(self, key: tuple[str, int], found: dict[str, dict[tuple[str, int], datetime]]) -> LifeState:
        job, epoch = key
        begun = found["lives"][key]
        life = self._life(key)
        live = self._said(_key("live", job, epoch), "evidence") if key in found["live"] else {}
        end = self._said(_key("ends", job, epoch), "outcome", "reason") if key in found["ends"] else {}
        return LifeState(
            life=life,
            begun=begun,
            evidence=live.get("evidence"),
            live_since=found["live"].get(key),
            outcome=end.get("outcome"),
            reason=end.get("reason"),
            ended=found["ends"].get(key),
        )

    def _life(self, place: tuple[str, int]) -> Life:
        key = _key("lives", *place)
        body = self._body(key)
        body.pop("token", None)
        life: Life | None = None
        with suppress(TypeError):  # other fields than a life's
            life = Life(**body)
        if life is None or not _is_life(life) or (life.job, life.epoch) != place:
            raise self._odd(key, "of a life")
        return life

    def _said(self, key: str, *names: str) -> dict[str, Any]:
        """A record of what became of a life, whose fields are texts."""
        body = self._body(key)
        outcome = body.get("outcome")
        if not all(isinstance(body.get(name), str) for name in names) or outcome not in {None, *get_args(Outcome)}:
            raise self._odd(key, "of what became of a life")
        return body

    def _odd(self, key: str, what: str) -> DamagedObjectError:
        where = f"{self.objects.url}/{key}"
        return DamagedObjectError(f"this is not the record {what}", where=where, fix="see who else writes there")

    def _body(self, key: str) -> dict[str, Any]:
        where = f"{self.objects.url}/{key}"
        try:
            return from_body(self.objects.get(key, most=LARGEST), where)
        except StoreError:
            time.sleep(_AGAIN_S)
            return from_body(self.objects.get(key, most=LARGEST), where)


def _is_life(life: Life) -> bool:
    """Whether its fields are of the types that `begin` writes: JSON keeps no promise about them."""
    texts = (life.job, life.node, life.kind, life.runtime, life.digest, life.action, life.who)
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(life.image, str | None)
        and type(life.epoch) is int
        and type(life.replaces) in {int, NoneType}
        and isinstance(life.spec, dict)
        and type(life.grace_s) in {int, float}
        and math.isfinite(life.grace_s)
    )


def current_of(lives: list[LifeState]) -> LifeState | None:
    """The life of one job that counts, out of all its lives. One that is only starting does not count while another
    still works: a migration that fails leaves the old one in its place."""
    open_lives = [state for state in lives if state.open]
    working = [state for state in open_lives if state.live_since is not None]
    return next(reversed(working or open_lives), None)


def newest_before(lives: list[LifeState], epoch: int) -> Iterator[LifeState]:
    """Lives that were live at some time before `epoch`, newest first: what a rollback can go back to."""
    for state in reversed(lives):
        if state.life.epoch < epoch and state.live_since is not None:
            yield state


def _key(kind: str, job: str, epoch: int) -> str:
    return f"{kind}/{job}/{numbered(epoch)}"
