"""The collector over real stores, workers and files: what it sees, survives and leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafthouse.dash import collector as module
from drafthouse.dash.collect.source import Source
from drafthouse.dash.collector import Collector
from drafthouse.dash.model import ExtractionView, Snapshot
from drafthouse.dash.remember import recall, remember
from drafthouse.dash.settings import DashSettings
from drafthouse.errors import ConfigError, StatesError, StoreError
from drafthouse.states import ExtractSettings, presence, run_worker
from drafthouse.store import Board, Store
from tests.doubles.engine_metrics import engine_double
from tests.doubles.extraction import MemoryCorpus, TinyTaps
from tests.patience import until

ROOT = Path(__file__).parents[3]


class Worker:
    """An extraction worker in a process of its own. One that is `held` has done a shard and stands still in its
    second."""

    def __init__(self, url: str, node: str, *, held: bool) -> None:
        words = [sys.executable, "-m", "tests.doubles.extract_worker", url, "states", "3", "0"]
        words += ["4", f"{url}.never"] if held else []
        environment = {**os.environ, "DRAFTHOUSE_NODE": node, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def workers() -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(url: str, node: str, *, held: bool = False) -> Worker:
        started.append(Worker(url, node, held=held))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def seen(collector: Collector, condition: Callable[[Snapshot], object]) -> Snapshot:
    """The first snapshot that fulfils it."""

    def look() -> Snapshot:
        snapshot = collector.snapshot()
        assert condition(snapshot), snapshot.extractions
        return snapshot

    return until(look, "a snapshot of it")


def run_of(snapshot: Snapshot) -> ExtractionView:
    [run] = snapshot.extractions
    return run


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every path below a folder with size and times."""
    return {
        str(path.relative_to(folder)): ((stat := path.stat()).st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for path in sorted(folder.rglob("*"))
    }


def played_run(url: str, shards: int = 3) -> Board:
    """A run with one shard done and one leased."""
    board = Board(Store.open(url), "states")
    board.bind({"shards": shards, "target": "t"})
    first = board.claim(["a", "b"], "w1")
    assert first is not None
    board.objects.put(board.data_key(first), b"data")
    assert board.commit(first, size=4, sha256="", tokens=100, extra={})
    assert board.claim(["a", "b"], "w1") is not None
    board.present("w1", {"node": "n1", "ttl_s": 600.0})
    return board


def test_a_killed_worker_and_its_heir_are_seen_live(tmp_path: Path, workers: Callable[..., Worker]) -> None:
    url = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    settings = DashSettings(stores=(url,), refresh_s=0.2)
    first = workers(url, "n1", held=True)
    with Collector(settings) as collector:
        snapshot = seen(collector, lambda one: run_of(one).done == 1 and run_of(one).leased and run_of(one).workers)
        assert run_of(snapshot).workers[0].node == "n1"
        assert [(node.name, node.state) for node in snapshot.nodes] == [("n1", "answers")]
        first.kill()
        seen(collector, lambda one: run_of(one).stale == 1 and not run_of(one).workers[0].alive)
        workers(url, "n2")
        end = seen(collector, lambda one: run_of(one).complete)
    run = run_of(end)
    assert (run.done, run.reclaims, run.grid.count("r")) == (6, 1, 1)
    [failure] = run.failures
    assert failure.reason == "it fell silent, and another took over"
    assert failure.worker.startswith("n1-")
    assert {worker.node for worker in run.workers} == {"n1", "n2"}


def test_a_worker_that_fails_and_one_that_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "EVERY_S", 0.1)
    store = Store.open(str(tmp_path / "store"))
    settings = ExtractSettings(layer_ids=(0, 2), rows=2, scratch=str(tmp_path))
    broken = TinyTaps()

    def spoil(out: torch.Tensor) -> None:
        out.fill_(float("nan"))

    broken.spoil = spoil
    with pytest.raises(StatesError) as caught:
        run_worker(store, "states", MemoryCorpus(), broken, settings, "broken")
    collector = Collector(DashSettings(stores=(str(tmp_path / "store"),)))
    run = run_of(collector.refresh_now())
    assert {(failure.worker, failure.reason) for failure in run.failures} == {("broken", str(caught.value))}
    assert all(failure.shard and failure.epoch == 1 for failure in run.failures)
    assert (run.workers[0].ended, run.workers[0].alive, run.done) == (True, False, 0)
    full = dict.fromkeys(("disk_high", "disk_low", "shm_high", "shm_low"), 1e-9)
    waits = settings.model_copy(update={**full, "disk_wait_s": 5.0})
    endless = MemoryCorpus()
    endless.manifest = replace(endless.manifest, tokens=2**50)  # no disk holds so many states
    errors: list[Exception] = []

    def work() -> None:
        try:
            run_worker(store, "states", endless, TinyTaps(), waits, "waits")
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def seen_waiting() -> bool:
        found = {worker.worker: worker for worker in run_of(collector.refresh_now()).workers}
        return found["waits"].waiting == "disk" and found["waits"].alive

    until(seen_waiting, "a worker that waits for the disk", unless=lambda: errors)
    thread.join(120)
    run = run_of(collector.refresh_now())
    assert ("waits", "", str(errors[0])) in {(one.worker, one.shard, one.reason) for one in run.failures}


