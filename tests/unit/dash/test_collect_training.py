"""Trainings by what their copies in a store say, and by their own folders."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafthouse.dash.collect.clock import StoreClock
from drafthouse.dash.collect.curve import Curve
from drafthouse.dash.collect.training import SILENT_S, FolderSource, TrainingSource, view_of
from drafthouse.dash.model import TrainingView
from drafthouse.drafter import TrainResult
from drafthouse.drafter.checkpoint import TrainingState
from drafthouse.drafter.metrics import MetricsLog
from drafthouse.loop import checkpoints
from drafthouse.loop.checkpoints import Copies
from drafthouse.store import Store
from drafthouse.store.keys import numbered
from tests.patience import until


def row(step: int, loss: float | None = None) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": 100 * step,
        "loss": 1 / step if loss is None else loss,
        "loss_mean": 1 / step,
        "lr": 1e-3,
        "noise": 0.5,
        "accuracy": [0.6, 0.4],
        "mean_streak": 1.5,
        "tokens_per_s": 1000.0,
        "seconds": step / 4,
        "gpu_power_w": 600.0,
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "TICK_S", 0.01)
    monkeypatch.setattr(checkpoints, "PROGRESS_EVERY_S", 0.01)
    monkeypatch.setattr(checkpoints, "METRICS_EVERY_S", 0.01)


def source(store: Store) -> TrainingSource:
    return TrainingSource(store, "ours", StoreClock(store.url), 2.0)


def look(one: TrainingSource | FolderSource) -> TrainingView | None:
    one.ask()
    view = one.view()
    assert view is None or view.known.error is None
    return view


def seen(one: TrainingSource, condition: Callable[[TrainingView], bool]) -> TrainingView:
    """The first view that fulfils it."""

    def asked() -> TrainingView:
        view = look(one)
        assert view is not None
        assert condition(view), view
        return view

    return until(asked, "a view of it")


def test_a_training_as_its_copies_tell_it(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    log = MetricsLog(folder / "metrics.jsonl", 0)
    one = source(store)
    assert look(one) is None, "nothing was told yet"
    who = {"worker": "n1-7", "job": "train-qwen", "node": "n1"}
    with Copies(store, "ours", folder, {"a": 1}, steps=20, keep=1, who=who) as copies:
        copies.began(TrainingState(), None)
        for step in range(1, 9):
            log.write(row(step))
            copies.stepped(row(step))
        view = seen(one, lambda view: view.step == 8 and len(view.series) > 5 and len(view.series[0].x) == 8)
        assert (view.recipe, view.job, view.node, view.epoch) == ("ours", "train-qwen", "n1", 0)
        assert (view.state, view.steps, view.tokens, view.loss) == ("training", 20, 800, 1 / 8)
        assert view.eta_s == pytest.approx(3.0)
        assert view.accuracy == (0.6, 0.4)
        assert (view.latest["lr"], view.latest["gpu_power_w"]) == (1e-3, 600.0)
        assert view.age_s is not None
        assert view.age_s < 10
        log.write({"step": 8, "evaluation": {"acceptance": 2.75}})
        evaluated = seen(one, lambda view: bool(view.evaluations))
        assert [(point.step, point.chain) for point in evaluated.evaluations] == [(8, 2.75)]
        result = TrainResult(
            model=None,  # type: ignore[arg-type]
            steps=8,
            tokens=800,
            seconds=1.0,
            loss=0.1,
            drafter=None,
            metrics=folder / "metrics.jsonl",
            resumed_from=None,
            stopped="asked",
            evaluations=[],
        )
        copies.finish(result)
    assert seen(one, lambda view: view.state != "training").state == "stopped"


def test_the_newest_life_counts(store: Store) -> None:
    for epoch in (2, 10):
        said = {"step": epoch, "steps": 50, "tokens": 1, "loss": 1.0, "state": "training", "resumed_from": None}
        store.put(f"drafters/ours/progress/{epoch}", json.dumps(said).encode())
        store.put(f"drafters/ours/metrics/{epoch}.jsonl", json.dumps(row(epoch)).encode() + b"\n")
    store.put("drafters/ours/progress/stranger", b"{}")
    one = source(store)
    view = look(one)
    assert view is not None
    assert (view.epoch, view.step) == (10, 10)
    later = {"step": 10, "steps": 50, "tokens": 1, "loss": None, "state": "training", "resumed_from": 10}
    store.put("drafters/ours/progress/11", json.dumps(later).encode())
    view = look(one)
    assert view is not None
    assert (view.epoch, view.resumed_from, view.loss, view.series) == (11, 10, None, ())


def test_a_training_that_is_alive_says_so_although_no_step_ends(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "ALIVE_EVERY_S", 0.05)
    folder = tmp_path / "work"
    folder.mkdir()
    with Copies(store, "ours", folder, {}, steps=20, keep=1) as copies:
        copies.began(TrainingState(), None)
        path = store.local_path("drafters/ours/progress/0")
        assert path is not None
        seen(source(store), lambda view: True)
        first = path.stat().st_mtime_ns
        until(lambda: path.stat().st_mtime_ns != first, "another word")


def test_silence_is_told() -> None:
    curve = Curve()
    curve.feed(json.dumps(row(5)).encode() + b"\n")
    said = {"step": 5, "steps": 9, "state": "training", "tokens": 3, "loss": 0.5}
    assert view_of("a", "s", 0, said, curve, SILENT_S - 1).state == "training"
    quiet = view_of("a", "s", 0, said, curve, SILENT_S + 1)
    assert (quiet.state, quiet.eta_s, quiet.step) == ("silent", None, 5)
    assert view_of("a", "s", 0, said | {"state": "out of time"}, curve, 1e6).state == "out of time"
    ahead = view_of("a", "s", 0, said | {"step": 4}, curve, 0.0)
    assert (ahead.step, ahead.loss) == (5, 0.2), "the curve is ahead of what was said"


def test_a_store_that_loses_it_keeps_the_last_truth(store: Store, tmp_path: Path) -> None:
    store.put("drafters/ours/metrics/0.jsonl", json.dumps(row(3)).encode() + b"\n")
    one = source(store)
    look(one)
    shutil.rmtree(tmp_path / "store")
    one.ask()
    view = one.view()
    assert view is not None
    assert view.step == 3
    assert "nothing of the training is there any more" in str(view.known.error)


class TestFolder:
    def test_rows_are_read_as_they_come(self, tmp_path: Path) -> None:
        file = tmp_path / "metrics.jsonl"
        one = FolderSource(file, "ours", "file:///s", 4, 2.0)
        assert look(one) is None
        log = MetricsLog(file, 0)
        for step in (1, 2):
            log.write(row(step))
        view = look(one)
        assert view is not None
        assert (view.step, view.steps, view.state, view.store) == (2, 4, "training", "file:///s")
        log.close()
        log = MetricsLog(file, 1)  # resumed: what was written beyond step 1 is dropped
        for step in (2, 3, 4):
            log.write(row(step, loss=9.0))
        view = look(one)
        assert view is not None
        loss = next(series for series in view.series if series.name == "loss")
        assert (loss.x, loss.y) == ((1, 2, 3, 4), (1.0, 9.0, 9.0, 9.0))
        assert view.state == "finished"

    def test_one_that_stopped_half_way_is_silent(self, tmp_path: Path) -> None:
        file = tmp_path / "metrics.jsonl"
        MetricsLog(file, 0).write(row(1))
        os.utime(file, (time.time() - 500, time.time() - 500))
        view = look(FolderSource(file, "ours", "s", 4, 2.0))
        assert view is not None
        assert view.state == "silent"
        assert view.age_s == pytest.approx(500, abs=5)

    def test_a_file_that_cannot_be_read_is_one_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").mkdir()
        one = FolderSource(tmp_path / "metrics.jsonl", "ours", "s", 4, 2.0)
        one.ask()
        assert str(tmp_path) in str(one.known.error)


def test_a_damaged_progress_hides_no_curve(store: Store) -> None:
    one = source(store)
    objects = store.child("drafters/ours")
    rows = "".join(json.dumps(row(step)) + "\n" for step in range(1, 4))
    objects.put(f"metrics/{numbered(1)}.jsonl", rows.encode())
    objects.put(f"progress/{numbered(1)}", b"{cut")
    view = look(one)
    assert view is not None
    assert (view.step, len(view.series[0].x)) == (3, 3)
    [sentence] = view.damaged
    assert f"progress/{numbered(1)}: this object is not the JSON" in sentence
    objects.put(f"progress/{numbered(1)}", b'{"state": "training", "step": 3, "steps": 20}')
    view = look(one)
    assert view is not None
    assert (view.damaged, view.steps) == ((), 20)


@pytest.mark.parametrize("odd", ["1e400", "-1e400", "NaN", "1" + 400 * "0"])
def test_numbers_that_are_none_stop_no_training(store: Store, odd: str) -> None:
    one = source(store)
    objects = store.child("drafters/ours")
    rows = [json.dumps(row(1)), f'{{"step": {odd}, "loss": 1}}', f'{{"step": 2, "loss": {odd}, "lr": {odd}}}']
    objects.put(f"metrics/{numbered(1)}.jsonl", ("\n".join(rows) + "\n").encode())
    objects.put(f"progress/{numbered(1)}", f'{{"step": {odd}, "steps": {odd}, "tokens": {odd}}}'.encode())
    view = look(one)
    assert view is not None
    assert (view.step, view.loss, view.steps) == (2, None, None)
    assert "Infinity" not in view.model_dump_json()
