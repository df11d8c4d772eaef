"""What is tidied up, and above all what is not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from drafthouse.fleet import show
from drafthouse.fleet.records import Life, LifeState, Outcome, Records, current_of
from drafthouse.fleet.runtime.protocol import State, UnitStatus, unit_name
from drafthouse.fleet.survey import JobStatus, NodeStatus, Survey, rests, survey
from drafthouse.store import Lock, Store

_NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _life(epoch: int, node: str, outcome: Outcome | None = None, *, live: bool = True) -> LifeState:
    life = Life("job", epoch, node, "train", "process", None, "d", {}, "deploy", None, "someone", 5.0)
    return LifeState(life, _NOW, live_since=_NOW if live else None, outcome=outcome)


def _survey(lives: list[LifeState], nodes: dict[str, list[tuple[int, State]]], **more: Any) -> Survey:
    found = tuple(
        NodeStatus(name, tuple(UnitStatus(unit_name("job", epoch), state, "process") for epoch, state in units))
        for name, units in nodes.items()
    )
    gone = tuple(NodeStatus(name, (), "no answer") for name in more.get("gone", ()))
    return Survey((*found, *gone), (JobStatus("job", tuple(lives), current_of(lives), None, more.get("lock")),))


def test_a_zombie_of_a_life_that_is_over_is_ended() -> None:
    found = rests(_survey([_life(1, "n1", "lost"), _life(2, "n2")], {"n1": [(1, "running")], "n2": [(2, "running")]}))
    assert [(rest.do, rest.node, rest.unit) for rest in found] == [("stop", "n1", "drafthouse-job-e1")]


def test_what_counts_is_left_alone_even_when_it_has_ended() -> None:
    assert rests(_survey([_life(1, "n1")], {"n1": [(1, "exited")]}), keep=0) == []


def test_the_newest_ended_units_keep_their_logs() -> None:
    lives = [*(_life(epoch, "n1", "retired") for epoch in range(1, 5)), _life(5, "n1")]
    units: list[tuple[int, State]] = [(epoch, "exited") for epoch in range(1, 5)]
    found = rests(_survey(lives, {"n1": [*units, (5, "running")]}), keep=2)
    assert [(rest.do, rest.unit) for rest in found] == [
        ("remove", "drafthouse-job-e2"),
        ("remove", "drafthouse-job-e1"),
    ]


def test_units_that_nobody_recorded_are_left_and_said() -> None:
    found = rests(_survey([_life(1, "n1")], {"n2": [(7, "running")]}))
    assert [(rest.do, rest.unit) for rest in found] == [("leave", "drafthouse-job-e7")]


def test_nothing_of_a_job_is_touched_whose_records_cannot_be_read() -> None:
    lives = [_life(1, "n1", "lost"), _life(2, "n1", live=False), _life(3, "n1")]
    units: dict[str, list[tuple[int, State]]] = {"n1": [(1, "running"), (4, "exited")]}
    found = _survey(lives, units)
    assert {rest.do for rest in rests(found, keep=0)} == {"stop", "leave", "close"}
    damaged = replace(found, jobs=(replace(found.jobs[0], current=None, unreadable=("lives/job/000004: damaged",)),))
    assert [(rest.do, rest.text) for rest in rests(damaged, keep=0)] == [
        ("leave", "a record of its job cannot be read"),
        ("leave", "a record of its job cannot be read"),
    ]
    told = damaged.as_dict()["jobs"]["job"]
    assert (told["status"], told["unreadable"]) == ("unknown", ["lives/job/000004: damaged"])
    text = shown(damaged)
    assert "unknown" in text
    assert "job: lives/job/000004: damaged" in text


def test_one_jobs_records_do_not_hide_another(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    records = Records(store.child("fleet"))
    for job in ("bad", "good", "held"):
        records.begin(replace(_life(1, "n1").life, job=job))
        records.mark_live(job, 1, "")
    records.objects.put("live/bad/000001", b"{")
    records.objects.put("lock/held/000001", b"{")
    controller = SimpleNamespace(
        inventory=SimpleNamespace(nodes=lambda _: []),
        progress=None,
        records=records,
        lock_holder=lambda job: Lock(records.objects, job).holder(),
    )
    found = {job.name: job for job in survey(controller).jobs}  # type: ignore[arg-type]
    assert {name: bool(job.unreadable) for name, job in found.items()} == {"bad": True, "good": False, "held": True}
    assert found["good"].current is not None
    assert found["bad"].current is None
    assert found["held"].current is not None, "only who is at it is not known"


def shown(found: Survey) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(show.survey(found))
    return capture.get()


def test_a_life_that_an_operators_death_left_open_is_closed() -> None:
    lives = [_life(1, "n1", live=False), _life(2, "n1")]
    units: dict[str, list[tuple[int, State]]] = {"n1": [(2, "running")]}
    assert [rest.do for rest in rests(_survey(lives, units))] == ["close"]
    assert rests(_survey(lives, units, lock="someone")) == []  # he may be at it
    assert rests(_survey(lives, {}, gone=["n1"])) == []  # it may run where nobody can look
