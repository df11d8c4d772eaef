"""A run as its leases, markers and workers show it."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

import pytest

from drafthouse.dash.attention import concerns
from drafthouse.dash.collect import extraction as module
from drafthouse.dash.collect.clock import StoreClock
from drafthouse.dash.collect.extraction import RunSource
from drafthouse.dash.model import ExtractionView, Known, Snapshot
from drafthouse.store import Board, Lease, Store
from tests.doubles.stores import Clock, ClockStore
from tests.fixtures_s3 import s3_url, seaweed

__all__ = ["seaweed"]

SHARDS = [f"s{number}" for number in range(6)]
TTL_S = 600.0


class Played:
    """A run whose workers are played, on a store whose clock the test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.inner = Store.open(f"memory://{secrets.token_hex(8)}")
        self.store = ClockStore.over(self.inner, self.clock)
        self.board = Board(self.store, "run", ttl_s=TTL_S)
        self.board.bind({"shards": 6, "target": "abc"})
        self.source = RunSource(self.store, "run", _Standing(self.clock), 2.0, 3600.0)

    def claim(self, worker: str) -> Lease:
        lease = self.board.claim(SHARDS, worker)
        assert lease is not None
        return lease

    def finish(self, lease: Lease, tokens: int = 100) -> None:
        self.board.objects.put(self.board.data_key(lease), b"data")
        assert self.board.commit(lease, size=4, sha256="", tokens=tokens, extra={})

    def speak(self, worker: str, **more: Any) -> None:
        self.board.present(worker, {"node": "n1", "ttl_s": TTL_S, "device": "cuda:0", "waiting": None, **more})

    def look(self) -> ExtractionView:
        self.source.ask()
        view = self.source.view()
        assert view is not None
        assert view.known.error is None
        return view