def test_it_writes_nothing_to_a_store(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    played_run(url)
    Store.open(url).put("drafters/ours/progress/0", json.dumps({"step": 1, "state": "training"}).encode())
    before = tree(tmp_path / "store")
    collector = Collector(DashSettings(stores=(url,)))
    for _ in range(3):
        snapshot = collector.refresh_now()
    assert run_of(snapshot).grid == "dl."
    assert snapshot.trainings[0].step == 1
    assert tree(tmp_path / "store") == before


def test_a_store_that_disappears_and_comes_back(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    board = played_run(url)
    collector = Collector(DashSettings(stores=(url,)))
    known = collector.refresh_now()
    assert known.stores[0].up
    assert known.stores[0].latency_ms is not None
    (tmp_path / "store").rename(tmp_path / "away")
    gone = collector.refresh_now()
    assert not gone.stores[0].up
    assert "there is no such folder" in str(gone.stores[0].known.error)
    assert run_of(gone).known.error is not None
    assert run_of(gone).known.answered == run_of(known).known.answered
    assert (run_of(gone).grid, run_of(gone).tokens) == (run_of(known).grid, 100)
    assert gone.sequence > known.sequence
    (tmp_path / "away").rename(tmp_path / "store")
    board.present("w1", {"node": "n1", "ttl_s": 600.0, "waiting": "disk"})
    back = collector.refresh_now()
    assert run_of(back).known.error is None
    assert run_of(back).workers[0].waiting == "disk"


def test_a_page_that_is_started_anew_shows_the_last_known_truth(tmp_path: Path) -> None:
    url, file = str(tmp_path / "store"), tmp_path / "last" / "known.json"
    played_run(url)
    settings = DashSettings(stores=(url,), remember=file, refresh_s=0.2)
    with Collector(settings) as collector:
        last = seen(collector, lambda one: one.extractions)
    assert recall(file) == collector.snapshot()
    assert file.stat().st_mode & 0o077 == 0, "names of nodes and jobs are nobody else's"
    assert [path.name for path in file.parent.iterdir()] == ["known.json"]
    shutil.rmtree(tmp_path / "store")
    anew = Collector(settings)
    assert run_of(anew.snapshot()).grid == run_of(last).grid, "before anything was asked"
    snapshot = anew.refresh_now()
    assert run_of(snapshot).grid == run_of(last).grid
    assert "not reached since the page was started" in str(run_of(snapshot).known.error)
    assert run_of(snapshot).known.answered == run_of(last).known.answered
    assert not snapshot.stores[0].up
    assert snapshot.sequence > last.sequence
    (tmp_path / "store").mkdir()
    assert anew.refresh_now().extractions == (), "now it is known that the run is gone"


def test_a_file_of_another_version_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    file.write_text('{"at": "2020-01-01T00:00:00Z", "surprise": 1}')
    assert recall(file) is None
    collector = Collector(DashSettings(stores=(str(tmp_path),), remember=file))
    assert collector.snapshot().sequence == 0


def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="the last known truth cannot be used"):
        Collector(DashSettings(stores=(str(tmp_path),), remember=tmp_path / "folder"))
    (tmp_path / "file").touch()
    empty = Collector(DashSettings(stores=(str(tmp_path),))).snapshot()
    with pytest.raises(ConfigError, match="the last known truth cannot be used"):
        remember(tmp_path / "file" / "below", empty)


def test_a_store_that_cannot_be_opened_is_told_at_once() -> None:
    with pytest.raises(StoreError, match="the scheme 'ftp:' is not known"):
        Collector(DashSettings(stores=("ftp://x/y",)))


def test_a_source_that_hangs_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_AROUND_S", 0.05)
    monkeypatch.setattr(module, "_JOIN_S", 0.1)
    url, never = str(tmp_path / "store"), threading.Event()
    board = played_run(url)
    with engine_double() as engine:
        collector = Collector(DashSettings(stores=(url,), servers={"one": engine.url}, refresh_s=0.2))
        collector.refresh_now()
        server = next(source for key, source in collector._sources.all.items() if key[0] == "server")

        def hang() -> None:
            never.wait(60)

        monkeypatch.setattr(server, "look", hang)
        monkeypatch.setattr(server, "_limit_s", 0.3)
        try:
            with collector:
                hung = seen(collector, lambda one: one.servers[0].known.error is not None)
                assert hung.servers[0].known.error == "server one: no answer within 0.3 s"
                assert not hung.servers[0].up
                assert hung.servers[0].model == "qwen", "what it last said"
                board.present("w1", {"waiting": "memory"})
                seen(collector, lambda one: run_of(one).workers[0].waiting == "memory")
                began = time.perf_counter()
                for _ in range(100):
                    collector.snapshot()
                assert time.perf_counter() - began < 5, "had each waited for the server, it would be half a minute"
        finally:
            never.set()


def test_a_defect_in_a_source_is_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Source):
        def look(self) -> None:
            raise ZeroDivisionError("by zero")

    broken = Broken("odd one", 1.0)
    broken.ask()
    assert broken.known.error == "odd one: it cannot be read (ZeroDivisionError: by zero)"
    assert broken.known.answered is None
    assert "odd one" in caplog.text


