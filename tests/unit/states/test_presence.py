"""What a worker says of itself while it works, waits and fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafthouse.errors import StatesError, StoreError
from drafthouse.states import ExtractSettings, run_worker
from drafthouse.states import presence as module
from drafthouse.states.presence import Presence, reason_of
from drafthouse.states.pressure import ByteBudget, Waiting
from drafthouse.store import Board, FencedError, ObjectMissingError, Store
from tests.doubles.extraction import MemoryCorpus, TinyTaps
from tests.patience import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.05)
    monkeypatch.setattr(module, "CHANGED_S", 0.02)


def words(board: Board, worker: str = "w") -> dict[str, Any]:
    try:
        return board.presence(worker)
    except ObjectMissingError:
        return {}


class Running:
    """A worker in a thread."""

    def __init__(self, store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings) -> None:
        self.error: BaseException | None = None
        self._arguments = (store, "run", corpus, target, settings, "w")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            run_worker(*self._arguments)
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        self._thread.join(240)
        assert not self._thread.is_alive()
        return self.error


def test_it_says_what_it_holds_and_leaves_nothing(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHOUSE_NODE", "n1")
    monkeypatch.setenv("DRAFTHOUSE_JOB", "extract")
    go = threading.Event()

    def wait(_: Tensor) -> None:
        go.wait(240)

    target.before = wait
    board = Board(store, "run")
    running = Running(store, corpus, target, settings)
    said = until(lambda: (found := words(board)).get("held") and found, "word of what it holds")
    assert (said["node"], said["job"], said["device"], said["ttl_s"]) == ("n1", "extract", "cpu", 600)
    assert (said["waiting"], said["gpus"], said["shards"]) == (None, [], 0)
    assert len(said["held"]) == 1
    assert set(said["held"]) < set(corpus.shard_names)
    go.set()
    assert running.end() is None
    assert words(board) == {}
    assert board.survey().failed == {}


def test_a_worker_that_fails_says_why_for_its_shard_and_for_itself(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    def spoil(out: Tensor) -> None:
        out[:, 0, 0, 0] = float("nan")

    target.spoil = spoil
    with pytest.raises(StatesError) as caught:
        run_worker(store, "run", corpus, target, settings, "w")
    board = Board(store, "run")
    failed = board.survey().failed
    assert failed, "the shard that was held"
    for shard, epoch in failed:
        assert board.failure(shard, epoch) == ("w", str(caught.value))
    assert all(lease.released for lease in board.survey().tenures if (lease.shard, lease.epoch) in failed)
    assert words(board)["failed"] == str(caught.value)


def test_an_error_that_is_no_sentence_names_its_kind() -> None:
    assert reason_of(RuntimeError("boom")) == "RuntimeError: boom"
    assert reason_of(StoreError("full", where="here")) == "here: full"


def test_a_worker_that_waits_for_the_disk_says_so_and_then_why_it_gave_up(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    limits = dict.fromkeys(("disk_high", "disk_low", "shm_high", "shm_low"), 1e-9)
    full = settings.model_copy(update={**limits, "disk_wait_s": 5.0})
    corpus.manifest = replace(corpus.manifest, tokens=2**50)  # no disk holds so many states
    board = Board(store, "run")
    running = Running(store, corpus, target, full)
    until(lambda: words(board).get("waiting") == "disk", "word that it waits", unless=lambda: running.error)
    error = running.end()
    assert isinstance(error, StoreError)
    assert words(board)["failed"] == str(error)
    assert board.survey().tenures == (), "it never held a shard"


def test_a_worker_to_whom_others_leave_nothing_says_so(
    store: Store, target: TinyTaps, settings: ExtractSettings
) -> None:
    corpus = MemoryCorpus(shards=1)
    board = Board(store, "run")
    other = board.claim(corpus.shard_names, "other")
    assert other is not None
    running = Running(store, corpus, target, settings)
    until(lambda: words(board).get("waiting") == "leases", "word that it waits", unless=lambda: running.error)
    board.release(other)
    assert running.end() is None


def test_a_slow_writer_is_seen_as_waiting_for_memory() -> None:
    waiting = Waiting()
    budget = ByteBudget(10, waiting)
    budget.take(10)
    assert waiting.reason is None
    taker = threading.Thread(target=budget.take, args=(5,))
    taker.start()
    until(lambda: waiting.reason == "memory", "the reason")
    budget.give_back(10)
    taker.join(240)
    assert waiting.reason is None


def test_reasons_nest() -> None:
    waiting = Waiting()
    seen: list[str | None] = []
    with waiting.on("disk"):
        with waiting.on("uploads"):
            seen.append(waiting.reason)
        seen.append(waiting.reason)
    assert [*seen, waiting.reason] == ["uploads", "disk", None]


class Deaf(Board):
    """A store that takes no words."""

    def present(self, worker: str, body: Mapping[str, Any]) -> None:
        raise StoreError("the server cannot be reached")

    def absent(self, worker: str) -> None:
        raise StoreError("the server cannot be reached")


def during(board: Board, error: Exception | None) -> None:
    """A worker's time, ended by `error`."""
    with Presence(board, "w", torch.device("cpu"), Waiting(), {}, dict):
        time.sleep(0.1)
        if error is not None:
            raise error


def test_a_store_that_does_not_listen_changes_nothing(store: Store) -> None:
    board = Deaf(store, "run")
    during(board, None)
    with pytest.raises(ValueError, match="x"):
        during(board, ValueError("x"))


def test_a_worker_whose_job_was_moved_has_not_failed(store: Store) -> None:
    board = Board(store, "run")
    with pytest.raises(FencedError):
        during(board, FencedError("moved"))
    assert words(board) == {}
    with pytest.raises(ValueError, match="x"):
        during(board, ValueError("x"))
    assert words(board)["failed"] == "ValueError: x"


@pytest.mark.parametrize("error", [None, ValueError("x")])
def test_nothing_is_told_behind_the_last_word(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """A request that the store takes its time for is on its way when the worker ends."""
    monkeypatch.setattr(module, "_JOIN_S", 0.05)
    begun, through = threading.Event(), threading.Event()

    class Slow(Board):
        def present(self, worker: str, body: Mapping[str, Any]) -> None:
            if "failed" not in body:
                begun.set()
                presence._stop.wait(240)  # the worker has come to its end
                time.sleep(0.3)
            super().present(worker, body)
            through.set()

    board = Slow(store, "run")
    presence = Presence(board, "w", torch.device("cpu"), Waiting(), {}, dict)
    with suppress(ValueError), presence:
        assert begun.wait(240)
        if error is not None:
            raise error
    assert through.wait(240)
    until(lambda: not any(thread.name == "presence" for thread in threading.enumerate()), "the thread's end")
    assert words(board).get("failed") == (None if error is None else "ValueError: x")
    assert bool(words(board)) == (error is not None)


def test_it_speaks_seldom_unless_its_state_changes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 60.0)
    said: list[Any] = []

    class Heard(Board):
        def present(self, worker: str, body: Mapping[str, Any]) -> None:
            said.append(body["waiting"])

    waiting = Waiting()
    board = Heard(store, "run")
    with Presence(board, "w", torch.device("cpu"), waiting, {}, dict):
        until(lambda: said == [None], "the first word")
        time.sleep(0.1)
        assert said == [None]
        with waiting.on("disk"):
            until(lambda: said == [None, "disk"], "word of the change")
        until(lambda: said == [None, "disk", None], "word of its end")
