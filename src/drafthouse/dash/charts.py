"""Charts as SVG made on the server: no script is needed to see them, and their colours are the page's own.

Each picture has two alternatives in words: a sentence for those who do not see it, and a table of its points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup

from drafthouse.dash import words
from drafthouse.dash.model import Series

WIDTH, HEIGHT = 360, 178
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
_TABLE_ROWS = 12


@dataclass(frozen=True)
class Line:
    """One line of a chart: its points without gaps between them, and what it is called."""

    series: Series
    css: str = "one"


@dataclass(frozen=True)
class Chart:
    """A drawn chart: `svg`, its newest figures, the sentence and the table that stand for it."""

    key: str
    title: str
    unit: str
    svg: Markup
    newest: tuple[tuple[str, str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def line_chart(key: str, title: str, unit: str, lines: Sequence[Series]) -> Chart | None:
    """A chart of up to four series with one y axis; None when there is no point to draw."""
    drawn = [Line(one, css) for one, css in zip(lines, ("one", "two", "three", "four"), strict=False) if _points(one)]
    if not drawn:
        return None
    xs = [x for line in drawn for x, _ in _points(line.series)]
    ys = [y for line in drawn for _, y in _points(line.series)]
    time = drawn[0].series.unit_x == "time"
    x_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, _time_ticks(min(xs), max(xs)) if time else None)
    y_axis = _Axis(*_padded(min(ys), max(ys)), HEIGHT - BOTTOM, TOP)
    parts = [_grid(x_axis, y_axis, _clock if time else _step)]
    for line in drawn:
        parts.append(f'<path class="line {line.css}" d="{_path(line.series, x_axis, y_axis)}"/>')
        x, y = _points(line.series)[-1]
        parts.append(f'<circle class="end {line.css}" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3"/>')
    parts.append(f'<path class="cross" d="M0 {TOP}V{HEIGHT - BOTTOM}" transform="translate(-9 0)"/>')
    sentence = "; ".join(_sentence(line.series, unit) for line in drawn)
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}" {}>{}</svg>').format(
        WIDTH, HEIGHT, sentence, _data(drawn, x_axis), Markup("".join(parts))
    )
    newest = tuple((line.css, line.series.name, words.figure(_points(line.series)[-1][1])) for line in drawn)
    head = ("time (UTC)" if time else "step", *(line.series.name for line in drawn))
    title = title[:1].upper() + title[1:]
    return Chart(
        key, title, "" if unit.casefold() == title.casefold() else unit, svg, newest, head, _table(drawn, time)
    )


def bar_chart(key: str, title: str, shares: Sequence[float], label: str) -> Chart | None:
    """Upright bars of shares, numbered from 1: the accuracy of each slot."""
    if not shares:
        return None
    y_axis = _Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP, [0.0, 0.25, 0.5, 0.75, 1.0])
    room = (WIDTH - LEFT - RIGHT) / len(shares)
    parts = [_grid(None, y_axis, _step, lambda value: f"{value:.0%}")]
    for place, share in enumerate(shares):
        left, top = LEFT + room * (place + 0.14), y_axis.at(min(1.0, max(0.0, share)))
        middle = LEFT + room * (place + 0.5)
        parts.append(
            f'<rect class="fill one" x="{left:.1f}" y="{top:.1f}" width="{room * 0.72:.1f}"'
            f' height="{HEIGHT - BOTTOM - top:.1f}"/>'
        )
        if len(shares) <= 16 or place % 4 == 0:
            parts.append(
                f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{place + 1}</text>'
            )
    words_of = ", ".join(f"{label} {place}: {share:.1%}" for place, share in enumerate(shares, 1))
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, words_of, Markup("".join(parts))
    )
    rows = tuple((str(place), f"{share:.1%}") for place, share in enumerate(shares, 1))
    first = (("one", f"{label} 1", f"{shares[0]:.1%}"),)
    return Chart(key, title, f"by {label}", svg, first, (label, title), rows)


class _Axis:
    """Values between `low` and `high`, put between two coordinates."""

    def __init__(self, low: float, high: float, begin: float, end: float, ticks: Sequence[float] | None = None) -> None:
        if high <= low:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self.begin, self.end = low, high, begin, end
        self.ticks = list(_ticks(low, high) if ticks is None else ticks)

    def at(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def _points(series: Series) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(series.x, series.y, strict=False) if y is not None and math.isfinite(y)]


def _padded(low: float, high: float) -> tuple[float, float]:
    """Room above and below; down to zero where the values are not far from it."""
    if low >= 0 and low <= 0.4 * high:
        return 0.0, high * 1.06 or 1.0
    # A curve that hardly moves must not look like a wild one: the axis spans at least a sixth of the values.
    least = max(abs(low), abs(high)) / 6 or 1.0
    room = max((high - low) * 0.08, (least - (high - low)) / 2)
    # what is never negative has no axis below zero
    return max(low - room, 0.0) if low >= 0 else low - room, high + room


def _ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _time_ticks(low: float, high: float) -> list[float]:
    steps = (5, 10, 30, 60, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 604800)
    step = next((one for one in steps if (high - low) / one <= 4), steps[-1])
    first = math.ceil(low / step)
    return [float(n * step) for n in range(first, math.floor(high / step) + 1)]


def _clock(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%H:%M:%S}" if seconds % 60 else f"{moment:%H:%M}"


def _step(value: float) -> str:
    if abs(value) >= 10000:
        return f"{value / 1000:,.4g}k" if abs(value) < 1e6 else f"{value / 1e6:.4g}M"
    return words.figure(value)


def _grid(
    x_axis: _Axis | None, y_axis: _Axis, write_x: Callable[[float], str], write_y: Callable[[float], str] = _step
) -> str:
    parts = []
    for value in y_axis.ticks:
        y = y_axis.at(value)
        parts.append(
            f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{write_y(value)}</text>'
        )
    for value, x in [(value, x_axis.at(value)) for value in x_axis.ticks] if x_axis else []:
        parts.append(
            f'<path class="notch" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/><text class="tick" x="{_inside(x):.1f}"'
            f' y="{HEIGHT - 7}" text-anchor="middle">{write_x(value)}</text>'
        )
    return "".join([*parts, f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'])


def _inside(x: float) -> float:
    return min(x, WIDTH - 22.0)


def _path(series: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    """The line; it is broken where a value is missing."""
    parts, pen = [], "M"
    for x, y in zip(series.x, series.y, strict=False):
        if y is None or not math.isfinite(y):
            pen = "M"
            continue
        parts.append(f"{pen}{x_axis.at(x):.1f} {y_axis.at(y):.1f}")
        pen = "L"
    # a point alone between gaps is drawn by its round cap
    return "".join(parts) + ("h0" if len(parts) == 1 else "")


def _data(lines: Sequence[Line], x_axis: _Axis) -> Markup:
    """The first line's points for the read-out under the pointer, and how x lies in the picture."""
    points = _points(lines[0].series)
    xs, ys = " ".join(f"{x:.10g}" for x, _ in points), " ".join(f"{y:.4g}" for _, y in points)
    span = f"{x_axis.low:.10g} {x_axis.high:.10g} {LEFT} {WIDTH - RIGHT}"
    return Markup(f'data-x="{xs}" data-y="{ys}" data-span="{span}" data-unit-x="{lines[0].series.unit_x}"')


def _sentence(series: Series, unit: str) -> str:
    points = _points(series)
    (x_first, first), (x_last, last) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    write = _clock if series.unit_x == "time" else lambda value: f"step {value:,.0f}"
    return (
        f"{series.name}: {words.figure(first)} at {write(x_first)}, now {words.figure(last)} {unit} at {write(x_last)},"
        f" between {words.figure(low)} and {words.figure(high)}"
    )


def _table(lines: Sequence[Line], time: bool) -> tuple[tuple[str, ...], ...]:
    """At most `_TABLE_ROWS` points, evenly chosen, the newest first."""
    columns = [dict(_points(line.series)) for line in lines]
    xs = sorted({x for column in columns for x in column})
    if len(xs) > _TABLE_ROWS:
        xs = [xs[round(n * (len(xs) - 1) / (_TABLE_ROWS - 1))] for n in range(_TABLE_ROWS)]
    write = _clock if time else lambda value: f"{value:,.0f}"
    return tuple((write(x), *(words.figure(column.get(x)) for column in columns)) for x in reversed(xs))
