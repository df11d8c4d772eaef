"""What was read of a run and stays true: markers, holders of leases, reasons. Each object is read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

from drafthouse.dash.collect import fields
from drafthouse.dash.collect.pace import Finished
from drafthouse.dash.collect.words import Words
from drafthouse.store import Board, DamagedObjectError, ObjectMissingError, Store
from drafthouse.store.board import Survey

MOST_SHARDS = 1_000_000
"""A run of more would have to be shown otherwise; each is a cell of the page's grid."""
Place = tuple[str, int]
"""Shard and epoch."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RunFacts:
    """Grows with every survey of the run.

    Attributes:
        spec: what the run is bound to; None as long as it is not.
        markers: shard -> epoch of the lease under which it was finished.
        done, last: worker -> shards that it has finished, and when the newest of them.
        tokens, bytes: in finished shards.
        finished: when shards were finished.
        holders: place -> worker, of the leases that were asked for.
        reasons: place -> (worker, reason), of all leases that an error ended.
        words: worker -> what it last said of itself; of those that are there.
        homes: worker -> its node, of all that were ever heard or have finished a shard.
        damaged: what is wrong with objects that did not hold what was written, at the last reading; they are asked for
            again, and say nothing against the others.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.board = Board(store, run)
        self.spec: dict[str, Any] | None = None
        self.markers: dict[str, int] = {}
        self.done: Counter[str] = Counter()
        self.last: dict[str, datetime] = {}
        self.tokens = self.bytes = 0
        self.finished = Finished()
        self.holders: dict[Place, str] = {}
        self.reasons: dict[Place, tuple[str, str]] = {}
        self.words: dict[str, Words] = {}
        self.homes: dict[str, str] = {}
        self.damaged: list[str] = []

    def contradict(self, survey: Survey) -> bool:
        """True when finished shards are gone: somebody has removed the run, and this is another one."""
        return not self.markers.keys() <= survey.done.keys()

    def read(self, pool: ThreadPoolExecutor, survey: Survey) -> None:
        """Read what is new in a survey."""
        self.damaged = []
        if self.spec is None:
            self.spec = self._read(pool, [""], lambda _: self.board.spec()).get("")
        self._read_markers(pool, survey)
        new = (place for place in survey.failed if place not in self.reasons)
        self.reasons |= self._read(pool, new, lambda place: self.board.failure(*place))
        spoken = [name for name, at in survey.workers.items() if name not in self.words or self.words[name].at != at]
        said = self._read(pool, spoken, self.board.presence)
        heard = {name: Words(survey.workers[name], body) for name, body in said.items()}
        self.homes |= {name: words.node for name, words in heard.items() if words.node}
        self.words = {name: said for name, said in (self.words | heard).items() if name in survey.workers}
        odd = {f"workers/{name}": ("what a worker says of itself", words.odd) for name, words in self.words.items()}
        odd["spec.json"] = ("a run's specification", fields.odd(self.spec or {}, _SPEC))
        where = self.board.objects.url
        self.damaged += [fields.sentence(f"{where}/{key}", what, names) for key, (what, names) in odd.items() if names]

    @property
    def shards(self) -> int | None:
        """How many shards the run has; None: nobody says."""
        said = (self.spec or {}).get("shards")
        return int(said) if said is not None and _is_shards(said) else None

    @property
    def unbounded(self) -> bool:
        """Whether the specification says on purpose nothing of a number of shards."""
        return self.spec is not None and self.spec.get("shards") is None

    @property
    def target(self) -> str | None:
        """What the specification calls the target."""
        said = (self.spec or {}).get("target")
        return None if said is None else str(said)

    def ask_for_holders(self, pool: ThreadPoolExecutor, places: Iterable[Place]) -> None:
        """Learn who was given these leases."""
        new = [place for place in places if place not in self.holders]
        self.holders |= self._read(pool, new, lambda place: self.board.holder(*place))

    def _read_markers(self, pool: ThreadPoolExecutor, survey: Survey) -> None:
        new = [shard for shard in survey.done if shard not in self.markers]
        found = {
            shard: marker for shard, marker in self._read(pool, new, self.board.done).items() if marker is not None
        }
        for shard, marker in found.items():
            at = survey.done[shard]
            self.markers[shard] = marker.epoch
            self.done[marker.worker] += 1
            self.last[marker.worker] = max(at, self.last.get(marker.worker, at))
            self.tokens += marker.tokens
            self.bytes += marker.size
            if marker.extra.get("node"):
                self.homes[marker.worker] = str(marker.extra["node"])
        times = [survey.done[shard].timestamp() for shard in found]
        self.finished.add(times, [float(marker.tokens) for marker in found.values()])

    def _read(self, pool: ThreadPoolExecutor, keys: Iterable[K], read: Callable[[K], V]) -> dict[K, V]:
        """What `read` says of every key; one that is gone by now is left out, and so is one that is damaged."""

        def one(key: K) -> tuple[K, V] | None:
            try:
                return key, read(key)
            except ObjectMissingError:
                return None
            except DamagedObjectError as error:
                self.damaged.append(str(error))
                return None

        return dict(found for found in pool.map(one, keys) if found is not None)


def _is_shards(value: Any) -> bool:
    return fields.count(value) and value <= MOST_SHARDS


_SPEC: Mapping[str, fields.Right] = {"shards": _is_shards}
