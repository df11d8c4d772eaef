"""The lease protocol: every shard is worked on by whoever holds its newest lease, and its output appears
once.

Objects under ``runs/<run>/``, all written create-only or by a single writer:

    spec.json                               what the run makes; created once
    lease/<shard>/<epoch>                   created; one winner an epoch
    hb/<shard>/<epoch>                      overwritten by the lease's holder only; empty = released
    data/<shard>/<epoch>-<worker>.safetensors   a name that nobody else writes
    done/<shard>                            created; key, size, sha256 of the data that counts
    failed/<shard>/<epoch>                  created by the lease's holder when an error ends its work: why
    workers/<worker>                        overwritten by that worker only, deleted at its end: what it does

The last two are for people who look; nothing is decided by them.

A shard is free when it has neither done-marker nor lease, and stale when the newest sign of life of its
newest lease is older than the time to live, both times by the store's clock. Taking over creates the next
epoch. A holder that was given up (a zombie) may still finish: the first done-marker wins and the loser
deletes its own data. So correctness never rests on the time to live, only the amount of double work does.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

from drafthouse.config import differences
from drafthouse.errors import StatesError, StoreError
from drafthouse.store.body import LARGEST, LARGEST_COUNT, DamagedObjectError, from_body, to_body
from drafthouse.store.keys import check_key, numbered, segment_of
from drafthouse.store.objects import Store
from drafthouse.store.translate import ObjectMissingError

_SPEC = "spec.json"
_READERS = 16  # markers read at once: each is one small request
_LONGEST_REASON = 500  # characters
_QUIET_S = 300.0  # an upload that lives sends a part in less (`backend`: 180 s, and the next is under way)


@dataclass(frozen=True)
class Lease:
    """The right to work on `shard`, until someone takes over with a higher `epoch` (counted from 1)."""

    shard: str
    epoch: int
    worker: str
    token: str


@dataclass(frozen=True)
class Done:
    """A done-marker: the one data object of a shard that counts. `key` is relative to the run, `size` in
    bytes."""

    shard: str
    key: str
    size: int
    sha256: str
    tokens: int
    worker: str
    epoch: int
    token: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardState:
    """Where a shard stands. `epoch` is 0 and `worker` None before the first lease; `age_s` is the time since
    the holder's last sign of life, by the store's clock (leased and stale only); a released lease counts as
    stale."""

    status: Literal["free", "leased", "stale", "done"]
    epoch: int = 0
    worker: str | None = None
    age_s: float | None = None


class Tenure(NamedTuple):
    """A lease as the store lists it. `seen` is its newest sign of life, both times by the store's clock."""

    shard: str
    epoch: int
    begun: datetime
    seen: datetime
    released: bool


@dataclass(frozen=True)
class Survey:
    """What the listings of a run say, without the body of any object.

    Attributes:
        tenures: all leases.
        done: shard -> when its marker was written.
        failed: (shard, epoch) of leases whose holder said why an error ended them -> when.
        workers: worker -> when it last said what it does.
    """

    tenures: tuple[Tenure, ...]
    done: dict[str, datetime]
    failed: dict[tuple[str, int], datetime]
    workers: dict[str, datetime]

    @property
    def newest(self) -> datetime | None:
        """The latest time in it: the store's clock was there already."""
        seen = (tenure.seen for tenure in self.tenures)
        return max((*seen, *self.done.values(), *self.failed.values(), *self.workers.values()), default=None)


