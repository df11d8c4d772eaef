"""The append-only journal, on every kind of store."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from drafthouse.errors import StoreError
from drafthouse.store import Journal, Store
from tests.doubles.stores import Clock, ClockStore


def test_entries_come_back_in_order(store: Store) -> None:
    journal = Journal(store)
    before = datetime.now(UTC) - timedelta(seconds=2)
    for number in range(12):
        journal.append({"action": "deploy", "number": number})
    entries = Journal(store).entries()
    assert [entry.body["number"] for entry in entries] == list(range(12))
    assert [entry.body["number"] for entry in journal.entries(newest=3)] == [9, 10, 11]
    assert journal.entries(newest=0) == []
    assert len(journal.entries(newest=99)) == 12
    assert all(before <= entry.at <= datetime.now(UTC) + timedelta(seconds=2) for entry in entries)


def test_an_empty_journal(store: Store) -> None:
    assert Journal(store).entries() == []


def test_many_writers_lose_nothing(store: Store) -> None:
    def write(writer: int) -> None:
        journal = Journal(store)
        for number in range(5):
            journal.append({"writer": writer, "number": number})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    entries = [entry.body for entry in Journal(store).entries()]
    assert len(entries) == 20
    for writer in range(4):
        assert [body["number"] for body in entries if body["writer"] == writer] == list(range(5))


def test_times_are_the_stores() -> None:
    clock = Clock()
    store = ClockStore.over(Store.open(f"memory://{secrets.token_hex(8)}"), clock)
    late, early = Journal(store), Journal(store)
    early.append({"n": 1})
    clock.advance(60)
    late.append({"n": 2})
    clock.advance(60)
    early.append({"n": 3})
    assert [(entry.body["n"], entry.at) for entry in late.entries()] == [
        (1, datetime(2030, 1, 1, tzinfo=UTC)),
        (2, datetime(2030, 1, 1, 0, 1, tzinfo=UTC)),
        (3, datetime(2030, 1, 1, 0, 2, tzinfo=UTC)),
    ]


def test_a_damaged_entry_is_one_sentence(store: Store) -> None:
    store.put("audit/note", b"not an entry")
    assert Journal(store).entries() == []
    store.put("audit/001900000000000-0123456789abcdef", b"\x00")
    with pytest.raises(StoreError, match="audit/001900000000000-0123456789abcdef: this object is not the JSON"):
        Journal(store).entries()
