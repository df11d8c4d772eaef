"""What a board shows to people who look, and that looking leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafthouse.store import Board, Lease, ObjectMissingError, Store
from drafthouse.store.board import Survey
from drafthouse.store.folders import folders
from tests.doubles.stores import Clock, ClockStore

SHARDS = ["s1", "s2", "s3"]


def claimed(board: Board, worker: str = "w") -> Lease:
    lease = board.claim(SHARDS, worker)
    assert lease is not None
    return lease


def finish(board: Board, lease: Lease) -> None:
    board.objects.put(board.data_key(lease), b"data")
    assert board.commit(lease, size=4, sha256="", tokens=7, extra={})


def test_a_survey_tells_where_everything_stands(store: Store) -> None:
    board = Board(store, "run")
    first, second, third = claimed(board), claimed(board, "x"), claimed(board, "y")
    finish(board, first)
    board.heartbeat(second, {"tokens": 3})
    board.release(third)
    board.fail(third, "the disk\n is full")
    board.present("x", {"waiting": "memory"})
    survey = board.survey()
    assert {(lease.shard, lease.epoch): lease.released for lease in survey.tenures} == {
        ("s1", 1): False,
        ("s2", 1): False,
        ("s3", 1): True,
    }
    assert all(lease.begun <= lease.seen for lease in survey.tenures)
    assert survey.done.keys() == {"s1"}
    assert survey.failed.keys() == {("s3", 1)}
    assert survey.workers.keys() == {"x"}
    newest = survey.newest
    assert newest is not None
    assert newest >= survey.done["s1"]
    assert board.holder("s2", 1) == "x"
    assert board.failure("s3", 1) == ("y", "the disk is full")
    assert board.presence("x") == {"worker": "x", "waiting": "memory"}


def test_a_survey_of_nothing(store: Store) -> None:
    survey = Board(store, "run").survey()
    assert survey == Survey((), {}, {}, {})
    assert survey.newest is None


def test_a_worker_that_ended_is_not_there(store: Store) -> None:
    board = Board(store, "run")
    board.present("a b", {})
    assert board.survey().workers.keys() == {"a-b"}, "a name that is no key"
    board.absent("a b")
    assert not board.survey().workers
    with pytest.raises(ObjectMissingError):
        board.presence("a-b")


def test_the_first_reason_stays_and_is_short(store: Store) -> None:
    board = Board(store, "run")
    lease = claimed(board)
    board.fail(lease, "x" * 2000)
    board.fail(lease, "another")
    assert board.failure("s1", 1) == ("w", "x" * 500)


def test_a_new_epoch_is_a_lease_of_its_own(store: Store) -> None:
    board = Board(store, "run")
    board.release(claimed(board))
    again = claimed(board, "heir")
    assert (again.shard, again.epoch) == ("s1", 2)
    assert [(one.shard, one.epoch, one.released) for one in board.survey().tenures] == [
        ("s1", 1, True),
        ("s1", 2, False),
    ]


def test_times_are_the_stores(tmp_path: Path) -> None:
    clock = Clock()
    board = Board(ClockStore.over(Store.open("memory://survey-times"), clock), "run")
    begun = clock.now
    lease = claimed(board)
    clock.advance(50)
    board.heartbeat(lease, {})
    [tenure] = board.survey().tenures
    assert (tenure.begun, (tenure.seen - begun).total_seconds()) == (begun, 50)


def test_looking_sends_no_request_that_writes() -> None:
    sent: list[str] = []
    inner = Store.open("memory://survey-reads")
    made = Board(inner, "run")
    finish(made, claimed(made))
    made.fail(claimed(made, "x"), "because")
    board = Board(ClockStore.over(inner, Clock(), sent.append), "run")
    survey = board.survey()
    board.survey(survey)
    board.done("s1")
    board.failure("s2", 1)
    board.spec()
    assert sent
    assert {request.split()[0] for request in sent} == {"list", "get"}


def test_leases_of_before_are_not_listed_again() -> None:
    sent: list[str] = []
    inner = Store.open("memory://survey-before")
    made = Board(inner, "run")
    finish(made, claimed(made))
    before = made.survey()
    finish(made, claimed(made))
    later = Board(ClockStore.over(inner, Clock(), sent.append), "run").survey(before)
    assert sent == ["list done", "list failed", "list workers"]
    assert later.tenures == before.tenures
    assert later.done.keys() == {"s1", "s2"}


def test_strangers_objects_are_no_leases(store: Store) -> None:
    board = Board(store, "run")
    for key in ("lease/odd", "lease/s1/one", "failed/x", "hb/s9/000001"):
        board.objects.put(key, b"{}")
    assert board.survey().tenures == ()
    assert board.survey().failed == {}


def test_folders_are_the_names_one_level_down(store: Store) -> None:
    assert folders(store, "runs") == []
    for key in ("runs/b/done/1", "runs/a/lease/s/1", "runs/a/spec.json", "runs/file", "other/c/d"):
        store.put(key, b"x")
    assert folders(store, "runs") == ["a", "b"]
    assert folders(store) == ["other", "runs"]
    assert folders(store.child("runs"), "a") == ["lease"]
