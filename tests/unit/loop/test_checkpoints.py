"""Training that moves: whatever ends it and wherever it goes on, the curve is that of an undisturbed run."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import drafthouse
from drafthouse.drafter import TrainResult
from drafthouse.drafter.checkpoint import Checkpoints
from drafthouse.drafter.metrics import read_metrics
from drafthouse.errors import ConfigError, DrafterError, StoreError
from drafthouse.loop import checkpoints as module
from drafthouse.loop import committed
from drafthouse.loop.committed import CommittedFolders
from drafthouse.loop.job import FenceWatch, JobContext
from drafthouse.store import Fence, FencedError, ObjectInfo, Store
from drafthouse.store.exclusive import exclusive
from tests.fixtures_s3 import s3_url, seaweed
from tests.patience import until
from tests.unit.drafter.doubles import Batch, Source
from tests.unit.loop.train_job import RECIPE, SETTINGS, source_of, work

__all__ = ["seaweed"]

ROOT = Path(__file__).parents[3]
STEPS = SETTINGS.steps
JOB = "train-qwen"
CLOCK = {"seconds", "tokens_per_s"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes: sums are taken in an order that depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.02)
    monkeypatch.setattr(module, "PROGRESS_EVERY_S", 0.02)
    monkeypatch.setattr(module, "METRICS_EVERY_S", 0.05)
    monkeypatch.setattr(module, "Uploader", partial(module.Uploader, retry_s=0.05))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("undisturbed")
    work(None, folder)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "file" else s3_url(request.getfixturevalue("seaweed"))


def life(store: Store, epoch: int) -> FenceWatch:
    """A life of the job, its fence raised."""
    Fence(store, JOB).raise_to(epoch, {"who": "test"})
    return FenceWatch(Fence(store, JOB), epoch, every_s=0.02)


def curve(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in read_metrics(folder / "metrics.jsonl")]


def same_run(folder: Path, undisturbed: Path) -> None:
    """The same floats at every step, no gap, nothing twice, and the same drafter, byte for byte."""
    assert curve(folder) == curve(undisturbed)
    for file in ("config.json", "model.safetensors"):
        assert (folder / "drafter" / file).read_bytes() == (undisturbed / "drafter" / file).read_bytes()


def said(store: Store, epoch: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(f"drafters/{RECIPE}/progress/{epoch}"))
    return found


def stored(store: Store) -> list[tuple[int, int]]:
    kept = CommittedFolders(store.child(f"drafters/{RECIPE}/checkpoints"))
    return [(one.step, one.epoch) for one in kept.counting()]


def content(store: Store) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list(f"drafters/{RECIPE}")}


class Process:
    """The training of a job as a process on a node of its own, a folder that nobody else has. When it has taken 12 of
    its 24 steps it stands still until it is ended."""

    def __init__(self, url: str, folder: Path, *, epoch: int) -> None:
        source = str(Path(drafthouse.__file__).parents[1])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
        environment |= {"DRAFTHOUSE_JOB": JOB, "DRAFTHOUSE_EPOCH": str(epoch), "DRAFTHOUSE_NODE": folder.name}
        command = [sys.executable, "-m", "tests.unit.loop.train_job", url, str(folder), "12", f"{folder}.go"]
        self.go, self.log = Path(f"{folder}.go"), folder / "metrics.jsonl"
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def stands_still(self) -> None:
        """Wait until it does."""
        until(
            lambda: read_metrics(self.log)[-1]["step"] == 12,
            "the 12th step",
            unless=lambda: self.process.poll() is not None and f"it has ended with {self.process.returncode}",
        )

    def end(self, how: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(how)
        self.go.touch()
        out, _ = self.process.communicate(timeout=240)
        return self.process.returncode, out


class Gated(Source):
    """Its batches wait while `gate` is closed; `reached` is set before that of number `at`."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self.gate, self.reached, self.at = threading.Event(), threading.Event(), 12

    def batch(self, rows: int, seed: int, number: int) -> Batch:
        if number == self.at:
            self.reached.set()
            assert self.gate.wait(240)
        return super().batch(rows, seed, number)


