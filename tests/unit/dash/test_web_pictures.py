"""Charts, bars, the grid of shards and the lives of a job as SVG: what they draw and what they say."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.dash import bars, charts, shardgrid, timeline
from drafthouse.dash.model import LifeView, Series
from drafthouse.dash.view_runs import drawn_of


def series(y: list[float | None], name: str = "loss", x: list[float] | None = None, unit_x: str = "step") -> Series:
    return Series.model_validate(
        {"name": name, "unit": "nats", "unit_x": unit_x, "x": x or [float(n) for n in range(len(y))], "y": y}
    )


def ordinates(svg: str) -> list[float]:
    path = re.search(r'class="line one" d="([^"]+)"', svg)
    assert path is not None
    return [float(pair.split()[1]) for pair in re.split("[ML]", path[1].replace("h0", ""))[1:]]


def cells(picture: str) -> str:
    """The grid read back out of the picture's strokes."""
    root = ElementTree.fromstring(picture)
    wide, count = int(root.get("data-columns", "0")), int(root.get("data-cells", "0"))
    state_of = {css: state for state, (css, _) in shardgrid.STATES.items()}
    found = ["?"] * count
    for path in root.iter("path"):
        kind = path.get("class", "").removeprefix("cell ")
        if kind not in state_of:
            continue
        for x, y, rest in re.findall(r"M(\d+) ([\d.]+)([^M]+)", path.get("d", "")):
            length = int(rest[1:]) if rest.startswith("h") else rest.count("l")
            for step in range(length):
                found[int(float(y)) * wide + int(x) + step] = state_of[kind]
    return "".join(found)


@given(st.text(alphabet="drls.", min_size=1, max_size=900))
def test_the_grid_holds_every_cell_in_its_place(grid: str) -> None:
    picture = str(shardgrid.picture(grid))
    assert cells(picture) == grid
    dots = re.search(r'class="notch" d="([^"]*)"', picture)
    assert (dots[1].count("M") if dots else 0) == grid.count("r")


def test_ten_thousand_cells_are_small_even_when_mixed() -> None:
    assert len(shardgrid.picture("d" * 10_000)) < 6_000
    assert len(shardgrid.picture("dl" * 5_000)) < 130_000


def test_the_legend_counts_and_hides_only_what_never_happened() -> None:
    assert {one.word: one.count for one in shardgrid.legend("ddl.")} == {"done": 2, "leased": 1, "stale": 0, "free": 1}
    assert "done after a re-claim" in {one.word for one in shardgrid.legend("r")}


def test_a_line_goes_up_where_values_go_up_and_breaks_at_gaps() -> None:
    chart = charts.line_chart("c", "loss", "nats", [series([3.0, 2.0, None, 1.0, 1.5])])
    assert chart is not None
    ys = ordinates(chart.svg)
    assert ys[0] < ys[1] < ys[2]
    assert ys[3] < ys[2], "a smaller ordinate is higher"
    path = re.search(r'class="line one" d="([^"]+)"', chart.svg)
    assert path is not None
    assert path[1].count("M") == 2
    assert chart.title == "Loss"
    assert chart.newest == (("one", "loss", "1.5"),)
    assert "loss: 3 at step 0, now 1.5 nats at step 4, between 1 and 3" in chart.svg
    assert chart.rows[0] == ("4", "1.5")
    ElementTree.fromstring(chart.svg)


@pytest.mark.parametrize("y", [[], [None], [float("nan"), float("inf")]])
def test_without_a_point_there_is_no_chart(y: list[float | None]) -> None:
    assert charts.line_chart("c", "loss", "nats", [series(y)]) is None
    assert charts.bar_chart("c", "Accuracy", [], "slot") is None


@given(st.lists(st.floats(-1e12, 1e12) | st.none(), min_size=1, max_size=40))
def test_any_values_stay_inside_of_the_picture(y: list[float | None]) -> None:
    chart = charts.line_chart("c", "t", "u", [series(y)])
    if chart is None:
        assert all(value is None for value in y)
        return
    assert all(charts.TOP - 0.1 <= one <= charts.HEIGHT - charts.BOTTOM + 0.1 for one in ordinates(chart.svg))
    assert len(chart.rows) <= 12
    ElementTree.fromstring(chart.svg)


