"""Which sources there have to be, given what those that are there have found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from drafthouse.dash.collect.clock import StoreClock
from drafthouse.dash.collect.extraction import RunSource
from drafthouse.dash.collect.fleet import FleetSource
from drafthouse.dash.collect.here import HereSource, RunFolderSource
from drafthouse.dash.collect.nodes import NodesSource
from drafthouse.dash.collect.serving import ServerSource
from drafthouse.dash.collect.source import Source
from drafthouse.dash.collect.stores import StoreSource, named
from drafthouse.dash.collect.training import FolderSource, TrainingSource
from drafthouse.dash.settings import DashSettings
from drafthouse.errors import DrafthouseError
from drafthouse.store import Store

if TYPE_CHECKING:
    from drafthouse.fleet.jobs import Job

Key = tuple[str, ...]
"""Kind of a source, and what tells it from others of its kind."""


class Sources:
    """All sources by key: `grow` after a look starts those that it has shown, and drops those that are gone.

    Args:
        changed: called after every node that was probed.
        environment: where S3's endpoint may stand.
    """

    def __init__(self, settings: DashSettings, changed: Callable[[], None], environment: Mapping[str, str]) -> None:
        self._settings, self._environment = settings, environment
        self.all: dict[Key, Source] = {("here",): HereSource(settings.refresh_s)}
        self.fleet: FleetSource | None = None
        self.nodes: NodesSource | None = None
        if settings.inventory is not None:
            self.fleet = FleetSource(settings.inventory, settings.refresh_s)
            self.nodes = NodesSource(self.fleet, settings.probe_s, changed)
            self.all |= {("fleet",): self.fleet, ("nodes",): self.nodes}
        for path in settings.runs:
            self.all["folder", str(path)] = RunFolderSource(path, settings.refresh_s)
        for url in settings.stores:
            Store.open(url)  # what is wrong in the settings is told before the page is served
        self._fixed = set(self.all)
        self.grow()

    def grow(self) -> tuple[dict[Key, Source], dict[Key, Source]]:
        """(those that are new, those that are gone) since the last call."""
        makers = {**self._stores(), **self._servers(), **self._runs(), **self._trainings()}
        new = {key: make() for key, make in makers.items() if key not in self.all}
        gone = {key: source for key, source in self.all.items() if key not in makers and key not in self._fixed}
        self.all = {key: source for key, source in {**self.all, **new}.items() if key not in gone}
        return new, gone

    def of_kind(self, kind: str) -> Iterator[tuple[Key, Source]]:
        """The sources of one kind."""
        return ((key, source) for key, source in sorted(self.all.items()) if key[0] == kind)

    @property
    def discovering(self) -> bool:
        """True while some that name further stores or servers have never answered."""
        return any(source.known.answered is None for key, source in self.all.items() if key[0] in {"fleet", "folder"})

    def job_of(self, kind: str, store: str, name: str) -> str | None:
        """The job that makes a run (kind "extract") or a drafter ("train") in a store."""
        for job in self._jobs():
            made = job.run if job.kind == "extract" else job.recipe
            if job.kind == kind and made == name and job.store is not None and named(job.store) == store:
                return job.name
        return None

    def _jobs(self) -> list[Job]:
        return list(self.fleet.job_files.values()) if self.fleet else []

    def _folders(self) -> Iterator[RunFolderSource]:
        return (source for _, source in self.of_kind("folder") if isinstance(source, RunFolderSource))

    def _opened(self) -> Iterator[tuple[StoreSource, Store]]:
        for _, source in self.of_kind("store"):
            if isinstance(source, StoreSource) and source.store is not None:
                yield source, source.store

    def _stores(self) -> dict[Key, Callable[[], Source]]:
        urls = [*self._settings.stores, *(folder.store for folder in self._folders())]
        urls += [job.store for job in self._jobs() if job.kind in {"extract", "train"}]
        if self.fleet and self.fleet.inventory:
            urls.append(self.fleet.inventory.fleet_store)

        def maker(url: str) -> Callable[[], Source]:
            return lambda: StoreSource(url, StoreClock(url, self._environment), self._settings.refresh_s)

        return {("store", named(url)): maker(url) for url in urls if url is not None}

    def _runs(self) -> dict[Key, Callable[[], Source]]:
        pace_s, history_s = self._settings.refresh_s, self._settings.history_s

        def maker(source: StoreSource, store: Store, run: str) -> Callable[[], Source]:
            return lambda: RunSource(store, run, source.clock, pace_s, history_s)

        return {
            ("run", source.url, run): maker(source, store, run)
            for source, store in self._opened()
            for run in source.runs
        }

    def _trainings(self) -> dict[Key, Callable[[], Source]]:
        pace_s = self._settings.refresh_s
        found: dict[Key, Callable[[], Source]] = {}

        def stored(source: StoreSource, store: Store, recipe: str) -> Callable[[], Source]:
            return lambda: TrainingSource(store, recipe, source.clock, pace_s)

        def local(folder: RunFolderSource, url: str, recipe: str) -> Callable[[], Source]:
            return lambda: FolderSource(folder.metrics(recipe), recipe, url, folder.steps[recipe], pace_s)

        for source, store in self._opened():
            found |= {("training", source.url, recipe): stored(source, store, recipe) for recipe in source.recipes}
        for folder in self._folders():
            if folder.store is not None:
                url = named(folder.store)
                # What a store says of a training is more than its curve.
                recipes = (recipe for recipe in folder.steps if ("training", url, recipe) not in found)
                found |= {("training here", url, recipe): local(folder, url, recipe) for recipe in recipes}
        return found

    def _servers(self) -> dict[Key, Callable[[], Source]]:
        named_urls = [(name, url, None) for name, url in self._settings.servers.items()]
        pace_s, history_s = self._settings.refresh_s, self._settings.history_s

        def maker(name: str, url: str, job: str | None) -> Callable[[], Source]:
            return lambda: ServerSource(name, url, job, pace_s, history_s)

        return {("server", name, url): maker(name, url, job) for name, url, job in [*named_urls, *self._served()]}

    def _served(self) -> Iterator[tuple[str, str, str | None]]:
        """(name, URL, job) of the jobs that serve now."""
        if self.fleet is None or self.fleet.inventory is None:
            return
        running = {job.name: job.node for job in self.fleet.jobs if job.node is not None}
        for job in self._jobs():
            if job.kind == "serve" and job.name in running:
                try:
                    node = self.fleet.inventory.node(str(running[job.name]))
                except DrafthouseError:
                    continue  # it left the inventory
                host = f"[{node.host}]" if ":" in node.host else node.host
                yield job.name, f"http://{host}:{job.serving_port()}", job.name
