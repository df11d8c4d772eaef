"""Rows of metrics.jsonl as curves, read as they arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.dash.collect.curve import Curve
from drafthouse.dash.collect.series import MOST


def row(step: int, **more: Any) -> bytes:
    values = {"step": step, "tokens": 10 * step, "loss": 1 / step, "lr": 1e-3, "seconds": step / 2, **more}
    return json.dumps(values).encode() + b"\n"


def rows(count: int) -> bytes:
    return b"".join(row(step, accuracy=[0.5, 0.25]) for step in range(1, count + 1))


def by_name(curve: Curve) -> dict[str, tuple[float | None, ...]]:
    return {one.name: one.y for one in curve.shown()}


def test_the_last_row_and_all_curves() -> None:
    curve = Curve()
    assert curve.feed(rows(3) + json.dumps({"step": 3, "evaluation": {"acceptance": 2.5}}).encode() + b"\n")
    assert curve.latest["step"] == 3
    assert curve.accuracy == (0.5, 0.25)
    assert by_name(curve)["loss"] == (1.0, 0.5, 1 / 3)
    assert by_name(curve)["accuracy, all slots"] == (0.375,) * 3
    assert by_name(curve)["accuracy slot 2"] == (0.25,) * 3
    assert by_name(curve)["acceptance length"] == (2.5,)
    assert [(one.step, one.chain, one.tree) for one in curve.evaluations] == [(3, 2.5, None)]
    assert curve.flat()["accuracy[2]"] == 0.25
    assert curve.steps_per_s() == pytest.approx(2.0)


def test_evaluations_of_both_modes() -> None:
    curve = Curve()
    curve.feed(json.dumps({"step": 1, "evaluation": {"chain": {"micro": 2.0}, "tree": 3}}).encode() + b"\n")
    assert [(one.chain, one.tree) for one in curve.evaluations] == [(2.0, 3.0)]
    assert by_name(curve) == {"acceptance length": (3.0,)}


@given(st.integers(0, 12), st.lists(st.integers(0, 700), max_size=12))
def test_however_it_arrives_the_curve_is_the_same(count: int, cuts: list[int]) -> None:
    data = rows(count)
    whole, parts = Curve(), Curve()
    whole.feed(data)
    for cut in sorted(min(cut, len(data)) for cut in [*cuts, len(data)]):
        assert parts.feed(data[parts.resume_at : cut], parts.resume_at) or cut < parts.resume_at
    parts.feed(data)
    assert parts.read == whole.read
    assert parts.shown() == whole.shown()


def test_a_line_that_was_cut_short_waits_for_its_end() -> None:
    data = rows(2)
    curve = Curve()
    curve.feed(data[:-5])
    assert curve.latest["step"] == 1
    curve.feed(data)
    assert curve.latest["step"] == 2
    assert by_name(curve)["loss"] == (1.0, 0.5)


def test_a_file_that_was_written_anew_is_read_anew() -> None:
    curve = Curve()
    curve.feed(rows(9))
    shorter = rows(4) + row(5, loss=7.0)
    offset = curve.resume_at
    assert not curve.feed(shorter[offset:], offset), "the whole file is asked for"
    assert curve.feed(shorter)
    assert by_name(curve)["loss"][-1] == 7.0
    assert len(by_name(curve)["loss"]) == 5


def test_damaged_lines_are_passed_over() -> None:
    curve = Curve()
    curve.feed(b'{"step": 1, "loss": 2}\n{"loss": 3}\nnot json\n[]\n{"step": "x"}\n{"step": 2, "loss": null}\n')
    assert by_name(curve)["loss"] == (2.0, None)


def test_a_long_curve_is_thinned() -> None:
    curve = Curve()
    curve.feed(rows(5000))
    loss = next(one for one in curve.shown() if one.name == "loss")
    assert len(loss.x) <= MOST
    assert (loss.x[0], loss.x[-1]) == (1, 5000)


def test_the_pace_is_that_of_the_newest_process() -> None:
    curve = Curve()
    old = b"".join(row(step, seconds=100.0 * step) for step in range(1, 6))
    new = b"".join(row(step, seconds=float(step - 5)) for step in range(6, 9))
    curve.feed(old + new)
    assert curve.steps_per_s() == pytest.approx(1.0)
