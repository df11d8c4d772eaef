"""Keeps the newest `Snapshot`: every source is asked at its own pace in its own thread, and none waits for another.

Nothing is ever written but the file for the last known truth: stores are listed and read, nodes and servers are asked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from drafthouse.dash.collect.assemble import Assembly
from drafthouse.dash.collect.source import Source
from drafthouse.dash.collect.wanted import Key, Sources
from drafthouse.dash.model import Snapshot
from drafthouse.dash.remember import recall, remember
from drafthouse.dash.settings import DashSettings
from drafthouse.errors import ConfigError

REMEMBER_EVERY_S = 10.0
_LOOK_AROUND_S = 1.0  # how late it is noticed that a source hangs
_AT_MOST_EVERY_S = 0.05  # of many sources that answer together, one snapshot
_JOIN_S = 2.0
_log = logging.getLogger(__name__)


class Collector:
    """What the page looks at; a context manager around the threads that look.

    Args:
        environment: where the endpoint of an S3 store may stand.

    Raises:
        StoreError: a store of the settings cannot be opened.
        ConfigError: the file for the last known truth cannot be read.
    """

    def __init__(self, settings: DashSettings, *, environment: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self._dirty, self._over = threading.Event(), threading.Event()
        before = recall(settings.remember) if settings.remember else None
        self._sources = Sources(settings, self._dirty.set, environment)
        self._assembly = Assembly(self._sources, before)
        self._making = threading.Lock()
        self._loops: dict[Key, tuple[threading.Thread, threading.Event]] = {}
        self._maker = threading.Thread(target=self._make_again, name="dash-snapshot", daemon=True)
        self._remembered = (0.0, -1)  # when (monotonic), and which snapshot

    def __enter__(self) -> Self:
        for key, source in self._sources.all.items():
            self._begin(key, source)
        self._maker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._dirty.set()
        self._maker.join()
        for _, stop in self._loops.values():
            stop.set()
        end = time.monotonic() + _JOIN_S
        for thread, _ in self._loops.values():
            thread.join(max(0.0, end - time.monotonic()))  # one that hangs ends with the process
        for source in self._sources.all.values():
            source.close()
        self._remember(0.0)

    def snapshot(self) -> Snapshot:
        """The newest truth; never waits for a source."""
        return self._assembly.newest

    def refresh_now(self, *, probes: bool = False) -> Snapshot:
        """One round of every source in the caller's thread, also of those that the round discovers.

        Args:
            probes: ask the nodes over ssh too.
        """
        asked: set[Key] = set() if probes else {("nodes",)}
        while waiting := [key for key in self._sources.all if key not in asked]:
            # Nodes are known when the fleet has answered.
            for key in sorted(waiting, key=lambda one: one[0] == "nodes"):
                source = self._sources.all.get(key)
                if source is not None:
                    source.ask()
            asked |= set(waiting)
            self._make()
        return self.snapshot()

    def _make(self) -> None:
        with self._making:
            new, gone = self._sources.grow()
            if self._maker.is_alive():
                for key, source in new.items():
                    self._begin(key, source)
            for key, source in gone.items():
                if key in self._loops:
                    self._loops.pop(key)[1].set()
                source.close()
            self._assembly.make()

    def _begin(self, key: Key, source: Source) -> None:
        if key == ("nodes",) and not self.settings.probe_s:
            return
        stop = threading.Event()
        thread = threading.Thread(target=self._look_again, args=(source, stop), name=f"dash-{key[0]}", daemon=True)
        self._loops[key] = (thread, stop)
        thread.start()

    def _look_again(self, source: Source, stop: threading.Event) -> None:
        while not stop.is_set():
            source.ask()
            self._dirty.set()
            stop.wait(source.pace_s)

    def _make_again(self) -> None:
        while not self._over.is_set():
            self._dirty.wait(_LOOK_AROUND_S)
            self._dirty.clear()
            try:
                self._make()
                self._remember(REMEMBER_EVERY_S)
            except Exception:  # the page says how old it is, and the next answer may be another
                _log.exception("no snapshot could be made")
            self._over.wait(_AT_MOST_EVERY_S)

    def _remember(self, every_s: float) -> None:
        snapshot, (at, sequence) = self.snapshot(), self._remembered
        if self.settings.remember is None or snapshot.sequence == sequence or time.monotonic() - at < every_s:
            return
        self._remembered = (time.monotonic(), snapshot.sequence)
        try:
            remember(self.settings.remember, snapshot)
        except ConfigError as error:
            _log.warning("%s", error)
