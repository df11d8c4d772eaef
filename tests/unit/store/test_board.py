"""The lease protocol, on every kind of store; time passes by a double's clock."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

import pytest

from drafthouse.errors import StatesError, StoreError
from drafthouse.store import Board, Done, Lease, Store
from tests.doubles.stores import Clock, ClockStore

SHARDS = ["s1", "s2", "s3"]


def _finish(board: Board, lease: Lease, content: bytes | None = None) -> bool:
    content = content if content is not None else lease.worker.encode()
    board.objects.put(board.data_key(lease), content)
    digest = hashlib.sha256(content).hexdigest()
    return board.commit(lease, size=len(content), sha256=digest, tokens=7, extra={"rate": 1.5})


def _claimed(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> Board:
    return Board(ClockStore.over(Store.open(f"memory://{secrets.token_hex(8)}"), clock), "run", ttl_s=600)


def test_a_run_from_claim_to_done(store: Store) -> None:
    board = Board(store, "run", ttl_s=600)
    board.bind({"target": "abc", "layers": [1, 2]})
    first, second = _claimed(board.claim(SHARDS, "w1")), _claimed(board.claim(SHARDS, "w2"))
    assert (first.shard, second.shard) == ("s1", "s2")
    board.heartbeat(first, {"tokens": 12})
    assert board.data_key(first) == "data/s1/000001-w1.safetensors"
    assert _finish(board, first)
    states = board.states(SHARDS)
    assert [states[name].status for name in SHARDS] == ["done", "leased", "free"]
    assert [states[name].worker for name in SHARDS] == ["w1", "w2", None]
    assert [states[name].epoch for name in SHARDS] == [1, 1, 0]
    board.release(second)
    assert board.states(SHARDS)["s2"].status == "stale"
    again = _claimed(board.claim(SHARDS, "w3"))
    assert (again.shard, again.epoch) == ("s2", 2)
    assert _finish(board, again)
    assert _finish(board, _claimed(board.claim(SHARDS, "w3")))
    assert board.claim(SHARDS, "w3") is None
    done = Board(store, "run").all_done()
    assert [(marker.shard, marker.worker, marker.epoch) for marker in done] == [
        ("s1", "w1", 1),
        ("s2", "w3", 2),
        ("s3", "w3", 1),
    ]
    assert done[0].key == "data/s1/000001-w1.safetensors"
    assert done[0].extra == {"rate": 1.5}
    assert done[0].sha256 == hashlib.sha256(store.get(f"runs/run/{done[0].key}")).hexdigest()


def test_a_second_run_in_the_store_is_separate(store: Store) -> None:
    assert Board(store, "a").claim(["s"], "w") is not None
    assert Board(store, "b").claim(["s"], "w") is not None
    assert Board(store, "a").claim(["s"], "w") is None


def test_bind_names_every_field_that_differs(store: Store) -> None:
    spec = {"target": "old", "layer_ids": [1, 2], "corpus": {"digest": "a", "tokens": 5}}
    Board(store, "run").bind(spec)
    Board(store, "run").bind(dict(reversed(spec.items())))
    assert Board(store, "run").spec() == spec
    other = {"target": "new", "layer_ids": [1, 2], "corpus": {"digest": "b", "tokens": 5}, "dtype": "bf16"}
    with pytest.raises(StatesError) as caught:
        Board(store, "run").bind(other)
    message = str(caught.value)
    assert "target: old → new" in message
    assert "corpus.digest: a → b" in message
    assert "dtype: (absent) → bf16" in message
    assert "layer_ids" not in message
    assert "tokens" not in message
    assert Board(store, "run").spec() == spec


def test_bind_takes_tuples_as_json_does(board: Board) -> None:
    board.bind({"layer_ids": (1, 2)})
    board.bind({"layer_ids": [1, 2]})


def test_a_heartbeat_keeps_a_lease_and_silence_loses_it(board: Board, clock: Clock) -> None:
    lease = _claimed(board.claim(["s"], "w1"))
    clock.advance(500)
    board.heartbeat(lease, {})
    clock.advance(600)
    assert board.claim(["s"], "w2") is None
    assert board.states(["s"])["s"].age_s == 600
    clock.advance(1)
    assert not board.lost(lease)
    taken = _claimed(board.claim(["s"], "w2"))
    assert taken.epoch == 2
    assert board.lost(lease)
    assert not board.lost(taken)


def test_a_zombies_heartbeat_does_not_keep_the_new_lease_alive(board: Board, clock: Clock) -> None:
    zombie = _claimed(board.claim(["s"], "w1"))
    clock.advance(601)
    _claimed(board.claim(["s"], "w2"))
    clock.advance(601)
    board.heartbeat(zombie, {})
    assert _claimed(board.claim(["s"], "w3")).epoch == 3


def test_the_first_marker_wins_and_the_loser_removes_its_data(board: Board, clock: Clock) -> None:
    zombie = _claimed(board.claim(["s"], "w1"))
    clock.advance(601)
    heir = _claimed(board.claim(["s"], "w2"))
    board.objects.put(board.data_key(heir), b"half")
    assert _finish(board, zombie)
    assert not _finish(board, heir)
    winner = board.done("s")
    assert winner is not None
    assert (winner.worker, winner.epoch) == ("w1", 1)
    assert [info.key for info in board.objects.list("data")] == [winner.key]
    assert board.lost(heir)


def test_committing_twice_keeps_the_data(board: Board) -> None:
    lease = _claimed(board.claim(["s"], "w"))
    assert _finish(board, lease)
    assert board.commit(lease, size=1, sha256="x", tokens=1, extra={"other": 1})
    assert board.objects.head(board.data_key(lease)) is not None


def test_a_released_lease_can_be_claimed_at_once(board: Board) -> None:
    lease = _claimed(board.claim(["s"], "w1"))
    assert board.claim(["s"], "w2") is None
    board.release(lease)
    assert _claimed(board.claim(["s"], "w2")).epoch == 2


def test_commit_refuses_what_is_not_there_or_short(board: Board) -> None:
    lease = _claimed(board.claim(["s"], "w"))
    with pytest.raises(StoreError, match="the data object is missing"):
        board.commit(lease, size=3, sha256="x", tokens=1, extra={})
    board.objects.put(board.data_key(lease), b"12")
    with pytest.raises(StoreError, match="2 bytes long instead of 3"):
        board.commit(lease, size=3, sha256="x", tokens=1, extra={})
    assert board.done("s") is None


def test_janitor_removes_only_what_can_never_count(board: Board, clock: Clock) -> None:
    board.objects.put("data/s1/000001-dead.safetensors", b"orphan of an unfinished shard")
    zombie = _claimed(board.claim(["s2"], "w1"))
    board.objects.put(board.data_key(zombie), b"uploaded, then silent")
    clock.advance(601)
    heir = _claimed(board.claim(["s2"], "w2"))
    assert _finish(board, heir)
    board.heartbeat(zombie, {})
    assert board.janitor() == [], "the zombie lives again: its lease may yet be committed and lose by itself"
    clock.advance(601)
    assert board.janitor() == [board.data_key(zombie)]
    assert {info.key for info in board.objects.list("data")} == {
        "data/s1/000001-dead.safetensors",
        board.data_key(heir),
    }
    assert not board.commit(zombie, size=21, sha256="x", tokens=1, extra={})


def test_a_shard_finished_between_look_and_claim_is_not_claimed(clock: Clock) -> None:
    store = Store.open(f"memory://{secrets.token_hex(8)}")
    zombie_board = Board(ClockStore.over(store, clock), "run")
    zombie = _claimed(zombie_board.claim(["s"], "w1"))
    clock.advance(601)

    def finish_meanwhile(operation: str) -> None:
        if operation.startswith("create lease"):
            _finish(zombie_board, zombie)

    late = Board(ClockStore.over(store, clock, finish_meanwhile), "run")
    assert late.claim(["s"], "w2") is None


def test_worker_names_are_made_into_keys(board: Board) -> None:
    lease = _claimed(board.claim(["s"], "räck/7 gpu#1"))
    assert "#" not in lease.worker
    assert _finish(board, lease)


def test_strangers_objects_are_ignored(board: Board) -> None:
    for key in ("lease/s", "lease/s/one", "lease/s/1/2", "hb/x", "data/s", "data/s/x", "data/s/y/z"):
        if key != "lease/s":
            board.objects.put(key, b"?")
    assert board.states(["s"])["s"].status == "free"
    assert _finish(board, _claimed(board.claim(["s"], "w")))
    assert board.janitor() == []


def test_a_damaged_marker_is_one_sentence(board: Board) -> None:
    board.objects.put("done/s", b"\x00")
    with pytest.raises(StoreError, match="done/s: this object is not the JSON"):
        board.done("s")
    board.objects.put("done/t", b'{"shard": "t"}')
    with pytest.raises(StoreError, match="done/t: this is not a done-marker"):
        board.done("t")


@pytest.mark.parametrize(("run", "ttl"), [("a/b", 600), ("", 600), ("..", 600), ("run", 0), ("run", -5)])
def test_bad_runs(run: str, ttl: float) -> None:
    with pytest.raises(StoreError):
        Board(Store.open("memory://x"), run, ttl_s=ttl)


def test_looking_never_removes(board: Board, clock: Clock) -> None:
    zombie = _claimed(board.claim(["s"], "w1"))
    board.objects.put(board.data_key(zombie), b"uploaded, then silent")
    clock.advance(601)
    assert _finish(board, _claimed(board.claim(["s"], "w2")))
    assert board.janitor(dry_run=True) == [board.data_key(zombie)]
    assert board.objects.head(board.data_key(zombie)) is not None
    assert board.janitor() == [board.data_key(zombie)]


def test_the_janitor_of_a_run_that_is_not_there_leaves_no_trace(tmp_path: Path) -> None:
    assert Board(Store.open(str(tmp_path / "typo")), "run").janitor() == []
    assert not (tmp_path / "typo").exists()


def test_janitor_of_a_directory_sweeps_staging_files(tmp_path: Path) -> None:
    board = Board(Store.open(str(tmp_path)), "run", ttl_s=0.01)
    rest = tmp_path / "runs" / "run" / "data" / "s" / "000001-w.safetensors#1"
    rest.parent.mkdir(parents=True)
    rest.write_bytes(b"x")
    assert board.janitor() == [], "it may still be growing"
    os.utime(rest, (0, 0))
    assert board.janitor() == ["data/s/000001-w.safetensors#1"]


def test_done_markers_round_trip(board: Board) -> None:
    lease = _claimed(board.claim(["s"], "w"))
    _finish(board, lease, b"content")
    assert Board(board_store(board), "run").done("s") == Done(
        shard="s",
        key="data/s/000001-w.safetensors",
        size=7,
        sha256=hashlib.sha256(b"content").hexdigest(),
        tokens=7,
        worker="w",
        epoch=1,
        token=lease.token,
        extra={"rate": 1.5},
    )


def board_store(board: Board) -> Store:
    """The store that the board's run lies in."""
    return Store.open(board.objects.url.removesuffix("/runs/run"))
