"""The forms that the report draws: bars in rows, lines over slots, curves over tokens.

A solid line or bar means chain, a dashed line or a pale bar means tree. Panels are drawn for the width of a
phone and set side by side where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from drafthouse.measure import units
from drafthouse.measure.svg import FONT_SIZE, INKS, panel, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS = 100  # more do not fit the width of a panel
TITLE_CHARACTERS = 52
DASHES = (0, (3, 1.5))

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Key:
    """One entry of a legend: `mark` is "line", "dash", "bar" or "pale" (a pale bar)."""

    label: str
    ink: str
    mark: str


@dataclass(frozen=True)
class Plot:
    name: str
    title: str
    unit: str
    svg: str
    keys: tuple[Key, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Bar:
    value: float
    text: str
    ink: str
    pale: bool = False
    own: float = 0.0  # the part at its left that is the target's own work


@dataclass(frozen=True)
class Line:
    label: str
    ink: str
    points: Points
    dashed: bool = False

    @property
    def key(self) -> Key:
        return Key(self.label, self.ink, "dash" if self.dashed else "line")


def bars(
    name: str,
    label: str,
    groups: Sequence[tuple[str, Sequence[Bar]]],
    *,
    rule: float | None = None,
    limit: float | None = None,
) -> str:
    """Horizontal bars in groups, each under its title: long names cost no width. Figures stand at the right.

    Args:
        name: unique on the page.
        label: the picture in words.
        rule: where an upright mark shows a level (plain decoding, a threshold) across the bars.
        limit: the value at the right end of the bars; the largest when None.
    """
    title_height, bar_height, gap = 19.0, 14.0, 9.0
    largest = limit or max((bar.value for _, group in groups for bar in group), default=1.0) or 1.0
    height = sum(title_height + bar_height * len(group) + gap for _, group in groups)
    with panel(max(height, 40.0)) as figure:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.003, 0, 0.994, 1))
        axes.set_axis_off()
        end = largest * 1.16
        axes.set_xlim(0, end)
        axes.set_ylim(height, 0)
        top = 0.0
        for title, group in groups:
            axes.text(0, top + title_height * 0.72, fitted(title), color=INKS["muted"], fontsize=FONT_SIZE)
            top += title_height
            for bar in group:
                _bar(axes, bar, top + bar_height / 2, bar_height - 3.5)
                axes.text(end, top + bar_height / 2, bar.text, ha="right", va="center_baseline")
                top += bar_height
            if rule is not None:
                axes.vlines(rule, top - bar_height * len(group) - 2, top + 2, color=INKS["ink"], linewidth=1.6)
            top += gap
        return to_svg(figure, name, label)


def curves(name: str, label: str, lines: Sequence[Line], *, share: bool = False, floor: float | None = None) -> str:
    """Lines over the tokens seen; with `share` the upright axis is 0 to 100 %, else it begins at `floor`."""
    with panel() as figure:
        axes = figure.add_subplot()
        for line in lines:
            _draw(axes, line, thinned(line.points, CURVE_POINTS), few=16)
        _token_axis(axes)
        if share:
            _share_axis(axes)
        elif floor is not None:
            axes.set_ylim(bottom=floor)
        return to_svg(figure, name, label)


def slots(name: str, label: str, lines: Sequence[Line]) -> str:
    """Shares over the slots 1..B-1 of a block."""
    last = max(int(x) for line in lines for x, _ in line.points)
    with panel() as figure:
        axes = figure.add_subplot()
        for line in lines:
            _draw(axes, line, line.points, few=64)
        axes.set_xticks(range(1, last + 1, max(1, math.ceil(last / 12))))
        axes.set_xlim(0.7, last + 0.3)
        axes.set_xlabel("slot k of the block")
        axes.grid(axis="x", visible=False)
        _share_axis(axes)
        return to_svg(figure, name, label)


def levels(
    name: str, label: str, lines: Sequence[Line], level: Sequence[tuple[float, str]], ticks: Sequence[str]
) -> str:
    """Lines over the places `ticks`, with level lines (value, ink); the upright axis begins at 1."""
    with panel() as figure:
        axes = figure.add_subplot()
        for value, ink in level:
            axes.axhline(value, color=INKS[ink])
        for line in lines:
            _draw(axes, line, line.points, few=64)
        axes.set_xticks(range(len(ticks)), list(ticks))
        axes.set_xlim(-0.4, len(ticks) - 0.6)
        axes.set_ylim(bottom=1.0)
        axes.set_xlabel("nodes in the tree")
        axes.grid(axis="x", visible=False)
        return to_svg(figure, name, label)


def spoken(title: str, unit: str, rows: Iterable[Sequence[str]], columns: Sequence[str]) -> str:
    """The picture in words: its title, its unit and its figures, so that nothing is only to be seen."""
    told = "; ".join(
        f"{row[0]}: " + ", ".join(f"{column} {cell}" for column, cell in zip(columns[1:], row[1:], strict=False))
        for row in rows
    )
    return f"{title} ({unit}). {told}."


def thinned(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` points, each the mean of a run of neighbours; first and last keep their place in x."""
    if len(points) <= most:
        return list(points)
    edges = [round(index * len(points) / most) for index in range(most + 1)]
    runs = [points[start:end] for start, end in pairwise(edges)]
    means = [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]
    means[0] = (points[0][0], means[0][1])
    means[-1] = (points[-1][0], means[-1][1])
    return means


def fitted(title: str) -> str:
    """A title no wider than the panel; the whole of it stands in the table of numbers."""
    return title if len(title) <= TITLE_CHARACTERS else f"{title[: TITLE_CHARACTERS - 1]}…"


def _bar(axes: Axes, bar: Bar, middle: float, height: float) -> None:
    ink = INKS[bar.ink]
    fill: Any = (ink, 0.3) if bar.pale else ink
    rest = bar.value - bar.own
    axes.barh(middle, rest, left=bar.own, height=height, color=fill, edgecolor=ink, linewidth=1.0)
    if bar.own:
        own = INKS["target"]
        axes.barh(middle, bar.own, height=height, color=own, edgecolor=own, linewidth=1.0)


def _draw(axes: Axes, line: Line, points: Points, *, few: int) -> None:
    marker = ("D" if line.dashed else "o") if len(points) <= few else None
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=INKS[line.ink],
        linestyle=DASHES if line.dashed else "-",
        marker=marker,
        markersize=4 if line.dashed else 5,
    )


def _token_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens seen")
    axes.grid(axis="x", visible=False)


def _tick(value: float) -> str:
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{units.SPACE}{prefix}"
    return f"{value:g}"


def _share_axis(axes: Axes) -> None:
    from matplotlib.ticker import FixedLocator, PercentFormatter

    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1.0]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=f"{units.SPACE}%"))
