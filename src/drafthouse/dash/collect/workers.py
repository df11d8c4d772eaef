"""Who works on a run, by what workers say of themselves and by the leases and markers that name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from drafthouse.dash.collect.facts import Place, RunFacts
from drafthouse.dash.model import WorkerView
from drafthouse.store.board import Tenure

SILENT_S = 60.0
"""Workers speak four times as often; one whose leases run out earlier is silent earlier."""
GONE = 200
"""Workers that are not alive are shown up to this number, those first that were heard of last."""


def views(
    leased: Sequence[Tenure], holders: Mapping[Place, str], facts: RunFacts, now: datetime
) -> tuple[WorkerView, ...]:
    """Everybody who works on the run or has: the living by name, then the others by when they were heard of.

    Args:
        leased: live leases. holders: who has them.
        now: by the store's clock.
    """
    held: dict[str, list[Tenure]] = {}
    for lease in leased:
        held.setdefault(holders.get((lease.shard, lease.epoch), "unknown"), []).append(lease)
    names = sorted(held.keys() | facts.words.keys() | facts.done.keys())
    found = [_view(worker, held.get(worker, []), facts, now) for worker in names]
    gone = sorted((one for one in found if not one.alive), key=lambda one: one.age_s or 0.0)
    return (*(one for one in found if one.alive), *gone[:GONE])


def _view(worker: str, held: Sequence[Tenure], facts: RunFacts, now: datetime) -> WorkerView:
    words = facts.words.get(worker)
    signs = [facts.last.get(worker), *(lease.seen for lease in held), None if words is None else words.at]
    newest = max((sign for sign in signs if sign is not None), default=None)
    age = None if newest is None else max(0.0, (now - newest).total_seconds())
    shards, done, node = (
        tuple(sorted(lease.shard for lease in held)),
        facts.done.get(worker, 0),
        facts.homes.get(worker),
    )
    if words is None:  # it has ended, or never said a word
        alive = bool(held)
        return WorkerView(
            worker=worker, node=node, shards=shards, tokens=0, age_s=age, done=done, alive=alive, ended=not alive
        )
    ended = words.failed is not None
    # A lease may live for ten minutes after its holder was killed; its holder's own words are younger.
    quiet_s = min(SILENT_S, words.ttl_s or SILENT_S)
    return WorkerView(
        worker=worker,
        node=node,
        shards=shards,
        tokens=sum(words.held.get(shard, 0) for shard in shards),
        age_s=age,
        done=done,
        waiting=None if ended else words.waiting,
        device=words.device,
        gpus=words.gpus,
        alive=not ended and age is not None and age <= quiet_s,
        ended=ended,
    )