class _Standing(StoreClock):
    """The store's clock is the test's."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("memory://x")
        self._clock = clock

    def now(self) -> Any:
        return self._clock.now


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setattr(module, "LEASES_REST", 0)
    return Played()


def test_a_run_nobody_has_begun(played: Played) -> None:
    view = played.look()
    assert (view.shards, view.free, view.grid, view.names) == (6, 6, "......", ())
    assert (view.rate, view.eta_s, view.complete, view.target) == (0.0, None, False, "abc")


def test_a_run_from_the_first_lease_to_the_end(played: Played) -> None:
    first = played.claim("w1")
    played.speak("w1", held={first.shard: 40})
    played.clock.advance(10)
    view = played.look()
    assert (view.grid, view.leased, view.free, view.done) == ("l.....", 1, 5, 0)
    [worker] = view.workers
    assert (worker.worker, worker.node, worker.shards, worker.tokens) == ("w1", "n1", ("s0",), 40)
    assert (worker.alive, worker.ended, worker.age_s, worker.device) == (True, False, 10.0, "cuda:0")
    played.finish(first)
    played.speak("w1")
    view = played.look()
    assert (view.grid, view.tokens, view.bytes, view.workers[0].done) == ("d.....", 100, 4, 1)
    assert view.rate == pytest.approx(10.0)
    assert view.eta_s == pytest.approx(50.0)
    for _ in range(5):
        played.clock.advance(10)
        played.finish(played.claim("w1"))
    played.board.absent("w1")
    view = played.look()
    assert (view.grid, view.complete, view.eta_s, view.rate) == ("dddddd", True, 0.0, None)
    assert (view.workers[0].alive, view.workers[0].ended, view.workers[0].node) == (False, True, "n1")
    assert view.failures_total == view.reclaims == 0
    assert view.rates is not None


def test_a_killed_worker_falls_silent_and_is_replaced(played: Played) -> None:
    played.speak("dead", held={})
    played.claim("dead")
    assert played.look().workers[0].alive
    played.clock.advance(90)
    view = played.look()
    assert not view.workers[0].alive, "it has said nothing for longer than four tellings"
    assert not view.workers[0].ended
    assert view.grid[0] == "l", "its lease lives on"
    played.clock.advance(TTL_S)
    view = played.look()
    assert (view.grid, view.stale, view.rate) == ("s.....", 1, 0.0)
    [failure] = view.failures
    assert (failure.shard, failure.epoch, failure.worker) == ("s0", 1, "dead")
    assert failure.reason == "it fell silent, and nobody has taken over yet"
    played.speak("heir")
    again = played.claim("heir")
    assert again.epoch == 2
    view = played.look()
    assert (view.grid, view.reclaims) == ("l.....", 1)
    assert view.failures[0].reason == "it fell silent, and another took over"
    played.finish(again)
    view = played.look()
    assert (view.grid, view.failures_total) == ("r.....", 1)
    assert [worker.worker for worker in view.workers] == ["heir", "dead"], "the living first"


def test_a_zombie_that_finishes_after_all_has_not_failed(played: Played) -> None:
    slow = played.claim("slow")
    played.clock.advance(TTL_S + 1)
    assert played.look().failures_total == 1
    played.finish(slow)
    view = played.look()
    assert (view.failures_total, view.grid) == (0, "d.....")


def test_a_worker_that_says_why(played: Played) -> None:
    lease = played.claim("w")
    played.board.release(lease)
    played.board.fail(lease, "the loss is no number")
    played.speak("w", failed="the loss is no number")
    played.speak("early", failed="no such layer")
    view = played.look()
    assert view.grid == "s....."
    assert {(one.shard, one.epoch, one.worker, one.reason) for one in view.failures} == {
        ("s0", 1, "w", "the loss is no number"),
        ("", 0, "early", "no such layer"),
    }
    assert all(one.at is not None for one in view.failures)
    assert all(worker.ended and not worker.alive for worker in view.workers)


def test_a_lease_that_was_given_back_is_no_failure(played: Played) -> None:
    played.board.release(played.claim("w"))
    view = played.look()
    assert (view.grid, view.stale, view.failures_total) == ("s.....", 1, 0)


def test_what_a_worker_waits_for_and_its_gpus(played: Played) -> None:
    gpu = {"index": 1, "uuid": "GPU-a", "name": "H200", "utilization_percent": 97.0, "power_w": 600.5, "odd": 1}
    played.speak("w", waiting="uploads", gpus=[gpu, "nonsense", {"index": "x", "name": 3}], job="extract")
    [worker] = played.look().workers
    assert worker.waiting == "uploads"
    [shown] = worker.gpus
    assert (shown.index, shown.name, shown.utilization_percent, shown.memory_mib) == (1, "H200", 97.0, None)
    assert (shown.source, shown.at, shown.job) == ("heartbeat", played.clock.now, "extract")


def test_the_workers_own_time_to_live_counts(played: Played) -> None:
    played.speak("w", ttl_s=10.0)
    played.claim("w")
    played.clock.advance(11)
    view = played.look()
    assert view.grid == "s....."
    assert not view.workers[0].alive


def test_a_marker_is_read_once(played: Played) -> None:
    for _ in range(3):
        played.finish(played.claim("w"))
    sent: list[str] = []
    played.store.on_operation = sent.append
    source = RunSource(played.store, "run", _Standing(played.clock), 2.0, 3600.0)
    source.ask()
    assert sum(request.startswith("get done/") for request in sent) == 3
    sent.clear()
    played.finish(played.claim("w"))
    sent.clear()
    source.ask()
    assert [request for request in sent if request.startswith("get")] == ["get done/s3"]


def test_leases_that_are_costly_to_list_are_listed_seldom(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHEAP_S", 0.0)
    monkeypatch.setattr(module, "LEASES_REST", 1e9)
    monkeypatch.setattr(module, "OLDEST_S", 1e9)
    first, second = played.claim("w"), played.claim("w")
    assert played.look().grid == "ll...."
    played.finish(first)
    sent: list[str] = []
    played.store.on_operation = sent.append
    assert played.look().grid == "dl....", "what is done is seen at once"
    assert "list lease" not in sent
    played.board.release(second)
    assert played.look().grid == "dl....", "what is leased is as of a moment ago"
    third = played.claim("heir")
    assert (third.shard, third.epoch) == ("s1", 2)
    fourth = played.claim("w2")
    played.clock.advance(TTL_S + 1)
    played.speak("heir", held={third.shard: 5})
    played.speak("w2", held={fourth.shard: 7, "s0": 100})
    view = played.look()
    assert view.grid == "dll...", "what workers tell is believed meanwhile"
    assert {worker.worker: (worker.shards, worker.tokens) for worker in view.workers if worker.shards} == {
        "heir": (("s1",), 5),
        "w2": (("s2",), 7),
    }
    assert view.reclaims == 1
    assert "list lease" not in sent


def test_only_reading_requests_are_sent(played: Played) -> None:
    played.speak("w")
    lease = played.claim("w")
    played.board.fail(lease, "x")
    played.clock.advance(2 * TTL_S)
    sent: list[str] = []
    played.store.on_operation = sent.append
    source = RunSource(played.store, "run", _Standing(played.clock), 2.0, 3600.0)
    source.ask()
    assert source.known.error is None
    assert {request.split()[0] for request in sent} == {"list", "get"}


def test_a_run_that_was_removed_keeps_its_last_truth(played: Played) -> None:
    played.finish(played.claim("w"))
    before = played.look()
    for info in played.store.list("runs"):
        played.store.delete(info.key)
    played.source.ask()
    after = played.source.view()
    assert after is not None
    assert "nothing of the run is there any more" in str(after.known.error)
    assert (after.grid, after.tokens, after.known.answered) == (before.grid, before.tokens, before.known.answered)
    played.board.bind({"shards": 2})
    new = Board(played.store, "run").claim(["t0"], "w")
    assert new is not None
    played.finish(new, tokens=5)
    view = played.look()
    assert (view.tokens, view.names, view.shards) == (5, ("t0",), 2), "another run under its name"


def test_many_workers_that_are_gone_are_not_all_shown(played: Played) -> None:
    for number in range(250):
        played.speak(f"w{number}", failed="x")
        played.clock.advance(1)
    view = played.look()
    assert len(view.workers) == 200
    assert view.workers[0].worker == "w249"
    assert (len(view.failures), view.failures_total) == (200, 250)


@pytest.mark.s3
def test_ages_on_a_real_server(seaweed: str) -> None:
    url = s3_url(seaweed)
    store = Store.open(url)
    store.probe()
    board = Board(store, "run")
    assert board.claim(["a"], "w") is not None
    board.present("w", {"node": "n"})
    source = RunSource(store, "run", StoreClock(url), 2.0, 3600.0)
    source.ask()
    view = source.view()
    assert view is not None
    assert view.workers[0].age_s is not None
    assert view.workers[0].age_s < 3
    assert view.grid == "l"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"shard": "s0"}'])
def test_a_damaged_object_is_named_and_everything_else_is_shown(played: Played, body: bytes) -> None:
    for worker in ("w1", "w2"):
        played.finish(played.claim(worker))
    lost = played.claim("w3")
    played.speak("w3", held={lost.shard: 40})
    played.store.child("runs/run").put(f"done/{SHARDS[0]}", body)
    view = played.look()
    assert (view.done, view.leased, view.tokens, view.failures) == (2, 1, 100, ())
    assert [worker.worker for worker in view.workers if worker.alive] == ["w3"]
    [sentence] = view.damaged
    assert f"done/{SHARDS[0]}: this" in sentence
    snapshot = Snapshot(at=datetime.now(UTC), sequence=1, fleet=Known(), settled=True, extractions=(view,))
    told = [concern for concern in concerns(snapshot) if "damaged" in concern.what]
    assert [(one.severity, one.view) for one in told] == [("bad", "extraction")]


def test_every_kind_of_object_may_be_damaged(played: Played) -> None:
    lease = played.claim("w1")
    played.speak("w1", held={lease.shard: 40})
    played.board.fail(lease, "no reason")
    played.board.release(lease)
    played.claim("w2")
    objects = played.board.objects
    listed = {info.key for kind in ("failed", "lease") for info in objects.list(kind)}
    keys = ["spec.json", "workers/w1", *sorted(listed)]
    whole = {key: objects.get(key) for key in keys}
    for key in keys:
        objects.put(key, b"\x00")
    view = played.look()
    assert view.leased == 1
    named = {key for key in keys for sentence in view.damaged if f"/{key}: " in sentence}
    assert named >= {"spec.json", "workers/w1", *(key for key in keys if key.startswith("failed/"))}
    for key, body in whole.items():
        objects.put(key, body)
    view = played.look()
    assert (view.damaged, view.shards, view.failures_total) == ((), 6, 1)