def test_the_number_rises_with_changes_and_not_with_looks(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    board = Board(Store.open(url), "states")
    board.bind({"shards": 2, "target": "t"})
    collector = Collector(DashSettings(stores=(url,)))
    assert not collector.snapshot().settled
    first = collector.refresh_now()
    assert first.settled
    second = collector.refresh_now()
    assert second.sequence == first.sequence
    assert second.at > first.at
    assert board.claim(["a"], "w") is not None
    assert collector.refresh_now().sequence > second.sequence


def test_what_is_found_later_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthouse.dash.collect.stores.PACE_S", 0.1)
    url = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    with Collector(DashSettings(stores=(url,), refresh_s=0.2)) as collector:
        seen(collector, lambda one: one.stores and one.stores[0].up)
        assert collector.snapshot().extractions == ()
        played_run(url)
        seen(collector, lambda one: one.extractions)
        Store.open(url).put("drafters/late/progress/3", b'{"step": 7, "state": "training"}')
        later = seen(collector, lambda one: one.trainings)
    assert (later.trainings[0].recipe, later.trainings[0].epoch) == ("late", 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dash-")], "all threads have ended"


def test_a_run_folder(run: Path) -> None:
    """The finished run of the loop: its states, and its trainings by their own folders."""
    snapshot = Collector(DashSettings(runs=(run,))).refresh_now()
    answers, states = snapshot.extractions
    assert (answers.run, states.run) == ("answers", "states")
    assert states.complete
    assert states.tokens > 0
    assert answers.done > 0
    assert (answers.complete, answers.eta_s) == (True, 0.0), "nobody says how many there are, and nobody goes on"
    assert {one.recipe for one in snapshot.trainings} == {"baseline", "ours"}
    for training in snapshot.trainings:
        assert training.state == "finished"
        assert training.step == training.steps
        assert training.store == states.store
        assert training.loss is not None
        assert {"loss", "learning rate"} <= {one.name for one in training.series}


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    [store] = Collector(DashSettings(runs=(tmp_path,))).refresh_now().stores
    assert (store.url, store.up) == (str(tmp_path), False)
    assert "there is no run here" in str(store.known.error)
