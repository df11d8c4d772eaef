"""Thinned curves, rates over windows, histories."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.dash.collect.pace import MARKERS, WINDOW_S, Finished
from drafthouse.dash.collect.series import History, rates, series, thinned

values = st.floats(-1e6, 1e6) | st.none()


@given(st.lists(values, max_size=400), st.integers(4, 60))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(y: list[float | None], most: int) -> None:
    x = [float(step) for step in range(len(y))]
    few_x, few_y = thinned(x, y, most)
    assert len(few_x) == len(few_y) <= most or len(few_x) == len(x)
    assert len(few_x) <= max(most, 0)
    assert few_x == sorted(set(few_x)), "in order, nothing twice"
    assert all(y[int(at)] is value or y[int(at)] == value for at, value in zip(few_x, few_y, strict=True))
    if y:
        assert (few_x[0], few_x[-1]) == (x[0], x[-1])
    known = [value for value in y if value is not None]
    if known and len(y) > most:
        inner = [value for value in y[1:-1] if value is not None]
        kept = [value for value in few_y if value is not None]
        assert not inner or (max(kept) >= max(inner) and min(kept) <= min(inner)), "no spike is lost"


def test_what_is_no_number_is_a_gap() -> None:
    made = series("loss", "nats", "step", [1, 2, 3, 4], [1.0, math.nan, math.inf, None])
    assert made.y == (1.0, None, None, None)
    assert made.x == (1, 2, 3, 4)


def test_a_history_forgets() -> None:
    history = History({"a": "s", "b": "s"}, seconds=10)
    for at in range(100, 120):
        history.add(float(at), {"a": at * 1.0, "b": None})
    [only] = history.shown()
    assert (only.name, only.unit_x, only.x[0], only.x[-1]) == ("a", "time", 109.0, 119.0)


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1e5)), min_size=1, max_size=50), st.integers(1, 40))
def test_the_area_under_a_rate_is_what_was_done(done: list[tuple[float, float]], bins: int) -> None:
    at, amounts = np.array([one[0] for one in done]), np.array([one[1] for one in done])
    middles, found = rates(at, amounts, 0.0, 1000.0, bins)
    assert len(middles) == len(found) == bins
    assert sum(found) * 1000.0 / bins == pytest.approx(float(amounts.sum()), abs=1e-6)


def finished(times: list[float], tokens: float = 100.0) -> Finished:
    made = Finished()
    made.add(times, [tokens] * len(times))
    return made


class TestPace:
    def test_nothing_is_no_pace(self) -> None:
        pace = Finished().pace(1000.0, 0.0, 3600.0)
        assert (pace.tokens_per_s, pace.shards_per_s) == (None, None)
        assert Finished().curve(1000.0, 0.0, 3600.0) is None

    def test_many_short_shards_are_taken_over_five_minutes(self) -> None:
        made = finished([float(second) for second in range(10_000)])
        pace = made.pace(10_000.0, 0.0, 36_000.0)
        assert pace.shards_per_s == pytest.approx(1.0, rel=0.02)
        assert pace.tokens_per_s == pytest.approx(100.0, rel=0.02)

    def test_a_pace_that_changed_is_followed(self) -> None:
        slow = [float(second) for second in range(0, 1000, 10)]
        fast = [1000.0 + second / 10 for second in range(10 * int(WINDOW_S))]
        assert finished(slow + fast).pace(1000 + WINDOW_S, 0.0, 3600.0).shards_per_s == pytest.approx(10.0, rel=0.02)

    def test_few_long_shards_are_taken_over_a_longer_time(self) -> None:
        every = 600.0
        made = finished([every * number for number in range(1, 101)])
        pace = made.pace(every * 100.5, 0.0, 1e9)
        assert pace.shards_per_s == pytest.approx((MARKERS - 1) / (every * (MARKERS - 0.5)), rel=1e-6)

    def test_a_run_that_has_just_begun_is_not_diluted(self) -> None:
        pace = finished([95.0, 100.0]).pace(100.0, 90.0, 3600.0)
        assert pace.shards_per_s == pytest.approx(0.2)

    def test_what_is_older_than_the_history_does_not_count(self) -> None:
        assert finished([0.0, 10.0]).pace(10_000.0, 0.0, 3600.0).tokens_per_s is None

    def test_order_of_arrival_does_not_matter(self) -> None:
        made = finished([30.0, 10.0])
        made.add([20.0], [100.0])
        assert made.pace(40.0, 0.0, 3600.0) == finished([10.0, 20.0, 30.0]).pace(40.0, 0.0, 3600.0)

    def test_the_curve_lies_in_the_life_of_the_run(self) -> None:
        made = finished([1000.0 + second for second in range(600)])
        curve = made.curve(1600.0, 1000.0, 3600.0)
        assert curve is not None
        assert 1000.0 <= curve.x[0] < curve.x[-1] <= 1600.0
        assert curve.unit_x == "time"
        inner = [value for value in curve.y[1:-1] if value is not None]
        assert inner == pytest.approx([100.0] * len(inner), rel=0.25)
