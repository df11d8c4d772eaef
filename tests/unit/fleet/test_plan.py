"""The order of steps is the promise of a migration: what is fenced when, and what is never given up early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafthouse.fleet.plan import Do, Finding, Place, Situation, plan, way_back

_HERE = Situation("job", "extract", "migrate", "new", 3, Place("old", 2, True))
_KINDS = ("extract", "train", "serve", "command")


def _order(situation: Situation) -> list[tuple[Do, str]]:
    return [(step.do, step.node) for step in plan(situation).steps]


@pytest.mark.parametrize("kind", ["train", "command"])
def test_what_must_never_run_twice_is_stopped_and_fenced_before_the_new_one_starts(kind: str) -> None:
    """In this order: a trainer that hears the stop leaves a checkpoint, and after the fence it would be refused."""
    dos = [do for do, _ in _order(replace(_HERE, kind=kind))]
    assert dos == ["begin", "stop", "fence", "start", "gate", "live", "end"]


def test_extraction_overlaps_and_is_fenced_only_after_the_proof() -> None:
    dos = [do for do, _ in _order(_HERE)]
    assert dos == ["begin", "start", "gate", "live", "fence", "stop", "end"]


def test_a_served_model_is_switched_after_the_proof_and_drained_before_the_stop() -> None:
    found = _order(replace(_HERE, kind="serve", proxied=True, fenced=False))
    assert found == [
        ("begin", "new"),
        ("start", "new"),
        ("gate", "new"),
        ("live", "new"),
        ("switch", "new"),
        ("drain", "old"),
        ("stop", "old"),
        ("end", "old"),
    ]


@pytest.mark.parametrize("kind", _KINDS)
def test_an_unreachable_node_blocks_nothing_and_is_warned_of(kind: str) -> None:
    gone = replace(_HERE, kind=kind, old=Place("old", 2, False), fenced=kind != "serve")
    found = plan(gone)
    assert not found.refused
    assert "stop" not in [step.do for step in found.steps]
    assert [step.do for step in found.steps][-1] == "end"
    assert any("cannot be reached" in finding.text and "gc" in str(finding) for finding in found.findings)


@pytest.mark.parametrize("kind", _KINDS)
def test_in_place_the_old_one_is_stopped_first(kind: str) -> None:
    dos = [do for do, _ in _order(replace(_HERE, kind=kind, to="old", proxied=kind == "serve"))]
    assert dos.index("stop") < dos.index("start")
    if kind == "serve":
        assert dos.index("drain") < dos.index("stop")


def test_a_first_life_has_nothing_to_stop_or_fence() -> None:
    dos = [do for do, _ in _order(Situation("job", "train", "deploy", "new", 1))]
    assert dos == ["begin", "start", "gate", "live"]


def test_a_later_life_without_an_open_one_still_fences() -> None:
    """The job was stopped, or its life was lost: a zombie of it may be anywhere."""
    assert "fence" in [do for do, _ in _order(Situation("job", "train", "deploy", "new", 4))]


def test_the_image_comes_first_and_only_when_it_is_missing() -> None:
    image = "registry.example/x@sha256:" + "0" * 64
    assert _order(replace(_HERE, image=image, image_there=False))[0] == ("provide", "new")
    assert ("provide", "new") not in _order(replace(_HERE, image=image))


def test_errors_refuse_and_warnings_do_not() -> None:
    against = Finding("error", "new: gpus: 0 where 2 are needed", "use another node")
    assert plan(replace(_HERE, findings=(against,))).refused == (against,)
    assert not plan(replace(_HERE, findings=(replace(against, severity="warning"),))).refused


def test_a_failure_at_the_gate_takes_only_the_new_life_away() -> None:
    back = way_back(_HERE, ["begin", "start", "gate"])
    assert [(step.do, step.node) for step in back.steps] == [("stop", "new"), ("end", "new")]
    assert not back.restart_old


def test_a_failure_after_the_old_trainer_was_stopped_starts_it_again() -> None:
    train = replace(_HERE, kind="train")
    assert way_back(train, ["begin", "stop", "fence", "start", "gate"]).restart_old
    assert not way_back(replace(train, old=Place("old", 2, False)), ["begin", "fence", "start", "gate"]).restart_old


def test_a_failed_switch_gives_the_clients_back() -> None:
    serve = replace(_HERE, kind="serve", proxied=True)
    back = way_back(serve, ["begin", "start", "gate", "live", "switch"])
    assert [(step.do, step.node) for step in back.steps] == [
        ("switch", "old"),
        ("drain", "new"),
        ("stop", "new"),
        ("end", "new"),
    ]


def test_nothing_was_begun_nothing_is_undone() -> None:
    assert way_back(_HERE, ["provide"]).steps == ()
