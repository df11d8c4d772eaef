"""One run of hidden-state extraction: a look is a few listings, and the objects that are new in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from drafthouse.dash.collect.clock import StoreClock
from drafthouse.dash.collect.facts import RunFacts
from drafthouse.dash.collect.grid import Grid
from drafthouse.dash.collect.source import Source
from drafthouse.dash.collect.workers import views
from drafthouse.dash.model import ExtractionView, FailureView, Known
from drafthouse.errors import StoreError
from drafthouse.store import Store
from drafthouse.store.board import Survey, Tenure

READERS = 16
TTL_S = 600.0
"""Of a run whose workers do not tell (`ExtractSettings.ttl_s`)."""
FAILURES = 200
CHEAP_S, LEASES_REST, OLDEST_S = 0.1, 20, 60.0
"""A listing of leases that took longer than the first is followed by a rest of so many times as long, up to the last
(or a quarter of the leases' time to live: a heartbeat has to be seen)."""
LOOKS_REST = 4
"""A look is followed by a rest of so many times as long: a large run on a busy machine takes a fifth of a core."""
RESTING = 10
"""A run that is complete is looked at this many times less often."""


class RunSource(Source):
    """The run `run` of `store`.

    Args:
        clock: of that store.
        history_s: how far back rates go.
    """

    def __init__(self, store: Store, run: str, clock: StoreClock, pace_s: float, history_s: float) -> None:
        super().__init__(f"run {run} in {store.url}", pace_s)
        self.store, self.run = store, run
        self._clock, self._history_s, self._busy_s = clock, history_s, pace_s
        self._facts = RunFacts(store, run)
        self._view: ExtractionView | None = None
        self._leases: Survey | None = None
        self._leases_at, self._leases_due = datetime.max.replace(tzinfo=UTC), 0.0
        self._ttl_s = TTL_S

    def view(self) -> ExtractionView | None:
        """What is known of it; None before it was ever reached."""
        return None if self._view is None else self._view.model_copy(update={"known": self.known})

    def look(self) -> None:
        began = time.monotonic()
        survey = self._survey()
        self._clock.seen(survey.newest)
        now = self._clock.now()
        with ThreadPoolExecutor(READERS, thread_name_prefix="run") as pool:
            self._facts.read(pool, survey)
            self._ttl_s = max((said.ttl_s or 0.0 for said in self._facts.words.values()), default=0.0) or TTL_S
            words = self._facts.words.items()
            held = {worker: (said.at, said.held) for worker, said in words if said.at > self._leases_at}
            grid = Grid(survey, self._facts.markers, now - timedelta(seconds=self._ttl_s), held)
            dead = grid.silent()
            places = ((lease.shard, lease.epoch) for lease in (*grid.leased, *dead))
            self._facts.ask_for_holders(pool, (place for place in places if place not in grid.told))
        self._view = self._shown(survey, grid, now, _failures(self._facts, survey, grid, dead))
        rest_s = self._busy_s * (RESTING if self._view.complete and not grid.leased else 1)
        self.pace_s = max(rest_s, LOOKS_REST * (time.monotonic() - began))

    def _survey(self) -> Survey:
        """A survey whose leases are as of a moment ago: how long ago depends on what listing them costs."""
        board, began = self._facts.board, time.monotonic()
        if self._leases is not None and began < self._leases_due:
            survey = board.survey(self._leases)
            if not self._facts.contradict(survey):
                return survey
        survey = board.survey()
        if self._view is not None and self._view.names and not survey.tenures and not survey.done:
            raise StoreError("nothing of the run is there any more", where=board.objects.url)
        if self._facts.contradict(survey):
            self._facts = RunFacts(self.store, self.run)
        took = time.monotonic() - began
        rest_s = 0.0 if took < CHEAP_S else min(LEASES_REST * took, OLDEST_S, self._ttl_s / 4)
        self._leases, self._leases_at, self._leases_due = survey, self._clock.now(), time.monotonic() + rest_s
        return survey

    def _shown(self, survey: Survey, grid: Grid, now: datetime, failures: Sequence[FailureView]) -> ExtractionView:
        facts = self._facts
        # Other work under leases (answers) does not say how many shards it has: those that were begun are all we know.
        whole = facts.shards
        shards, done = max(whole or 0, len(grid.names)), len(survey.done)
        free = shards - len(grid.names)
        begun = min((lease.begun for lease in survey.tenures), default=now).timestamp()
        workers = views(grid.leased, {**facts.holders, **grid.told}, facts, now)
        alive = any(worker.alive for worker in workers)
        # Where nobody says how many there are, whoever works on it may begin another one.
        complete = 0 < shards <= done and (whole is not None or (facts.unbounded and not alive))
        pace = facts.finished.pace(now.timestamp(), begun, self._history_s)
        rate, shards_per_s = pace.tokens_per_s, pace.shards_per_s
        if complete:
            rate = shards_per_s = None
        elif not alive:
            rate = shards_per_s = 0.0  # whatever the last minutes were like
        return ExtractionView(
            run=self.run,
            store=self.store.url,
            job=None,
            known=Known(),
            shards=shards,
            done=done,
            leased=len(grid.leased),
            stale=grid.stale,
            free=free,
            reclaims=len(survey.tenures) + len(grid.told) - len(grid.newest),
            tokens=facts.tokens,
            bytes=facts.bytes,
            rate=rate,
            shards_per_min=None if shards_per_s is None else 60 * shards_per_s,
            eta_s=0.0 if complete else (shards - done) / shards_per_s if shards_per_s and whole else None,
            grid=grid.text + "." * free,
            names=grid.names,
            workers=workers,
            failures=tuple(failures[:FAILURES]),
            failures_total=len(failures),
            rates=facts.finished.curve(now.timestamp(), begun, self._history_s),
            target=facts.target,
            complete=complete,
            damaged=tuple(sorted(facts.damaged)[:FAILURES]),
        )


def _failures(facts: RunFacts, survey: Survey, grid: Grid, dead: Sequence[Tenure]) -> list[FailureView]:
    """Leases that ended without a result, and workers that an error ended before they held one; newest first."""
    found = [
        FailureView(shard=shard, epoch=epoch, worker=worker, at=survey.failed.get((shard, epoch)), reason=reason)
        for (shard, epoch), (worker, reason) in facts.reasons.items()
    ]
    told = {failure.worker for failure in found}
    found += [
        FailureView(shard="", epoch=0, worker=worker, at=words.at, reason=words.failed)
        for worker, words in facts.words.items()
        if words.failed is not None and worker not in told
    ]
    for lease in dead:
        over = lease.shard in facts.markers or grid.newest[lease.shard].epoch > lease.epoch
        reason = "it fell silent, and another took over" if over else "it fell silent, and nobody has taken over yet"
        who = facts.holders.get((lease.shard, lease.epoch), "unknown")
        found.append(FailureView(shard=lease.shard, epoch=lease.epoch, worker=who, at=lease.seen, reason=reason))
    return sorted(found, key=lambda failure: failure.at.timestamp() if failure.at else 0.0, reverse=True)