class Trainer(threading.Thread):
    """A training in a thread; `outcome` is its result or what ended it."""

    def __init__(self, store: Store, folder: Path, watch: FenceWatch | None, source: Source) -> None:
        super().__init__(daemon=True)
        self.arguments = (store, folder, watch, source)
        self.outcome: TrainResult | BaseException | None = None
        self.start()

    def run(self) -> None:
        store, folder, watch, source = self.arguments
        try:
            self.outcome = work(store, folder, watch=watch, source=source)
        except BaseException as error:
            self.outcome = error

    def done(self) -> TrainResult | BaseException | None:
        self.join(240)
        assert not self.is_alive()
        return self.outcome


def test_killed_and_gone_on_with_on_another_node(url: str, tmp_path: Path, undisturbed: Path) -> None:
    store = Store.open(url)
    store.probe()
    life(store, 1)
    killed = Process(url, tmp_path / "old-node", epoch=1)
    killed.stands_still()
    until(lambda: stored(store)[:1] == [(10, 1)], "the checkpoint of step 10 in the store")
    until(lambda: said(store, 1)["step"] == 12, "word of step 12")
    assert killed.end(signal.SIGKILL)[0] == -signal.SIGKILL
    shutil.rmtree(tmp_path / "old-node")
    newest = 10
    assert said(store, 1)["state"] == "training"
    time.sleep(1.1 if url.startswith("s3:") else 0)  # S3 tells whole seconds, and what ties with the fence is lost

    result = work(store, tmp_path / "new-node", watch=life(store, 2))
    assert result.resumed_from == newest
    assert result.loss == work(None, undisturbed).loss
    same_run(tmp_path / "new-node", undisturbed)
    found = said(store, 2)
    assert (found["step"], found["steps"], found["resumed_from"], found["stored"]) == (STEPS, STEPS, newest, STEPS)
    assert (found["state"], found["finished"], found["loss"]) == ("finished", True, curve(undisturbed)[-2]["loss"])
    mirrored = store.get(f"drafters/{RECIPE}/metrics/2.jsonl")
    assert mirrored == (tmp_path / "new-node/metrics.jsonl").read_bytes()


@pytest.mark.s3
def test_told_to_stop_and_gone_on_with_at_once(seaweed: str, tmp_path: Path, undisturbed: Path) -> None:
    """The fence is raised the moment that the old life has ended: not a step of it is lost, although S3 tells whole
    seconds."""
    url = s3_url(seaweed)
    store = Store.open(url)
    store.probe()
    life(store, 1)
    stopped = Process(url, tmp_path / "old", epoch=1)
    stopped.stands_still()
    code, out = stopped.end(signal.SIGTERM)
    watch = life(store, 2)
    assert code == 0, "a job that was stopped has not failed"
    told = json.loads(out.splitlines()[-1])
    assert told["stopped"] == "asked"
    assert (said(store, 1)["state"], said(store, 1)["finished"]) == ("stopped", False)
    assert work(store, tmp_path / "new", watch=watch).resumed_from == told["steps"] < STEPS
    same_run(tmp_path / "new", undisturbed)


def test_a_plain_run_is_stopped_with_a_checkpoint_too(tmp_path: Path, undisturbed: Path) -> None:
    class Stopping(Source):
        def batch(self, rows: int, seed: int, number: int) -> Batch:
            if number == 12:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().batch(rows, seed, number)

    first = work(None, tmp_path, source=source_of(0.02, Stopping))
    assert (first.stopped, first.drafter) == ("asked", None)
    assert 10 < first.steps < STEPS
    assert work(None, tmp_path).resumed_from == first.steps
    same_run(tmp_path, undisturbed)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "drafter", "metrics.jsonl"}


