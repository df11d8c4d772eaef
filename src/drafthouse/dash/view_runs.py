"""The views of extractions and trainings: a line each, and one of them with grid and curves."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from drafthouse.dash import attention, bars, charts, keys, shardgrid
from drafthouse.dash.gone import GoneError
from drafthouse.dash.model import ExtractionView, Series, Snapshot, TrainingView, WorkerView

SHOWN_FAILURES = 20
# Series that belong into one picture; the bars of accuracy show every slot as it is now.
_TOGETHER = {
    "loss": ("loss", "mean loss"),
    "streak": ("mean streak", "expected streak"),
    "accuracy over time": ("accuracy slot 1", "accuracy slot 2", "accuracy slot 4", "accuracy slot 8"),
}
_SLOT = "accuracy slot "

Values = dict[str, Any]


def extraction(snapshot: Snapshot, query: Mapping[str, str]) -> Values:
    """All extractions."""
    return {"extractions": [extraction_line(snapshot, run) for run in snapshot.extractions]}


def extraction_detail(snapshot: Snapshot, key: str) -> Values:
    """One extraction: grid, rate, workers, failures."""
    run = keys.find_extraction(snapshot, key)
    if run is None:
        raise GoneError(f"there is no extraction '{key}'")
    return {
        **extraction_line(snapshot, run),
        "title": run.run,
        "picture": shardgrid.picture(run.grid),
        "legend": shardgrid.legend(run.grid),
        "rates": charts.line_chart("rate", "Rate", run.rates.unit, [run.rates]) if run.rates else None,
        "workers": sorted(
            ((worker, worker_state(worker, run)) for worker in run.workers),
            key=lambda one: (("waits", "silent", "works", "idle", "ended").index(one[1]), one[0].worker),
        ),
        "failures": run.failures[:SHOWN_FAILURES],
        "more_failures": run.failures[SHOWN_FAILURES:],
    }


def shard(snapshot: Snapshot, key: str, index: int) -> Values:
    """One cell of the grid, in words."""
    run = keys.find_extraction(snapshot, key)
    if run is None or not 0 <= index < len(run.grid):
        raise GoneError(f"there is no shard {index} of extraction '{key}'")
    name = run.names[index] if index < len(run.names) else None
    return {
        "index": index,
        "of": len(run.grid),
        "name": name,
        "word": shardgrid.STATES.get(run.grid[index], ("free", "free"))[1],
        "holder": next((one.worker for one in run.workers if name and name in one.shards), None),
        "failures": [failure for failure in run.failures if failure.shard == name][:3],
    }


def training(snapshot: Snapshot, query: Mapping[str, str]) -> Values:
    """All trainings."""
    return {"trainings": [training_line(snapshot, run) for run in snapshot.trainings]}


def training_detail(snapshot: Snapshot, key: str) -> Values:
    """One training: its curves, accuracy by slot, acceptance."""
    run = keys.find_training(snapshot, key)
    if run is None:
        raise GoneError(f"there is no training '{key}'")
    evaluations = _evaluations(run)
    # the same as a series would be without the difference between chain and tree
    series = [one for one in run.series if not (evaluations and one.name == "acceptance length")]
    drawn = [charts.bar_chart("slots", "Accuracy", run.accuracy, "slot"), evaluations, *drawn_of(series)]
    return {**training_line(snapshot, run), "title": run.recipe, "charts": [one for one in drawn if one]}


def worker_state(worker: WorkerView, run: ExtractionView) -> str:
    """`silent` (`ended`, where nothing was left to do), `waits` (for disk, memory or uploads), `idle` (others hold all
    that is left) or `works`."""
    if not worker.alive:
        return "ended" if attention.extraction_state(run) == "complete" else "silent"
    if worker.waiting == "leases":
        return "idle"
    return "waits" if worker.waiting else "works"


def extraction_line(snapshot: Snapshot, run: ExtractionView) -> Values:
    share, state = run.done / run.shards if run.shards else 0.0, attention.extraction_state(run)
    return {
        "run": run,
        "key": keys.extraction(snapshot, run),
        "state": state,
        "rate": None if state == "complete" else run.rate,
        "eta_s": None if state == "complete" else run.eta_s,
        "share": share,
        "bar": bars.bar(share),
        "alive": sum(worker.alive for worker in run.workers),
        "waiting": Counter(worker.waiting for worker in run.workers if worker.alive and worker.waiting),
    }


def training_line(snapshot: Snapshot, run: TrainingView) -> Values:
    share = run.step / run.steps if run.steps else None
    return {
        "run": run,
        "key": keys.training(snapshot, run),
        "share": share,
        "bar": bars.bar(share),
        "heard": attention.heard(run),
        "streak": latest(run, "mean streak", "mean_streak"),
        "rate": latest(run, "tokens/s", "tokens_per_s") if run.state == "training" else None,
        "evaluation": run.evaluations[-1] if run.evaluations else None,
    }


def latest(run: TrainingView, series: str, row: str) -> float | None:
    """The newest value: of the row that was logged last, else of the series."""
    if row in run.latest:
        return run.latest[row]
    found = next((one for one in run.series if one.name == series), None)
    return next((y for y in reversed(found.y) if y is not None), None) if found else None


def _evaluations(run: TrainingView) -> charts.Chart | None:
    steps = tuple(float(one.step) for one in run.evaluations)
    lines = [
        Series(name=name, unit="tokens a pass", unit_x="step", x=steps, y=values)
        for name, values in (
            ("tree", tuple(one.tree for one in run.evaluations)),
            ("chain", tuple(one.chain for one in run.evaluations)),
        )
    ]
    return charts.line_chart("acceptance", "Acceptance length", "tokens a pass", lines)


def drawn_of(series: Sequence[Series]) -> list[charts.Chart]:
    """A chart for each series, those of `_TOGETHER` in one."""
    by_name = {one.name: one for one in series}
    drawn: list[charts.Chart | None] = []
    for one in series:
        title = next((title for title, names in _TOGETHER.items() if one.name in names), None)
        if title is None and one.name.startswith(_SLOT):
            continue
        if title is None:
            drawn.append(charts.line_chart(_slug(one.name), one.name, one.unit, [one]))
            continue
        names = [name for name in _TOGETHER[title] if name in by_name]
        if one.name == names[0]:
            lines = [by_name[name].model_copy(update={"name": name.removeprefix("accuracy ")}) for name in names]
            drawn.append(charts.line_chart(_slug(title), title, one.unit, lines))
    return [chart for chart in drawn if chart]


def _slug(name: str) -> str:
    """An id for the page, from a name that a source chose."""
    return "c" + hashlib.sha256(name.encode()).hexdigest()[:8]
