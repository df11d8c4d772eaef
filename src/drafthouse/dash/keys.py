"""What runs are called in URLs: by name, and by name and store where two stores have a run of one name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from drafthouse.dash.model import ExtractionView, JobView, NodeView, ServerView, Snapshot, TrainingView


def extraction(snapshot: Snapshot, run: ExtractionView) -> str:
    """The key of an extraction in this snapshot."""
    return _key(run.run, run.store, (other.run for other in snapshot.extractions))


def training(snapshot: Snapshot, run: TrainingView) -> str:
    """The key of a training in this snapshot."""
    return _key(run.recipe, run.store, (other.recipe for other in snapshot.trainings))


def find_extraction(snapshot: Snapshot, key: str) -> ExtractionView | None:
    """The extraction of `key`, in its short or long form, so that a link holds when a second run appears."""
    return next((run for run in snapshot.extractions if key in (run.run, _long(run.run, run.store))), None)


def find_training(snapshot: Snapshot, key: str) -> TrainingView | None:
    """The training of `key`."""
    return next((run for run in snapshot.trainings if key in (run.recipe, _long(run.recipe, run.store))), None)


def find_node(snapshot: Snapshot, key: str) -> NodeView | None:
    """The node of that name."""
    return next((node for node in snapshot.nodes if node.name == key), None)


def find_job(snapshot: Snapshot, key: str) -> JobView | None:
    """The job of that name."""
    return next((job for job in snapshot.jobs if job.name == key), None)


def find_server(snapshot: Snapshot, key: str) -> ServerView | None:
    """The server of that name."""
    return next((server for server in snapshot.servers if server.name == key), None)


def _key(name: str, store: str, names: Iterable[str]) -> str:
    return name if sum(1 for other in names if other == name) == 1 else _long(name, store)


def _long(name: str, store: str) -> str:
    return f"{name}@{hashlib.sha256(store.encode()).hexdigest()[:6]}"
