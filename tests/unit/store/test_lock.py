"""A lock of create-only objects, on every kind of store."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from drafthouse.errors import StoreError
from drafthouse.store import Held, Holder, Lock, Store
from tests.doubles.s3_server import S3Double
from tests.doubles.stores import Clock, ClockStore


def test_taken_and_given_back(store: Store) -> None:
    lock = Lock(store, "deploy")
    assert lock.holder() is None
    with lock.acquire("anna@desk", "migrate") as held:
        holder = Lock(store, "deploy").holder()
        assert holder is not None
        assert (holder.turn, holder.who, holder.action) == (1, "anna@desk", "migrate")
        assert not held.lost()
    assert lock.holder() is None
    with lock.acquire("ben@desk", "deploy") as held:
        assert held.turn == 2
    assert [info.key for info in store.list()] == [
        "lock/deploy/000001",
        "lock/deploy/000002",
        "unlock/deploy/000001",
        "unlock/deploy/000002",
    ]


def test_whoever_finds_it_taken_is_told_by_whom() -> None:
    clock = Clock()
    store = ClockStore.over(Store.open(f"memory://{secrets.token_hex(8)}"), clock)
    Lock(store, "deploy").acquire("anna@desk", "migrate old to new")
    clock.advance(3600)
    with pytest.raises(StoreError) as caught:
        Lock(store, "deploy").acquire("ben@desk", "deploy")
    message = str(caught.value)
    assert "held by anna@desk for 'migrate old to new' since 2030-01-01T00:00:00+00:00 (turn 1)" in message
    assert f"break it: create the object {store.url}/unlock/deploy/000001" in message
    with pytest.raises(StoreError, match="break it: fab unlock --turn 1"):
        Lock(store, "deploy", breaking="fab unlock --turn 1").acquire("ben@desk", "deploy")
    store.put("unlock/deploy/000001", b"{}")
    Lock(store, "deploy").acquire("ben@desk", "deploy").release()


def test_locks_of_other_names_are_free(store: Store) -> None:
    Lock(store, "deploy").acquire("anna", "a")
    Lock(store, "deploy-2").acquire("ben", "b")


def test_one_of_many_racers_gets_it(store: Store) -> None:
    def race(name: int) -> Held | None:
        try:
            return Lock(store, "deploy").acquire(str(name), "race")
        except StoreError:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [held for held in pool.map(race, range(8)) if held is not None]
    assert len(won) == 1
    won[0].release()
    assert race(9) is not None


def test_it_is_given_back_when_the_work_fails(store: Store) -> None:
    lock = Lock(store, "deploy")
    with pytest.raises(ValueError, match="no image"), lock.acquire("anna", "deploy"):
        raise ValueError("no image")
    assert lock.holder() is None


def test_breaking_takes_it_from_the_dead(store: Store) -> None:
    lock = Lock(store, "deploy")
    assert lock.breaks("nobody holds it", "ben") is None
    held = lock.acquire("anna", "migrate")
    broken = lock.breaks("her laptop burnt", "ben")
    assert isinstance(broken, Holder)
    assert (broken.turn, broken.who) == (1, "anna")
    assert held.lost()
    with lock.acquire("ben", "recover") as next_held:
        assert held.lost()
        assert not next_held.lost()
        with pytest.raises(StoreError, match=r"'deploy' was broken by ben \(her laptop burnt\) while this held it"):
            held.release()
        assert lock.holder() is not None, "the late release must not free the successor's turn"
    assert lock.holder() is None


def test_the_works_own_error_is_told_before_a_broken_lock(store: Store) -> None:
    def work() -> None:
        Lock(store, "deploy").breaks("too slow", "ben")
        raise ValueError("no image")

    with pytest.raises(ValueError, match="no image"), Lock(store, "deploy").acquire("anna", "deploy"):
        work()


def test_breaking_a_turn_spares_its_successor(store: Store) -> None:
    lock = Lock(store, "deploy")
    lock.acquire("anna", "deploy").release()
    held = lock.acquire("cleo", "deploy")
    assert lock.breaks("seen an hour ago", "ben", turn=1) is None
    assert not held.lost()
    assert lock.breaks("really dead", "ben", turn=2) is not None
    assert held.lost()


def test_releasing_twice_is_once(store: Store) -> None:
    lock = Lock(store, "deploy")
    held = lock.acquire("anna", "a")
    held.release()
    with lock.acquire("ben", "b"):
        held.release()
        assert not held.lost()
        assert lock.holder() is not None


def test_lost_answers_neither_lose_nor_double_the_lock(double: S3Double) -> None:
    lock = Lock(Store.open(f"s3://bucket/p?endpoint={double.endpoint}"), "deploy")
    double.faults.lose_answers = 1
    held = lock.acquire("anna", "a")
    assert held.turn == 1
    double.faults.lose_answers = 1
    held.release()
    assert lock.holder() is None


def test_a_damaged_turn_is_one_sentence(store: Store) -> None:
    store.put("lock/deploy/000001", b"\x00")
    with pytest.raises(StoreError, match="lock/deploy/000001: this object is not the JSON"):
        Lock(store, "deploy").acquire("anna", "a")


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b"])
def test_bad_names(name: str) -> None:
    with pytest.raises(StoreError):
        Lock(Store.open("memory://x"), name)
