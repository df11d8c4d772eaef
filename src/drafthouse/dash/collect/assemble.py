"""One `Snapshot` out of what all sources know; where they know nothing yet, out of what an earlier process knew."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TypeVar

from drafthouse.dash.collect.extraction import RunSource
from drafthouse.dash.collect.fleet import UNKNOWN, FleetSource
from drafthouse.dash.collect.here import HereSource, RunFolderSource
from drafthouse.dash.collect.merge import merged
from drafthouse.dash.collect.serving import ServerSource
from drafthouse.dash.collect.stores import StoreSource
from drafthouse.dash.collect.training import FolderSource, TrainingSource
from drafthouse.dash.collect.wanted import Key, Sources
from drafthouse.dash.model import (
    ExtractionView,
    JobView,
    Known,
    NodeView,
    ServerView,
    Snapshot,
    StoreView,
    TrainingView,
)

BEFORE = "not reached since the page was started: this is what was known before"

V = TypeVar("V", ExtractionView, TrainingView, ServerView)


class Assembly:
    """Makes snapshots of `sources`.

    Args:
        before: what an earlier process knew; None: nothing.

    Attributes:
        newest: the last one that was made.
    """

    def __init__(self, sources: Sources, before: Snapshot | None) -> None:
        self._sources = sources
        self._before = before or Snapshot(at=datetime.now(UTC), sequence=0, fleet=Known(), settled=False)
        self._essence: Snapshot | None = None
        self.newest = self._before

    def make(self) -> Snapshot:
        """The newest truth. Its number rises when anything changed but what changes with every look."""
        now, fleet = datetime.now(UTC), self._sources.fleet
        extractions = self._extractions()
        jobs = () if fleet is None else self._jobs(fleet)
        here = [source.view() for _, source in self._sources.of_kind("here") if isinstance(source, HereSource)]
        asked = (source.known.asked for source in self._sources.all.values())
        made = Snapshot(
            at=max((at for at in asked if at is not None), default=self.newest.at),
            sequence=self.newest.sequence,
            fleet=self._fleet(),
            settled=all(one.known.asked is not None for key, one in self._sources.all.items() if key != ("nodes",)),
            nodes=merged(self._nodes(), extractions, jobs, here[0], now),
            jobs=jobs,
            extractions=extractions,
            trainings=self._trainings(),
            servers=self._servers(),
            stores=self._stores(),
        )
        essence = _essence(made)
        if essence != self._essence:
            self._essence, made = essence, made.model_copy(update={"sequence": made.sequence + 1})
        self.newest = made
        return made

    def _jobs(self, fleet: FleetSource) -> tuple[JobView, ...]:
        if not fleet.jobs and fleet.known.answered is None:
            return self._before.jobs
        before = {job.name: job for job in self._before.jobs}
        return tuple(
            before[job.name].model_copy(update={"damaged": job.damaged})
            if job.status == UNKNOWN and job.name in before
            else job
            for job in fleet.jobs
        )

    def _fleet(self) -> Known:
        if self._sources.fleet is None:
            return Known()
        known, before = self._sources.fleet.known, self._before.fleet
        if known.answered is None and before.answered is not None:
            return Known(asked=known.asked, answered=before.answered, error=known.error or BEFORE)
        return known

    def _nodes(self) -> dict[str, NodeView]:
        """What probes say; of nodes that did not answer yet, what was known before."""
        fleet, nodes = self._sources.fleet, self._sources.nodes
        if fleet is None or nodes is None:
            return {}
        before = {node.name: node for node in self._before.nodes if node.last_seen is not None}
        found = nodes.views()
        if fleet.inventory is None:
            found = {**before, **found}
        for name, node in found.items():
            if name not in before or not (node.last_seen is None or node is before[name]):
                continue
            if before[name].state == "finished":
                found[name] = before[name]
            else:
                found[name] = before[name].model_copy(update={"state": "silent", "error": node.error or BEFORE})
        return found

    def _extractions(self) -> tuple[ExtractionView, ...]:
        sources = [(key, one) for key, one in self._sources.of_kind("run") if isinstance(one, RunSource)]
        before: dict[Key, ExtractionView] = {("run", view.store, view.run): view for view in self._before.extractions}
        views = self._completed({key: (source.view(), source.known) for key, source in sources}, before)
        jobs = [self._sources.job_of("extract", view.store, view.run) or view.job for view in views]
        return tuple(view.model_copy(update={"job": job}) for view, job in zip(views, jobs, strict=True))

    def _trainings(self) -> tuple[TrainingView, ...]:
        found: dict[Key, tuple[TrainingView | None, Known]] = {}
        for kind in ("training here", "training"):
            for key, source in self._sources.of_kind(kind):
                if isinstance(source, TrainingSource | FolderSource):
                    found["training", *key[1:]] = (source.view(), source.known)
        before: dict[Key, TrainingView] = {
            ("training", view.store, view.recipe): view for view in self._before.trainings
        }
        views = self._completed(found, before)
        jobs = [view.job or self._sources.job_of("train", view.store, view.recipe) for view in views]
        return tuple(view.model_copy(update={"job": job}) for view, job in zip(views, jobs, strict=True))

    def _servers(self) -> tuple[ServerView, ...]:
        before: dict[Key, ServerView] = {
            ("server", view.name, view.url): view.model_copy(update={"up": False}) for view in self._before.servers
        }
        found: dict[Key, tuple[ServerView | None, Known]] = {}
        for key, source in self._sources.of_kind("server"):
            if isinstance(source, ServerSource):
                known = source.known
                found[key] = (None if known.answered is None and key in before else source.view(), known)
        return tuple(self._completed(found, before))

    def _stores(self) -> tuple[StoreView, ...]:
        before = {view.url: view for view in self._before.stores}
        # A folder that is no run (yet) has no store that could say so.
        found = {
            str(source.path): StoreView(url=str(source.path), known=source.known, up=False)
            for _, source in self._sources.of_kind("folder")
            if isinstance(source, RunFolderSource) and source.store is None
        }
        for _, source in self._sources.of_kind("store"):
            if isinstance(source, StoreSource):
                view = source.view()
                old = before.get(view.url)
                if view.known.answered is None and old is not None:
                    known = view.known.model_copy(update={"answered": old.known.answered})
                    view = old.model_copy(update={"known": known, "up": False})
                found[view.url] = view
        return tuple(found[url] for url in sorted(found))

    def _completed(self, found: Mapping[Key, tuple[V | None, Known]], before: Mapping[Key, V]) -> list[V]:
        """Every view, in the order of the keys; what no source of this process has reached is as it was before, unless
        it is known to be gone."""
        views: dict[Key, V] = {}
        for key, (view, known) in found.items():
            if view is not None:
                views[key] = view
            elif key in before:
                views[key] = _as_before(before[key], known.error)
        views |= {key: _as_before(old) for key, old in before.items() if key not in found and self._unsettled(key)}
        return [views[key] for key in sorted(views)]

    def _unsettled(self, key: Key) -> bool:
        """Whether nobody could say yet that something of before is gone: its store was not reached, or not found."""
        store = self._sources.all.get(("store", key[1]))
        return self._sources.discovering if store is None else store.known.answered is None


def _as_before(view: V, error: str | None = None) -> V:
    return view.model_copy(update={"known": view.known.model_copy(update={"error": error or BEFORE})})


def _essence(snapshot: Snapshot) -> Snapshot:
    """A snapshot without what changes with every look: the times of asking, latency and free space."""

    def timeless(known: Known) -> dict[str, Known]:
        return {"known": Known(error=known.error)}

    return snapshot.model_copy(
        update={
            "at": datetime.min,
            "sequence": 0,
            "fleet": Known(error=snapshot.fleet.error),
            "extractions": tuple(view.model_copy(update=timeless(view.known)) for view in snapshot.extractions),
            "trainings": tuple(view.model_copy(update=timeless(view.known)) for view in snapshot.trainings),
            "servers": tuple(view.model_copy(update=timeless(view.known)) for view in snapshot.servers),
            "stores": tuple(
                view.model_copy(update={**timeless(view.known), "latency_ms": None, "free_bytes": None})
                for view in snapshot.stores
            ),
        }
    )
