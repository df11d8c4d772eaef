"""Epochs of a job, on every kind of store."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from drafthouse.errors import StoreError
from drafthouse.fleet.errors import FencedError as OfTheFleet
from drafthouse.store import Fence, FencedError, Store
from tests.doubles.stores import Clock, ClockStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(clock: Clock) -> Fence:
    return Fence(ClockStore.over(Store.open(f"memory://{secrets.token_hex(8)}"), clock), "train")


def test_a_job_that_was_never_declared(store: Store) -> None:
    fence = Fence(store, "train")
    assert fence.newest() == 0
    assert fence.since(0) is None
    fence.check(0)


def test_a_higher_epoch_ends_the_lower_ones(store: Store) -> None:
    fence = Fence(store, "train")
    assert fence.raise_to(1, {"node": "old"})
    fence.check(1)
    assert fence.raise_to(2, {"node": "new"})
    fence.check(2)
    with pytest.raises(FencedError, match=r"fence/train: epoch 1 of this job is over: epoch 2 was declared") as caught:
        fence.check(1)
    assert caught.value.exit_code == 76
    assert isinstance(caught.value, OfTheFleet)
    assert not isinstance(caught.value, StoreError), "whoever survives an outage of the store must not survive this"
    assert (fence.newest(), Fence(store, "train").newest()) == (2, 2)


def test_an_epoch_is_declared_once_and_never_a_lower_one(store: Store) -> None:
    fence = Fence(store, "train")
    assert fence.raise_to(7, {})
    assert not fence.raise_to(7, {})
    assert not fence.raise_to(6, {})
    assert fence.newest() == 7
    assert [info.key for info in store.list("fence")] == ["fence/train/000007"]


def test_jobs_are_separate(store: Store) -> None:
    assert Fence(store, "train").raise_to(3, {})
    Fence(store, "train-2").check(1)
    Fence(store, "trai").check(1)


def test_one_of_many_racers_declares_an_epoch(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda _: Fence(store, "train").raise_to(1, {}), range(8)))
    assert won.count(True) == 1


def test_since_is_the_stores_time_of_the_fence_above(timed: Fence, clock: Clock) -> None:
    assert timed.raise_to(1, {})
    clock.advance(10)
    first = clock.now
    assert timed.raise_to(2, {})
    clock.advance(10)
    assert timed.raise_to(4, {})
    assert timed.since(1) == first
    assert timed.since(2) == timed.since(3) == clock.now
    assert timed.since(4) is None


def test_since_is_the_first_moment_when_epochs_were_declared_out_of_order(clock: Clock) -> None:
    store = ClockStore.over(Store.open(f"memory://{secrets.token_hex(8)}"), clock)

    def overtake(operation: str) -> None:
        if operation == "create 000002":
            assert Fence(store, "train").raise_to(3, {})
            clock.advance(10)

    slow = Fence(ClockStore.over(store, clock, overtake), "train")
    first = clock.now
    assert slow.raise_to(2, {}), "it declared its epoch"
    with pytest.raises(FencedError):
        slow.check(2)
    assert slow.since(1) == first


def test_the_sixth_digit_is_not_the_end(store: Store) -> None:
    fence = Fence(store, "train")
    assert fence.raise_to(999_999, {})
    assert fence.raise_to(1_000_000, {})
    assert fence.newest() == 1_000_000


def test_strangers_objects_are_no_epochs(store: Store) -> None:
    for key in ("note", "1a", "1/2"):
        store.put(f"fence/train/{key}", b"?")
    assert Fence(store, "train").newest() == 0


@pytest.mark.parametrize("job", ["", "a/b", "..", "a b", "$(touch x)"])
def test_bad_jobs(job: str) -> None:
    with pytest.raises(StoreError):
        Fence(Store.open("memory://x"), job)


@pytest.mark.parametrize("epoch", [0, -1])
def test_bad_epochs(epoch: int, store: Store) -> None:
    with pytest.raises(StoreError, match="epochs begin at 1"):
        Fence(store, "train").raise_to(epoch, {})
    assert store.list() == []
