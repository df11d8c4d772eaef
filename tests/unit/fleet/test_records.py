"""Lives of jobs: which one counts, and that two operators cannot begin the same one."""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from drafthouse.errors import FleetError, StoreError
from drafthouse.fleet.records import Life, Records, newest_before
from drafthouse.fleet.runtime.protocol import parse_unit
from drafthouse.store import Store


@pytest.fixture
def records() -> Records:
    return Records(Store.open(f"memory://{secrets.token_hex(6)}"))


def life(epoch: int = 1, node: str = "n1", job: str = "job", **more: object) -> Life:
    values = {
        "kind": "train",
        "runtime": "process",
        "image": None,
        "digest": "d",
        "spec": {"name": job},
        "action": "deploy",
        "replaces": None,
        "who": "someone",
        "grace_s": 5.0,
    }
    return Life(job=job, epoch=epoch, node=node, **{**values, **more})  # type: ignore[arg-type]


def test_a_life_goes_from_starting_to_live_to_its_end(records: Records) -> None:
    records.begin(life())
    assert [state.status for state in records.lives("job")] == ["starting"]
    records.mark_live("job", 1, "step 3")
    found = records.lives("job")[0]
    assert (found.status, found.evidence, found.life) == ("live", "step 3", life())
    records.end("job", 1, "retired", "moved")
    found = records.lives("job")[0]
    assert (found.status, found.reason, found.open) == ("retired", "moved", False)
    assert records.current("job") is None


def test_only_one_of_many_operators_begins_an_epoch(records: Records) -> None:
    def attempt(_: int) -> bool:
        try:
            records.begin(life())
        except FleetError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(16))) == 1


def test_the_life_that_works_counts_until_the_new_one_works(records: Records) -> None:
    records.begin(life(1))
    records.mark_live("job", 1, "")
    records.begin(life(2, "n2"))
    assert records.current("job").life.epoch == 1  # type: ignore[union-attr]
    records.mark_live("job", 2, "")
    assert records.current("job").life.epoch == 2  # type: ignore[union-attr]
    records.end("job", 1, "retired", "")
    assert [state.life.job for state in records.on_node("n1")] == []
    assert [state.life.epoch for state in records.on_node("n2")] == [2]


def test_the_first_end_counts(records: Records) -> None:
    records.begin(life())
    records.end("job", 1, "lost", "gone")
    records.end("job", 1, "retired", "late")
    assert records.lives("job")[0].outcome == "lost"


def test_an_epoch_is_used_even_when_its_life_failed(records: Records) -> None:
    records.begin(life())
    records.end("job", 1, "failed", "")
    assert records.next_epoch("job") == 2
    assert records.next_epoch("other") == 1


def test_a_rollback_sees_only_what_has_worked(records: Records) -> None:
    for epoch, worked in ((1, True), (2, False), (3, True), (4, True)):
        records.begin(life(epoch))
        if worked:
            records.mark_live("job", epoch, "")
    assert [state.life.epoch for state in newest_before(records.lives("job"), 4)] == [3, 1]


def test_jobs_do_not_see_each_other(records: Records) -> None:
    records.begin(life(1, job="train"))
    records.begin(life(1, job="train-two"))
    assert [state.life.job for state in records.lives("train")] == ["train"]
    assert [state.life.job for state in records.lives()] == ["train", "train-two"]


def test_a_strangers_object_is_named(records: Records) -> None:
    records.objects.put("lives/job/000001", b"[]")
    with pytest.raises(StoreError, match="lives/job/000001"):
        records.lives()
    records.objects.put("lives/job/000001", b'{"job": "job"}')
    with pytest.raises(StoreError, match="not the record of a life"):
        records.lives()


def test_a_record_that_cannot_be_read_says_nothing_against_the_others(records: Records) -> None:
    for job, epoch in (("good", 1), ("bad", 1), ("bad", 2)):
        records.begin(life(epoch, job=job))
    records.mark_live("bad", 1, "")
    records.objects.put("lives/bad/000002", b"\x00")
    found = records.read()
    assert [(state.life.job, state.life.epoch) for state in found.lives] == [("bad", 1), ("good", 1)]
    assert list(found.unreadable) == [("bad", 2)]
    assert "lives/bad/000002: this object is not the JSON" in str(found.unreadable["bad", 2])
    assert records.next_epoch("bad") == 3, "it is used, whatever it says"
    assert [state.life.job for state in records.on_node("n1", "good")] == ["good"]
    for decide in (records.current, records.lives):
        with pytest.raises(StoreError, match="lives/bad/000002"):
            decide("bad")
    with pytest.raises(StoreError, match="lives/bad/000002"):
        records.on_node("n1")


def test_a_bad_answer_is_asked_for_once_more(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in ("one", "two"):
        records.begin(life(job=job))
    get, bad = records.objects.get, {"lives/one/000001": b"<html>", "lives/two/000001": StoreError("timed out")}

    def flaky(key: str, *, most: int | None = None) -> bytes:
        answer = bad.pop(key, None)
        if isinstance(answer, StoreError):
            raise answer
        return get(key, most=most) if answer is None else answer

    monkeypatch.setattr(records.objects, "get", flaky)
    assert [state.life.job for state in records.lives()] == ["one", "two"]
    assert bad == {}


@pytest.mark.parametrize(
    ("key", "odd"),
    [
        ("lives/bad/000001", {"grace_s": 1e400}),
        ("lives/bad/000001", {"node": None}),
        ("lives/bad/000001", {"job": "good"}),
        ("lives/bad/000001", {"epoch": 2}),
        ("live/bad/000001", {"evidence": ["a shard"]}),
        ("ends/bad/000001", {"outcome": "forgotten"}),
        ("ends/bad/000001", {"reason": 7}),
    ],
)
def test_a_record_of_other_types_is_none(records: Records, key: str, odd: dict[str, Any]) -> None:
    for job in ("bad", "good"):
        records.begin(life(job=job))
        records.mark_live(job, 1, "a shard")
        records.end(job, 1, "lost", "the node is gone")
    body = json.loads(records.objects.get(key))
    records.objects.put(key, json.dumps(body | odd).encode())
    found = records.read()
    assert [state.life.job for state in found.lives] == ["good"]
    assert f"{key}: this is not the record" in str(found.unreadable["bad", 1])


def test_a_units_name_carries_job_and_epoch() -> None:
    assert parse_unit(replace(life(12), job="a-b-e3").unit) == ("a-b-e3", 12)
    assert parse_unit("drafthouse-x-e0") is None
    assert parse_unit("other") is None
