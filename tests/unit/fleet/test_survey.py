"""What is tidied up, and above all what is not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from drafthouse.fleet.records import Life, LifeState, Outcome, current_of
from drafthouse.fleet.runtime.protocol import State, UnitStatus, unit_name
from drafthouse.fleet.survey import JobStatus, NodeStatus, Survey, rests

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


def test_a_life_that_an_operators_death_left_open_is_closed() -> None:
    lives = [_life(1, "n1", live=False), _life(2, "n1")]
    units: dict[str, list[tuple[int, State]]] = {"n1": [(2, "running")]}
    assert [rest.do for rest in rests(_survey(lives, units))] == ["close"]
    assert rests(_survey(lives, units, lock="someone")) == []  # he may be at it
    assert rests(_survey(lives, {}, gone=["n1"])) == []  # it may run where nobody can look
