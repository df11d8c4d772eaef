"""What an operator should look at first: everything that is wrong or held up, worst first, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from drafthouse.dash import keys, words
from drafthouse.dash.bars import HOT_C
from drafthouse.dash.model import ExtractionView, Known, Snapshot, TrainingView

Severity = Literal["bad", "warn"]
View = Literal["fleet", "jobs", "extraction", "training", "serving", "stores"]
NAMED = 3
"""Damaged objects of one thing that are named, each for itself."""
WORDS: dict[Severity, str] = {"bad": "problem", "warn": "watch"}


@dataclass(frozen=True)
class Concern:
    """One thing that needs attention.

    Attributes:
        view: the view that tells more, and `key` what of it (None: the view itself).
        subject: its name.
        what: the sentence after the name.
        since: when it began, as far as is known.
    """

    severity: Severity
    view: View
    key: str | None
    subject: str
    what: str
    since: datetime | None = None


def concerns(snapshot: Snapshot) -> list[Concern]:
    """Everything that needs attention, what is wrong before what is held up."""
    found = [
        *_sources(snapshot),
        *_nodes(snapshot),
        *_jobs(snapshot),
        *_extractions(snapshot),
        *_trainings(snapshot),
        *_servers(snapshot),
        *_stores(snapshot),
    ]
    return sorted(found, key=lambda one: one.severity != "bad")


def _sources(snapshot: Snapshot) -> Iterator[Concern]:
    if snapshot.fleet.error:
        yield Concern("warn", "fleet", None, "The fleet", snapshot.fleet.error, snapshot.fleet.answered)


def _nodes(snapshot: Snapshot) -> Iterator[Concern]:
    for node in snapshot.nodes:
        if node.state == "silent":
            yield Concern("bad", "fleet", node.name, node.name, f"silent{_because(node.error)}", node.last_seen)
        elif node.state == "unknown" and node.error:
            yield Concern("warn", "fleet", node.name, node.name, f"never answered{_because(node.error)}")
        hot = [gpu for gpu in node.gpus if gpu.temperature_c is not None and gpu.temperature_c >= HOT_C]
        if hot and node.state == "answers":
            hottest = max(hot, key=lambda gpu: gpu.temperature_c or 0)
            yield Concern(
                "warn", "fleet", node.name, node.name, f"GPU {hottest.index} is at {hottest.temperature_c:.0f} °C"
            )
        if node.disk_bytes and node.disk_free_bytes is not None and node.disk_free_bytes < 0.05 * node.disk_bytes:
            free = words.size(node.disk_free_bytes)
            yield Concern("warn", "fleet", node.name, node.name, f"only {free} free on its disk")


def _jobs(snapshot: Snapshot) -> Iterator[Concern]:
    for job in snapshot.jobs:
        yield from _damaged("jobs", job.name, job.name, job.damaged)
        if words.tone(job.status) != "bad":
            continue
        last = job.lives[0] if job.lives else None
        since = last.ended if last else job.since
        yield Concern(
            "bad", "jobs", job.name, job.name, f"{job.status}{_because(last.reason if last else None)}", since
        )


def _extractions(snapshot: Snapshot) -> Iterator[Concern]:
    for run in snapshot.extractions:
        key = keys.extraction(snapshot, run)
        yield from _source_error("extraction", key, run.run, run.known)
        yield from _damaged("extraction", key, run.run, run.damaged)
        state = extraction_state(run)
        if state == "complete":
            continue
        if state == "nobody works" and run.shards > run.done:
            what = f"nobody works on it, {run.shards - run.done:,} of {run.shards:,} shards are left"
            yield Concern("bad", "extraction", key, run.run, what)
        if run.stale:
            noun = "shard is" if run.stale == 1 else "shards are"
            yield Concern(
                "warn", "extraction", key, run.run, f"{run.stale:,} {noun} stale, waiting to be claimed again"
            )
        for worker in run.workers:
            # towards the end others hold all that is left: nothing is wrong with waiting for leases
            if worker.alive and worker.waiting and worker.waiting != "leases":
                what = f"worker {worker.worker} waits for {worker.waiting}"
                yield Concern("warn", "extraction", key, run.run, what)
        if run.failures and run.failures_total:
            newest = run.failures[0]
            noun = "lease" if run.failures_total == 1 else "leases"
            what = f"{run.failures_total:,} {noun} failed, the last: {newest.reason}"
            yield Concern("warn", "extraction", key, run.run, what, newest.at)


def _trainings(snapshot: Snapshot) -> Iterator[Concern]:
    for run in snapshot.trainings:
        key = keys.training(snapshot, run)
        yield from _source_error("training", key, run.recipe, run.known)
        yield from _damaged("training", key, run.recipe, run.damaged)
        if run.state == "silent":
            what = f"nothing heard of it since step {run.step:,}"
            yield Concern("bad", "training", key, run.recipe, what, heard(run))
        elif run.state == "out of time":
            yield Concern("warn", "training", key, run.recipe, f"ended at step {run.step:,} because its time was over")


def _servers(snapshot: Snapshot) -> Iterator[Concern]:
    for server in snapshot.servers:
        if words.reached(server) == "down":
            error = server.known.error or "does not answer"
            yield Concern("bad", "serving", server.name, server.name, f"down: {error}", server.known.answered)
        elif server.up and server.waiting and server.running is not None and server.waiting > max(8.0, server.running):
            what = f"{server.waiting:,.0f} requests wait, {server.running:,.0f} run"
            yield Concern("warn", "serving", server.name, server.name, what)


def _stores(snapshot: Snapshot) -> Iterator[Concern]:
    for store in snapshot.stores:
        if words.reached(store) == "down":
            error = store.known.error or "does not answer"
            yield Concern("bad", "stores", None, store.url, f"down: {error}", store.known.answered)


def _source_error(view: View, key: str, subject: str, known: Known) -> Iterator[Concern]:
    if known.error:
        yield Concern("bad", view, key, subject, f"cannot be read: {known.error}", known.answered)


def _damaged(view: View, key: str, subject: str, damaged: tuple[str, ...]) -> Iterator[Concern]:
    for one in damaged[:NAMED]:
        yield Concern("bad", view, key, subject, f"is damaged: {one}")
    if len(damaged) > NAMED:
        yield Concern("bad", view, key, subject, f"is damaged: {len(damaged) - NAMED:,} more objects")


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def extraction_state(run: ExtractionView) -> str:
    """`complete`, `extracting`, `nobody works` (shards are left and no worker lives) or `not begun`."""
    if run.complete:
        return "complete"
    if any(worker.alive for worker in run.workers):
        return "extracting"
    return "nobody works" if run.workers or run.done or run.leased or run.stale else "not begun"


def heard(run: TrainingView) -> datetime | None:
    """When something was last heard of a training."""
    if run.age_s is None or run.known.answered is None:
        return run.known.answered
    return run.known.answered - timedelta(seconds=run.age_s)
