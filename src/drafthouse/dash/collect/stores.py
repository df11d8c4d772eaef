"""A store: does it answer, how fast, and which runs and drafters lie in it."""

from __future__ import annotations

import re
import shutil
import time
from collections import deque
from functools import cache
from statistics import median

from drafthouse.dash.collect.clock import StoreClock
from drafthouse.dash.collect.source import Source
from drafthouse.dash.model import StoreView
from drafthouse.errors import StoreError
from drafthouse.store import Store
from drafthouse.store.folders import folders

PACE_S = 5.0
RUNS, DRAFTERS = "runs", "drafters"
_LOOKS = 9  # of which the latency is the median


class StoreSource(Source):
    """One store.

    Attributes:
        url: as the store calls itself.
        store: None before it could be opened.
        runs, recipes: what is in it by the last look that succeeded.
    """

    def __init__(self, url: str, clock: StoreClock, pace_s: float) -> None:
        self.url = named(url)
        super().__init__(f"store {self.url}", max(PACE_S, pace_s))
        self.clock, self._opens = clock, url
        self.store: Store | None = None
        self.runs: tuple[str, ...] = ()
        self.recipes: tuple[str, ...] = ()
        self._took: deque[float] = deque(maxlen=_LOOKS)
        self._free: int | None = None

    def view(self) -> StoreView:
        """What is known of it."""
        known = self.known
        return StoreView(
            url=self.url,
            known=known,
            up=known.error is None and known.answered is not None,
            latency_ms=round(1000 * median(self._took), 2) if self._took else None,
            free_bytes=self._free,
            runs=self.runs,
            recipes=self.recipes,
        )

    def look(self) -> None:
        if self.store is None:
            self.store = Store.open(self._opens)
        root = self.store.local_path(RUNS)
        if root is not None:
            if not root.parent.is_dir():
                raise StoreError("there is no such folder", where=str(root.parent), fix="is its disk mounted?")
            self._free = shutil.disk_usage(root.parent).free
        began = time.monotonic()
        self.store.head(RUNS)  # nothing is there, and that has to be said
        self._took.append(time.monotonic() - began)
        self.runs, self.recipes = tuple(folders(self.store, RUNS)), tuple(folders(self.store, DRAFTERS))


@cache
def named(url: str) -> str:
    """What a store calls itself: the same store has one name, with whatever options it is opened. Of a URL that cannot
    be opened: without what is not to be shown."""
    try:
        return Store.open(url).url
    except StoreError:
        return re.sub(r"//[^/]*@", "//", url.partition("?")[0])