class Board:
    """The state of one run in a store: who works on what, and what is done.

    Args:
        store: where runs are kept; it must honour conditional puts (`Store.probe`).
        run: name of the run, one key segment.
        ttl_s: seconds without a heartbeat after which a lease may be taken over. S3 tells time in whole
            seconds, so values below 10 waste work there; they never do harm.
    """

    def __init__(self, store: Store, run: str, *, ttl_s: float = 600.0) -> None:
        if ttl_s <= 0:
            raise StoreError(f"a lease of {ttl_s} seconds is no lease", where=run, fix="set a time to live above 0")
        if "/" in run:
            raise StoreError(f"the run's name '{run}' holds a '/'", fix="use one word")
        self.run = run
        self.ttl_s = ttl_s
        self.objects = store.child(f"runs/{check_key(run)}")
        self._done: dict[str, Done] = {}  # markers never change, so what was read once stays true
        self._lock = threading.Lock()

    def bind(self, spec: Mapping[str, Any]) -> None:
        """Tie the run to `spec` (JSON-able). The first caller binds it, later callers must bring the same.

        Raises:
            StatesError: the run is bound to another spec; names every field that differs.
        """
        mine: Any = json.loads(json.dumps(spec))
        if self.objects.create(_SPEC, json.dumps(mine, sort_keys=True, indent=1).encode()):
            return
        theirs = self._body(_SPEC)
        changes = differences(theirs, mine)
        if changes:
            raise StatesError(
                f"the run '{self.run}' was started with another specification: {'; '.join(changes)}",
                where=self.objects.url,
                fix="use the old values, or choose another run name",
            )

    def spec(self) -> dict[str, Any] | None:
        """The spec that the run is bound to, or None."""
        try:
            return self._body(_SPEC)
        except ObjectMissingError:
            return None

    def claim(self, shards: Sequence[str], worker: str) -> Lease | None:
        """Lease the first of `shards` that is free or stale; None when nothing can be claimed now.

        Workers that come in different orders of `shards` collide less; a collision costs one request.
        """
        worker = segment_of(worker)
        for shard, state in self._look(shards).items():
            if state.status not in {"free", "stale"}:
                continue
            lease = Lease(shard, state.epoch + 1, worker, secrets.token_hex(16))
            if not self.objects.create(_lease_key(lease), to_body(asdict(lease))):
                continue
            # It may have been finished after we looked, by a zombie whose lease had gone stale.
            if self.objects.head(f"done/{shard}") is None:
                return lease
        return None

    def remaining(self, shards: Sequence[str]) -> list[str]:
        """Those of `shards` that are not done, in their order: one listing."""
        done = {info.key.removeprefix("done/") for info in self.objects.list("done")}
        return [shard for shard in shards if shard not in done]

    def heartbeat(self, lease: Lease, body: Mapping[str, Any]) -> None:
        """Show that the lease's holder lives; `body` (JSON-able) is for people who look."""
        self.objects.put(_heartbeat_key(lease), to_body({**body, "worker": lease.worker, "epoch": lease.epoch}))

    def lost(self, lease: Lease) -> bool:
        """True when going on is pointless: the shard is done, or somebody has taken it over."""
        following = Lease(lease.shard, lease.epoch + 1, "", "")
        return (
            self.objects.head(f"done/{lease.shard}") is not None or self.objects.head(_lease_key(following)) is not None
        )

    def data_key(self, lease: Lease) -> str:
        """Where the lease's holder uploads its data, relative to the run: nobody else ever writes there."""
        return f"data/{lease.shard}/{numbered(lease.epoch)}-{lease.worker}.safetensors"

    def commit(self, lease: Lease, *, size: int, sha256: str, tokens: int, extra: Mapping[str, Any]) -> bool:
        """Make the uploaded data object the shard's output; True iff it is. A loser's data is deleted.

        Raises:
            StoreError: the data object is not there or has not `size` bytes: it was not uploaded completely.
        """
        key = self.data_key(lease)
        info = self.objects.head(key)
        if info is None or info.size != size:
            winner = self.done(lease.shard)
            if info is None and winner is not None and winner.key != key:
                return False  # a janitor has already removed what lost
            found = "missing" if info is None else f"{info.size} bytes long instead of {size}"
            raise StoreError(
                f"the data object is {found}",
                where=f"{self.objects.url}/{key}",
                fix="upload it before the commit",
            )
        marker = Done(
            lease.shard,
            key,
            size,
            sha256,
            tokens,
            lease.worker,
            lease.epoch,
            lease.token,
            json.loads(json.dumps(extra)),
        )
        if self.objects.create(f"done/{lease.shard}", to_body(asdict(marker))):
            return True
        winner = self.done(lease.shard)
        if winner is not None and winner.key == key:
            return True  # this lease has committed before: its data is the output
        self.objects.delete(key)
        return False

    def release(self, lease: Lease) -> None:
        """Give the lease up, so that others need not wait for it to go stale."""
        # Not a deletion: the epoch must stay used, or its next owner could be taken for this one.
        self.objects.put(_heartbeat_key(lease), b"")

    def fail(self, lease: Lease, reason: str) -> None:
        """Say why an error ends the work under `lease`, in one sentence; the first reason stays."""
        sentence = " ".join(reason.split())[:_LONGEST_REASON]
        body = {"worker": lease.worker, "reason": sentence, "token": lease.token}
        self.objects.create(f"failed/{lease.shard}/{numbered(lease.epoch)}", to_body(body))

    def present(self, worker: str, body: Mapping[str, Any]) -> None:
        """Say what `worker` does now, whether it holds a lease or not; `body` (JSON-able) is for people who look."""
        self.objects.put(f"workers/{segment_of(worker)}", to_body({**body, "worker": worker}))

    def absent(self, worker: str) -> None:
        """`worker` has ended as it should."""
        self.objects.delete(f"workers/{segment_of(worker)}")

    def survey(self, before: Survey | None = None) -> Survey:
        """Who holds what since when, what is done and what has failed; five listings, and nothing is written.

        Unlike `states` it asks nobody for the time: ages are a matter of whoever looks.

        Args:
            before: an earlier survey, whose leases are taken over instead of being listed. Of the listings those of
                leases and heartbeats cost most, two folders a shard, and most of them are of shards that are done.
        """
        tenures = tuple(self._tenures()) if before is None else before.tenures
        # After the leases: a marker that appears in between must not be missed, a lease may.
        done = {info.key.removeprefix("done/"): info.last_modified for info in self.objects.list("done")}
        failed = {place: info.last_modified for info in self.objects.list("failed") if (place := _split(info.key))[0]}
        workers = {info.key.removeprefix("workers/"): info.last_modified for info in self.objects.list("workers")}
        return Survey(tenures, done, failed, workers)

    def holder(self, shard: str, epoch: int) -> str:
        """The worker that was given a lease.

        Raises:
            ObjectMissingError: there is no such lease.
            DamagedObjectError: what lies there is none.
        """
        [worker] = self._texts(f"lease/{shard}/{numbered(epoch)}", "worker")
        return worker

    def failure(self, shard: str, epoch: int) -> tuple[str, str]:
        """(worker, reason) of a lease that `fail` ended.

        Raises:
            ObjectMissingError: nobody has said why.
            DamagedObjectError: what lies there says nothing.
        """
        worker, reason = self._texts(f"failed/{shard}/{numbered(epoch)}", "worker", "reason")
        return worker, reason

    def presence(self, worker: str) -> dict[str, Any]:
        """What a worker last said of itself.

        Raises:
            ObjectMissingError: it has ended.
        """
        return self._body(f"workers/{worker}")

    def done(self, shard: str) -> Done | None:
        """The done-marker of a shard, or None.

        Raises:
            DamagedObjectError: what lies there is none.
        """
        with self._lock:
            if shard in self._done:
                return self._done[shard]
        try:
            body = self.objects.get(f"done/{shard}", most=LARGEST)
        except ObjectMissingError:
            return None
        where = f"{self.objects.url}/done/{shard}"
        marker: Done | None = None
        with contextlib.suppress(TypeError):  # other fields than a marker's
            marker = Done(**from_body(body, where))
        if marker is None or not _is_marker(marker):
            raise DamagedObjectError("this is not a done-marker", where=where, fix="see who else writes there")
        with self._lock:
            self._done[shard] = marker
        return marker

    def all_done(self) -> list[Done]:
        """All done-markers of the run, sorted by shard."""
        shards = [info.key.removeprefix("done/") for info in self.objects.list("done")]
        with ThreadPoolExecutor(_READERS) as pool:
            return [marker for marker in pool.map(self.done, shards) if marker is not None]

    def states(self, shards: Sequence[str]) -> dict[str, ShardState]:
        """Status, epoch, worker and age of every one of `shards`, in their order."""
        looked = self._look(shards)
        with ThreadPoolExecutor(_READERS) as pool:
            return dict(zip(looked, pool.map(self._named, looked, looked.values()), strict=True))

    def held(self) -> list[str]:
        """Shards that a live lease owns, whoever holds it, sorted."""
        shards = sorted({shard for info in self.objects.list("lease") for shard, _ in [_split(info.key)] if shard})
        return [shard for shard, state in self._look(shards).items() if state.status == "leased"]

    def janitor(self, *, dry_run: bool = False) -> list[str]:
        """Delete data objects that lost, and half-written rests of killed writers; return their names. With
        `dry_run` it only looks.

        An object is removed only when its shard is done with another object and no live lease owns it. As
        long as a shard is not done, a zombie may still commit its upload, so nothing of it is touched.
        """
        owned = []
        for info in self.objects.list("data"):
            match = re.fullmatch(r"data/([^/]+)/(\d+)-.+", info.key)
            if match:
                owned.append((info.key, match[1], int(match[2])))
        # Asking for the time writes an object: a mistyped run must leave no trace.
        removed = self._losers(owned) if owned else []
        for key in [] if dry_run else removed:
            self.objects.delete(key)
        rests = self.objects.sweep("data", older_than_s=max(self.ttl_s, _QUIET_S), dry_run=dry_run)
        return removed + [f"data/{name}" for name in rests]

    def _losers(self, owned: list[tuple[str, str, int]]) -> list[str]:
        shards = sorted({shard for _, shard, _ in owned})
        states = self._look(shards)
        live = {(shard, epoch) for shard, epoch, age in self._leases(shards) if _within(age, self.ttl_s)}
        losers = []
        for key, shard, epoch in owned:
            if states[shard].status != "done" or (shard, epoch) in live:
                continue
            winner = self.done(shard)
            if winner is not None and winner.key != key:
                losers.append(key)
        return losers

    def _look(self, shards: Sequence[str]) -> dict[str, ShardState]:
        """States without the workers' names: three listings, whatever the number of shards."""
        states = {shard: ShardState("free") for shard in shards}
        for shard, epoch, age in self._leases(shards):
            if epoch > states[shard].epoch:
                status: Literal["leased", "stale"] = "leased" if _within(age, self.ttl_s) else "stale"
                states[shard] = ShardState(status, epoch, None, age)
        # Listed last: a marker that appears in between must not be missed, a lease may.
        for info in self.objects.list("done"):
            shard = info.key.removeprefix("done/")
            if shard in states:
                states[shard] = ShardState("done", states[shard].epoch)
        return states

    def _leases(self, shards: Sequence[str]) -> list[tuple[str, int, float | None]]:
        """(shard, epoch, seconds since the last sign of life or None when released) of every lease."""
        wanted = set(shards)
        # The clock is read first: whatever is written meanwhile looks younger, never older.
        now = self.objects.server_time()
        return [
            (tenure.shard, tenure.epoch, None if tenure.released else max(0.0, (now - tenure.seen).total_seconds()))
            for tenure in self._tenures()
            if tenure.shard in wanted
        ]

    def _tenures(self) -> Iterator[Tenure]:
        beats = {_split(info.key): info for info in self.objects.list("hb")}
        for info in self.objects.list("lease"):
            shard, epoch = _split(info.key)
            beat, begun = beats.get((shard, epoch)), info.last_modified
            if shard and beat is None:
                yield Tenure(shard, epoch, begun, begun, False)
            elif shard and beat is not None:
                yield Tenure(shard, epoch, begun, max(begun, beat.last_modified), beat.size == 0)

    def _body(self, key: str) -> dict[str, Any]:
        return from_body(self.objects.get(key, most=LARGEST), f"{self.objects.url}/{key}")

    def _texts(self, key: str, *names: str) -> tuple[str, ...]:
        """These fields of an object, all of them text."""
        body = self._body(key)
        texts = tuple(text for name in names if isinstance(text := body.get(name), str))
        if len(texts) < len(names):
            raise DamagedObjectError(
                f"this object does not say {' and '.join(names)}",
                where=f"{self.objects.url}/{key}",
                fix="see who else writes there",
            )
        return texts

    def _named(self, shard: str, state: ShardState) -> ShardState:
        if state.status == "free":
            return state
        if state.status == "done":
            marker = self.done(shard)
            return state if marker is None else ShardState("done", marker.epoch, marker.worker)
        return ShardState(state.status, state.epoch, self.holder(shard, state.epoch), state.age_s)


def _lease_key(lease: Lease) -> str:
    return f"lease/{lease.shard}/{numbered(lease.epoch)}"


def _heartbeat_key(lease: Lease) -> str:
    return f"hb/{lease.shard}/{numbered(lease.epoch)}"


def _is_marker(marker: Done) -> bool:
    """Whether its fields are of the types that `commit` writes: JSON keeps no promise about them."""
    texts = (marker.shard, marker.key, marker.sha256, marker.worker, marker.token)
    counts = (marker.size, marker.tokens, marker.epoch)
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(count) is int and 0 <= count <= LARGEST_COUNT for count in counts)
        and isinstance(marker.extra, dict)
    )


def _split(key: str) -> tuple[str, int]:
    match = re.fullmatch(r"[^/]+/([^/]+)/(\d+)", key)
    return (match[1], int(match[2])) if match else ("", 0)  # a stranger's object belongs to no shard


def _within(age_s: float | None, ttl_s: float) -> bool:
    return age_s is not None and age_s <= ttl_s