def test_noise_does_not_fill_the_axis() -> None:
    chart = charts.line_chart("c", "tokens/s", "tokens/s", [series([100.0, 101.0, 99.0, 100.5])])
    assert chart is not None
    ys = ordinates(chart.svg)
    assert max(ys) - min(ys) < (charts.HEIGHT - charts.TOP - charts.BOTTOM) / 4
    assert (chart.title, chart.unit) == ("Tokens/s", "")


def test_what_is_never_negative_has_no_axis_below_zero() -> None:
    chart = charts.line_chart("c", "noise", "", [series([0.0, 0.0])])
    assert chart is not None
    ticks = re.findall(r'text-anchor="end">([^<]+)<', chart.svg)
    assert ticks[0] == "0"
    assert not any(one.startswith("−") for one in ticks)


def test_time_has_a_clock_on_its_axis() -> None:
    begin = datetime(2026, 3, 1, 10, 0, tzinfo=UTC).timestamp()
    times = [begin + 60 * n for n in range(61)]
    chart = charts.line_chart("c", "rate", "tokens/s", [series([5.0] * 61, x=times, unit_x="time")])
    assert chart is not None
    assert re.findall(r">(\d\d:\d\d)<", chart.svg) == ["10:00", "10:15", "10:30", "10:45", "11:00"]
    assert chart.columns[0] == "time (UTC)"


def test_accuracy_has_a_bar_a_slot() -> None:
    chart = charts.bar_chart("slots", "Accuracy", [0.8, 0.4, 1.0], "slot")
    assert chart is not None
    heights = [float(one) for one in re.findall(r'class="fill one"[^>]* height="([\d.]+)"', chart.svg)]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[2] == charts.HEIGHT - charts.BOTTOM - charts.TOP
    assert chart.rows == (("1", "80.0%"), ("2", "40.0%"), ("3", "100.0%"))


def test_series_that_belong_together_share_a_chart() -> None:
    names = ["loss", "mean streak", "noise", "expected streak", *(f"accuracy slot {n}" for n in range(1, 16))]
    drawn = drawn_of([series([1.0, 2.0], name) for name in names])
    assert [chart.title for chart in drawn] == ["Loss", "Streak", "Noise", "Accuracy over time"]
    assert [name for _, name, _ in drawn[1].newest] == ["mean streak", "expected streak"]
    assert [name for _, name, _ in drawn[3].newest] == [f"slot {n}" for n in (1, 2, 4, 8)]
    assert len({chart.key for chart in drawn}) == 4


@pytest.mark.parametrize(("share", "width"), [(None, "0.0"), (0.5, "50.0"), (3.0, "100.0"), (-1.0, "0.0")])
def test_a_bar_stays_in_its_track(share: float | None, width: str) -> None:
    assert f'class="fill" width="{width}"' in bars.bar(share)


def test_lives_lie_where_they_happened() -> None:
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)

    def life(epoch: int, status: str, begun_h: float, ended_h: float | None, live: bool = True) -> LifeView:
        begun = now - timedelta(hours=begun_h)
        return LifeView(
            epoch=epoch,
            node="n",
            status=status,
            action="deploy",
            who="me",
            begun=begun,
            live_since=begun if live else None,
            ended=None if ended_h is None else now - timedelta(hours=ended_h),
        )

    picture = str(timeline.lives([life(2, "live", 2, None), life(1, "lost", 8, 2)], now))
    bar = re.findall(r'class="(past|now)" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', picture)
    assert bar == [("past", "0.0", "2", "450.0"), ("now", "450.0", "16", "150.0")]
    assert '<rect class="bad" x="450.0"' in picture
    assert timeline.lives([], now) == ""
    assert 'class="now"' not in timeline.lives([life(1, "starting", 1, None, live=False)], now)
