"""The views of the page: pure functions from a snapshot to the values of a template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drafthouse.dash import attention, keys, timeline
from drafthouse.dash.gone import GoneError
from drafthouse.dash.model import Snapshot
from drafthouse.dash.view_fleet import fleet, node
from drafthouse.dash.view_runs import (
    drawn_of,
    extraction,
    extraction_detail,
    extraction_line,
    latest,
    training,
    training_detail,
    training_line,
)
from drafthouse.dash.words import total

Values = dict[str, Any]


@dataclass(frozen=True)
class View:
    """A view of the navigation."""

    name: str
    path: str
    title: str
    build: Callable[[Snapshot, Mapping[str, str]], Values]
    detail: Callable[[Snapshot, str], Values] | None = None


def overview(snapshot: Snapshot, query: Mapping[str, str]) -> Values:
    """What needs attention, and a line for everything that runs."""
    gpus = [gpu for node in snapshot.nodes if node.state == "answers" for gpu in node.gpus]
    busy = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    running = [run for run in snapshot.extractions if attention.extraction_state(run) == "extracting"]
    return {
        "concerns": attention.concerns(snapshot),
        "words": attention.WORDS,
        "node_states": Counter(node.state for node in snapshot.nodes),
        "gpus": len(gpus),
        "utilization": sum(busy) / len(busy) / 100 if busy else None,
        "power": sum(gpu.power_w or 0 for gpu in gpus) or None,
        "extract_rate": sum(run.rate or 0 for run in running) if running else None,
        "extract_running": len(running),
        "training_now": [run for run in snapshot.trainings if run.state == "training"],
        "train_rate": total(
            latest(run, "tokens/s", "tokens_per_s") for run in snapshot.trainings if run.state == "training"
        ),
        "serve_rate": total(server.tokens_per_s for server in snapshot.servers if server.up),
        "servers_up": sum(server.up for server in snapshot.servers),
        "extractions": [extraction_line(snapshot, run) for run in snapshot.extractions],
        "trainings": [training_line(snapshot, run) for run in snapshot.trainings],
        "nothing": not (
            snapshot.nodes
            or snapshot.jobs
            or snapshot.extractions
            or snapshot.trainings
            or snapshot.servers
            or snapshot.stores
        ),
    }


def jobs(snapshot: Snapshot, query: Mapping[str, str]) -> Values:
    """Every job with its lives."""
    order = sorted(snapshot.jobs, key=lambda job: (job.epoch is None, job.name))
    return {"jobs": [(job, timeline.lives(job.lives, snapshot.at)) for job in order]}


def serving(snapshot: Snapshot, query: Mapping[str, str]) -> Values:
    """All servers."""
    return {"servers": snapshot.servers}


def serving_detail(snapshot: Snapshot, key: str) -> Values:
    """One server with its curves."""
    server = keys.find_server(snapshot, key)
    if server is None:
        raise GoneError(f"there is no server '{key}'")
    return {"server": server, "title": server.name, "charts": drawn_of(server.series)}


def stores(snapshot: Snapshot, query: Mapping[str, str]) -> Values:
    """All stores."""
    return {"stores": snapshot.stores}


VIEWS = (
    View("overview", "/", "Overview", overview),
    View("fleet", "/fleet", "Fleet", fleet, node),
    View("jobs", "/jobs", "Jobs", jobs),
    View("extraction", "/extraction", "Extraction", extraction, extraction_detail),
    View("training", "/training", "Training", training, training_detail),
    View("serving", "/serving", "Serving", serving, serving_detail),
    View("stores", "/stores", "Stores", stores),
)


def marks(snapshot: Snapshot) -> Counter[str]:
    """How many concerns each view has, for the navigation."""
    found = attention.concerns(snapshot)
    counts = Counter[str](one.view for one in found)
    counts["overview"] = len(found)
    return counts