class TestFinished:
    @pytest.fixture
    def finished(self, store: Store, tmp_path: Path) -> Store:
        work(store, tmp_path / "first", watch=life(store, 1))
        return store

    class Untouched(Source):
        def batch(self, rows: int, seed: int, number: int) -> Batch:
            raise AssertionError("there is nothing to be trained")

    def test_another_node_finds_it(self, finished: Store, tmp_path: Path, undisturbed: Path) -> None:
        result = work(finished, tmp_path / "second", watch=life(finished, 2), source=source_of(0, self.Untouched))
        assert (result.steps, result.stopped, result.resumed_from) == (STEPS, "finished", STEPS)
        assert result.loss == work(None, undisturbed).loss
        assert result.tokens == curve(undisturbed)[-1].get("tokens", result.tokens)
        assert [one["step"] for one in result.evaluations] == [10, 20, STEPS]
        same_run(tmp_path / "second", undisturbed)
        assert said(finished, 2)["finished"]
        assert not (tmp_path / "second/checkpoints").exists()

    def test_the_same_node_leaves_it_alone(self, finished: Store, tmp_path: Path) -> None:
        drafter = tmp_path / "first/drafter/model.safetensors"
        before = drafter.stat().st_mtime_ns
        work(finished, tmp_path / "first", watch=life(finished, 2), source=source_of(0, self.Untouched))
        assert drafter.stat().st_mtime_ns == before

    def test_a_damaged_one_is_passed_over(
        self, finished: Store, tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (key,) = (info.key for info in finished.list(f"drafters/{RECIPE}/drafter") if "/model" in info.key)
        finished.put(key, finished.get(key)[:-1])
        with caplog.at_level(logging.WARNING):
            result = work(finished, tmp_path / "second", watch=life(finished, 2))
        assert result.resumed_from == STEPS, "the last checkpoint is whole, and is exported again"
        same_run(tmp_path / "second", undisturbed)
        assert "the finished drafter 00000024-1 is passed over: model.safetensors has" in caplog.text


class TestRestore:
    def interrupted(self, store: Store, folder: Path, watch: FenceWatch | None = None, at: int = 12) -> None:
        """A training that ends by an error of its states in front of step `at` + 1."""

        class Broken(Source):
            def batch(self, rows: int, seed: int, number: int) -> Batch:
                if number == at:
                    raise DrafterError("the node is gone")
                return super().batch(rows, seed, number)

        with pytest.raises(DrafterError, match="the node is gone"):
            work(store, folder, watch=watch, source=source_of(0, Broken))

    @pytest.mark.parametrize("part", ["weights", "manifest.json"])
    def test_a_torn_one_is_skipped_with_a_message(
        self, store: Store, tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture, part: str
    ) -> None:
        self.interrupted(store, tmp_path / "a", at=17)
        assert stored(store)[0] == (15, 0)
        for key in (info.key for info in store.list(f"drafters/{RECIPE}/checkpoints/00000015-0")):
            if key.rpartition("/")[2].startswith(part):
                store.put(key, store.get(key)[:-1])
        with caplog.at_level(logging.WARNING):
            result = work(store, tmp_path / "b")
        assert result.resumed_from == 10
        assert "the checkpoint 00000015-0 is passed over: " in caplog.text
        same_run(tmp_path / "b", undisturbed)
        kept = CommittedFolders(store.child(f"drafters/{RECIPE}/checkpoints"))
        for one in kept.counting():
            kept.fetch(one, tmp_path / one.key)  # the torn one is not what is kept, or was made anew

    def test_none_that_is_whole_is_told(self, store: Store, tmp_path: Path) -> None:
        self.interrupted(store, tmp_path / "a", at=7)
        for info in store.list(f"drafters/{RECIPE}/checkpoints"):
            if "/weights" in info.key:
                store.delete(info.key)
        with pytest.raises(DrafterError, match=r"no checkpoint is whole \(.*weights.safetensors is missing.*delete"):
            work(store, tmp_path / "b")
        assert work(store, tmp_path / "a").resumed_from == 5, "where it lies on the disk it goes on"

    def test_other_settings_are_refused(self, store: Store, tmp_path: Path) -> None:
        self.interrupted(store, tmp_path / "a")
        before = content(store)
        other = SETTINGS.model_copy(update={"seed": 4})
        with pytest.raises(
            DrafterError, match=r"00000010-0: the store holds a run with other settings \(train.seed: 3"
        ):
            work(store, tmp_path / "b", settings=other)
        assert content(store) == before
        work(store, tmp_path / "a")
        with pytest.raises(DrafterError, match=r"other settings \(train.seed: 3 → 4\); restore those settings, use"):
            work(store, tmp_path / "b", settings=other)

    def test_a_newer_local_one_wins_and_is_stored(self, store: Store, tmp_path: Path, undisturbed: Path) -> None:
        self.interrupted(store, tmp_path / "a")
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        for info in store.list(f"drafters/{RECIPE}/checkpoints/00000010-0"):
            store.delete(info.key)
        seen: list[list[tuple[int, int]]] = []

        class Looking(Source):
            def batch(self, rows: int, seed: int, number: int) -> Batch:
                if number == 12:
                    until(lambda: stored(store)[0] == (10, 0), "the checkpoint of step 10 in the store")
                    seen.append(stored(store))
                return super().batch(rows, seed, number)

        result = work(store, tmp_path / "b", source=source_of(0, Looking))
        assert result.resumed_from == 10
        assert seen == [[(10, 0), (5, 0)]]
        same_run(tmp_path / "b", undisturbed)

    def test_a_newer_stored_one_wins(self, store: Store, tmp_path: Path, undisturbed: Path) -> None:
        self.interrupted(store, tmp_path / "a", at=7)
        shutil.copytree(tmp_path / "a", tmp_path / "behind")
        self.interrupted(store, tmp_path / "a", at=17)
        assert work(store, tmp_path / "behind").resumed_from == 15
        same_run(tmp_path / "behind", undisturbed)

    def test_what_a_fenced_life_left_on_this_node_is_dropped(
        self, store: Store, tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Away and back: the old life went on here after it was fenced off, without its store."""
        watch = life(store, 1)
        self.interrupted(store, tmp_path / "a", watch, at=7)
        life(store, 2)
        self.interrupted(store, tmp_path / "b", life(store, 2), at=12)
        zombie = tmp_path / "a"
        self.interrupted(Store.open(f"memory://{secrets.token_hex(8)}"), zombie, at=22)
        assert [path.name for path in Checkpoints(zombie / "checkpoints").folders()][-1] == "step-00000020"
        with caplog.at_level(logging.WARNING):
            result = work(store, zombie, watch=life(store, 3))
        assert result.resumed_from == 10
        assert "step-00000020 is dropped: epoch 1 is over and has not stored it" in caplog.text
        same_run(zombie, undisturbed)

    def test_what_an_earlier_life_left_is_used_when_nothing_else_is_there(
        self, store: Store, tmp_path: Path, undisturbed: Path
    ) -> None:
        self.interrupted(store, tmp_path / "a", life(store, 1))
        elsewhere = Store.open(str(tmp_path / "another-store"))
        assert work(elsewhere, tmp_path / "a", watch=life(elsewhere, 2)).resumed_from == 10
        same_run(tmp_path / "a", undisturbed)

    def test_what_an_earlier_life_stored_is_not_fetched_again(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.interrupted(store, tmp_path / "a", life(store, 1))

        def refuse(self: Store, key: str, path: Path) -> None:
            raise AssertionError("it is here already")

        monkeypatch.setattr(Store, "download", refuse)
        assert work(store, tmp_path / "a", watch=life(store, 2)).resumed_from == 10

    def test_uploads_that_were_killed_are_cleared_away(self, store: Store, tmp_path: Path) -> None:
        place = store.local_path(f"drafters/{RECIPE}/checkpoints/00000005-0")
        assert place is not None
        place.mkdir(parents=True)
        for name in ("weights#1", "state#1"):
            (place / name).write_bytes(b"half")
        os.utime(place / "weights#1", (time.time() - 7200,) * 2)
        self.interrupted(store, tmp_path / "a")
        assert not (place / "weights#1").exists()
        assert (place / "state#1").exists(), "perhaps somebody else's that goes on"

    def test_the_store_keeps_no_more_than_the_run(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts: list[int] = []

        class Slow(Source):
            def batch(self, rows: int, seed: int, number: int) -> Batch:
                if number and number % 5 == 0:
                    until(lambda: stored(store)[:1] == [(number, 0)], f"the checkpoint of step {number} in the store")
                    counts.append(len(stored(store)))
                return super().batch(rows, seed, number)

        monkeypatch.setattr(committed, "SETTLED", timedelta(0))
        work(store, tmp_path / "a", source=source_of(0, Slow))
        assert stored(store) == [(STEPS, 0), (20, 0)]
        assert max(counts) <= SETTINGS.keep_checkpoints + 1, "one more while it is published"
        places = {info.key.split("/")[3] for info in store.list(f"drafters/{RECIPE}/checkpoints")}
        assert places == {"00000024-0", "00000020-0"}


class TestZombies:
    def test_fenced_while_it_trains(self, store: Store, tmp_path: Path, undisturbed: Path) -> None:
        old = Trainer(store, tmp_path / "old", life(store, 1), source_of(0.02, Gated))
        source = old.arguments[3]
        assert isinstance(source, Gated)
        assert source.reached.wait(240)
        until(lambda: stored(store)[:1] == [(10, 1)], "the checkpoint of step 10 in the store")
        watch = life(store, 2)
        before = content(store)
        new = Trainer(store, tmp_path / "new", watch, source_of(0))
        source.gate.set()
        ended = old.done()
        assert isinstance(ended, FencedError)
        assert ended.exit_code == 76
        result = new.done()
        assert isinstance(result, TrainResult)
        assert result.resumed_from == 10
        same_run(tmp_path / "new", undisturbed)
        assert {key: data for key, data in content(store).items() if "-1/" in key} == {
            key: data for key, data in before.items() if "-1/" in key and key in content(store)
        }, "it has stored nothing since"
        assert not (tmp_path / "old/drafter").exists()

    def test_paused_until_the_other_has_finished(self, store: Store, tmp_path: Path, undisturbed: Path) -> None:
        old = Trainer(store, tmp_path / "old", life(store, 1), source_of(0, Gated))
        source = old.arguments[3]
        assert isinstance(source, Gated)
        assert source.reached.wait(240)
        until(lambda: stored(store)[:1] == [(10, 1)], "the checkpoint of step 10 in the store")
        # Its threads stand still too, as those of a process that is stopped: it has asked a moment ago.
        old_watch = old.arguments[2]
        assert old_watch is not None
        old_watch._every_s = 3600.0
        assert isinstance(work(store, tmp_path / "new", watch=life(store, 2)), TrainResult)
        before = {
            key: data for key, data in content(store).items() if "progress/1" not in key and "metrics/1" not in key
        }
        source.gate.set()
        assert isinstance(old.done(), FencedError), "the next checkpoint asks"
        after = {key: data for key, data in content(store).items() if key in before}
        assert after == before
        assert {key for key in content(store) if key.endswith("-1/manifest.json")} == {
            key for key in before if key.endswith("-1/manifest.json")
        }
        same_run(tmp_path / "new", undisturbed)

    def test_started_when_it_is_over(self, store: Store, tmp_path: Path) -> None:
        watch = life(store, 1)
        life(store, 2)
        with pytest.raises(FencedError):
            work(store, tmp_path / "old", watch=watch)
        assert not (tmp_path / "old/metrics.jsonl").exists()
        assert content(store) == {}

    def test_two_at_once_without_a_fence(self, store: Store, tmp_path: Path, undisturbed: Path) -> None:
        """Two machines train one drafter of one store, unknown to each other: both are right, and so is the store."""
        trainers = [Trainer(store, tmp_path / name, None, source_of(0.01)) for name in "ab"]
        for trainer in trainers:
            assert isinstance(trainer.done(), TrainResult), trainer.outcome
            same_run(trainer.arguments[1], undisturbed)
        kept = CommittedFolders(store.child(f"drafters/{RECIPE}/checkpoints"))
        for one in kept.counting():
            kept.fetch(one, tmp_path / one.key)
        work(store, tmp_path / "c", source=source_of(0, TestFinished.Untouched))
        same_run(tmp_path / "c", undisturbed)

    def test_two_in_one_folder(self, store: Store, tmp_path: Path) -> None:
        with exclusive(tmp_path, "sleeps"), pytest.raises(ConfigError, match="another process works on the drafter"):
            work(store, tmp_path)
        assert content(store) == {}


class TestOutage:
    class Down(Store):
        failures = 0

        def upload(self, key: str, path: Path) -> ObjectInfo:
            if type(self).failures:
                type(self).failures -= 1
                raise StoreError("the server cannot be reached")
            return super().upload(key, path)

    @pytest.fixture
    def down(self, tmp_path: Path) -> Iterator[type[Store]]:
        yield self.Down
        self.Down.failures = 0

    def test_the_training_goes_on_and_makes_up_for_it(
        self, down: type[Store], tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = down.open(str(tmp_path / "store"))
        self.Down.failures = 2
        with caplog.at_level(logging.WARNING):
            work(store, tmp_path / "a", watch=life(store, 1))
        assert "is not stored yet: the server cannot be reached" in caplog.text
        assert stored(store)[0] == (STEPS, 1)
        same_run(tmp_path / "a", undisturbed)

    def test_in_the_end_it_is_told_and_nothing_is_lost(
        self, down: type[Store], tmp_path: Path, undisturbed: Path
    ) -> None:
        store = down.open(str(tmp_path / "store"))
        self.Down.failures = 10**6
        with pytest.raises(StoreError, match="cannot be reached"):
            work(store, tmp_path / "a", watch=life(store, 1))
        self.Down.failures = 0
        assert work(store, tmp_path / "a", watch=life(store, 1)).resumed_from == STEPS
        same_run(tmp_path / "a", undisturbed)
        assert stored(store)[0] == (STEPS, 1)

    def test_a_store_that_ignores_conditions_is_refused(self, tmp_path: Path) -> None:
        class Careless(Store):
            def create(self, key: str, data: bytes) -> bool:
                self.put(key, data)
                return True

        with pytest.raises(StoreError, match="ignores conditional puts"):
            work(Careless.open(str(tmp_path / "store")), tmp_path / "a")

    def test_a_mistake_in_the_watching_thread_ends_the_training(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else nobody would watch the fence any more."""
        watch = life(store, 1)

        def broken(_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(module.Copies, "_tell_curve", broken)
        with pytest.raises(ZeroDivisionError):
            work(store, tmp_path / "a", watch=watch, source=source_of(0.05))


def test_the_curve_that_is_shown_is_whole_rows(store: Store, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Looking(Source):
        def batch(self, rows: int, seed: int, number: int) -> Batch:
            if number == 12:
                key = f"drafters/{RECIPE}/metrics/1.jsonl"
                until(lambda: len(store.get(key).splitlines()) >= 12, "twelve rows of the curve")
                seen.append([json.loads(line)["step"] for line in store.get(key).decode().splitlines()])
                until(lambda: said(store, 1)["step"] == 12, "word of step 12")
            return super().batch(rows, seed, number)

    work(store, tmp_path / "a", watch=life(store, 1), source=source_of(0, Looking))
    assert seen[0][:10] == list(range(1, 11))


def test_progress_says_who(store: Store, tmp_path: Path) -> None:
    assert JobContext.from_environment({}) is None
    work(store, tmp_path / "a", watch=life(store, 1))
    found = said(store, 1)
    assert (found["recipe"], found["epoch"], found["resumed_from"]) == (RECIPE, 1, None)
    assert found["tokens"] > 0
