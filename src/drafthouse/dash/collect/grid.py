"""Where every shard of a run stands, one character each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from drafthouse.store.board import Survey, Tenure


class Grid:
    """The shards that anybody has begun, as a survey shows them.

    Args:
        markers: shard -> epoch of the lease under which it was finished.
        alive_since: leases without a sign of life since then are stale.
        held: worker -> when it spoke and the shards that it holds, of those that spoke since the leases were listed.

    Attributes:
        newest: shard -> its newest lease.
        names: shards that were begun, sorted.
        text: one character for each of `names`, as in `ExtractionView.grid`.
        leased: live leases. stale: how many shards have one that is not.
        told: place -> worker, of leases that nobody has listed yet: their workers told of them.
    """

    def __init__(
        self,
        survey: Survey,
        markers: Mapping[str, int],
        alive_since: datetime,
        held: Mapping[str, tuple[datetime, Iterable[str]]],
    ) -> None:
        self._survey, self._markers = survey, markers
        self.newest: dict[str, Tenure] = {}
        for tenure in survey.tenures:
            known = self.newest.get(tenure.shard)
            if known is None or tenure.epoch > known.epoch:
                self.newest[tenure.shard] = tenure
        self.told: dict[tuple[str, int], str] = {}
        for worker, (at, shards) in held.items():
            for shard in shards:
                known = self.newest.get(shard)
                if shard not in survey.done and (known is None or known.released or known.seen < alive_since):
                    self.newest[shard] = Tenure(shard, 1 if known is None else known.epoch + 1, at, at, False)
                    self.told[shard, self.newest[shard].epoch] = worker
        self.names = tuple(sorted(self.newest.keys() | survey.done.keys()))
        self.leased: list[Tenure] = []
        text = []
        for name in self.names:
            lease = self.newest.get(name)
            if name in survey.done:
                epochs = (markers.get(name, 1), 1 if lease is None else lease.epoch)
                text.append("r" if max(epochs) > 1 else "d")
            elif lease is not None and not lease.released and lease.seen >= alive_since:
                self.leased.append(lease)
                text.append("l")
            else:
                text.append("s")
        self.text = "".join(text)
        self.stale = text.count("s")

    def silent(self) -> list[Tenure]:
        """Leases whose holder neither finished nor gave them back, nor said why, and that are not alive."""
        live = {(lease.shard, lease.epoch) for lease in self.leased}
        return [
            lease
            for lease in self._survey.tenures
            if not lease.released
            # of a marker that cannot be read nobody knows whose it is
            and not (lease.shard in self._survey.done and lease.shard not in self._markers)
            and self._markers.get(lease.shard) != lease.epoch
            and (lease.shard, lease.epoch) not in live
            and (lease.shard, lease.epoch) not in self._survey.failed
        ]
