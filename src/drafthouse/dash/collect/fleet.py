"""The fleet as its inventory and its records tell it; no node is needed for that.

The inventory is read through Ansible, which takes a second or two, so it is read again only when a file of it changed.
Nothing is written: the records' store is only listed and read.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafthouse.dash.collect.source import Source
from drafthouse.dash.model import JobView, LifeView
from drafthouse.errors import DrafthouseError, FleetError
from drafthouse.store import DamagedObjectError, Lock, Store
from drafthouse.store.backend import Backend
from drafthouse.store.body import LARGEST
from drafthouse.store.keys import check_key

if TYPE_CHECKING:
    from drafthouse.fleet.inventory import Inventory
    from drafthouse.fleet.jobs import Job
    from drafthouse.fleet.records import LifeState

PACE_S = 5.0
UNKNOWN = "unknown"
"""Status of a job whose records could not be read."""
LIMIT_S = 90.0
"""Ansible alone is given a minute."""
_FILES = ("*.yml", "*.yaml", "known_hosts")


class FleetSource(Source):
    """Jobs and nodes by the inventory in `folder`.

    Attributes:
        inventory: None before it was read.
        job_files: jobs by name, as the inventory has them.
        jobs: all of them, and those that only the records know.
    """

    def __init__(self, folder: Path, pace_s: float) -> None:
        super().__init__("fleet", max(PACE_S, pace_s), limit_s=LIMIT_S)
        self._folder = folder
        self._read: dict[str, int] = {}
        self._opened: str | None = None
        self._store: _Once | None = None
        self.inventory: Inventory | None = None
        self.job_files: Mapping[str, Job] = {}
        self.jobs: tuple[JobView, ...] = ()

    def look(self) -> None:
        files = self._files()
        wrong: DrafthouseError | None = None
        if files != self._read or self.inventory is None:
            wrong = self._read_inventory()
            self._read = {} if wrong else files
        try:
            self._read_records(self._records_store())
        except DrafthouseError as error:
            wrong = wrong or error
            known = {job.name for job in self.jobs}
            unread = [_job(name, file.kind, UNKNOWN) for name, file in self.job_files.items() if name not in known]
            self.jobs = tuple(sorted((*self.jobs, *unread), key=lambda job: job.name))
        if wrong is not None:
            raise wrong  # told after everything else that can be told

    def _read_inventory(self) -> DrafthouseError | None:
        """What is wrong with the job files, if anything is: the nodes are known all the same."""
        self.inventory = fleet_room("inventory").Inventory.load(self._folder)
        try:
            self.job_files = fleet_room("jobs").jobs(self.inventory)
        except DrafthouseError as error:
            return error
        return None

    def _records_store(self) -> _Once:
        url = self.inventory.fleet_store if self.inventory else None
        if url is None:
            raise FleetError(
                "the inventory declares no store for the fleet's records",
                where=str(self._folder),
                fix="set `fleet_store` in group_vars/all.yml",
            )
        if self._store is None or url != self._opened:
            self._opened, self._store = url, _Once.open(url).child("fleet")
        return self._store

    def _read_records(self, store: _Once) -> None:
        lives: dict[str, list[LifeState]] = {}
        wrong: dict[str, list[str]] = {}
        reading = fleet_room("records").Records(store).read()
        for state in reading.lives:
            lives.setdefault(state.life.job, []).append(state)
        for (job, _), error in reading.unreadable.items():
            wrong.setdefault(job, []).append(str(error))
        names = sorted({*lives, *wrong, *self.job_files})
        self.jobs = tuple(self._recorded(name, lives.get(name, []), wrong.get(name, []), store) for name in names)
        for job in self.jobs:
            if job.damaged:
                store.forget(job.name)  # it may have been a bad answer, and somebody may mend it

    def _recorded(self, name: str, lives: list[LifeState], wrong: list[str], store: Store) -> JobView:
        current = fleet_room("records").current_of(lives)
        file = self.job_files.get(name)
        kind = file.kind if file is not None else lives[-1].life.kind if lives else UNKNOWN
        damaged, who = list(wrong), None
        try:
            holder = Lock(store, name).holder()
            who = holder.who if holder else None
        except DamagedObjectError as error:
            damaged.append(str(error))
        found = {"lives": tuple(_life(state) for state in reversed(lives)), "locked_by": who, "damaged": tuple(damaged)}
        if wrong:  # nobody knows which life counts; where the last readable one is may still be looked at
            return _job(name, kind, UNKNOWN).model_copy(update=found | {"node": current.life.node if current else None})
        if current is None:
            return _job(name, kind, "over" if lives else "not begun").model_copy(update=found)
        found |= {"epoch": current.life.epoch, "node": current.life.node, "since": current.live_since or current.begun}
        return _job(name, kind, current.status).model_copy(update=found)

    def _files(self) -> dict[str, int]:
        try:
            found = {path for pattern in _FILES for path in self._folder.rglob(pattern)}
            return {str(path): path.stat().st_mtime_ns for path in sorted(found)}
        except OSError as error:
            reason = error.strerror or "it changes at this moment"
            raise FleetError(f"the inventory cannot be read ({reason})", where=str(self._folder)) from None


class _Once(Store):
    """A store whose objects are created once and never change: each is read once."""

    def __init__(self, backend: Backend, prefix: str = "", bodies: dict[str, bytes] | None = None) -> None:
        super().__init__(backend, prefix)
        self._bodies: dict[str, bytes] = {} if bodies is None else bodies

    def child(self, prefix: str) -> _Once:
        return _Once(self._backend, self._full(check_key(prefix)), self._bodies)

    def get(self, key: str, *, most: int | None = LARGEST) -> bytes:
        full = self._key(key)
        if full not in self._bodies:
            self._bodies[full] = super().get(key, most=most)
        return self._bodies[full]

    def forget(self, name: str) -> None:
        """Read what has to do with the job `name` anew."""
        for key in [key for key in self._bodies if name in key.split("/")]:
            self._bodies.pop(key, None)


def _job(name: str, kind: str, status: str) -> JobView:
    return JobView(name=name, kind=kind, status=status, epoch=None, node=None, since=None)


def _life(state: LifeState) -> LifeView:
    return LifeView(
        epoch=state.life.epoch,
        node=state.life.node,
        status=state.status,
        action=state.life.action,
        who=state.life.who,
        begun=state.begun,
        live_since=state.live_since,
        ended=state.ended,
        evidence=state.evidence,
        reason=state.reason,
    )


def fleet_room(module: str) -> Any:
    """A module of `drafthouse.fleet`, which needs the extra `fleet`; the rest of the page works without it."""
    try:
        return importlib.import_module(f"drafthouse.fleet.{module}")
    except ImportError as error:
        raise FleetError(
            f"{error.name or 'a package'} is not installed", where="the fleet", fix="pip install 'drafthouse[fleet]'"
        ) from None
