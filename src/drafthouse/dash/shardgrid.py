"""The shards of an extraction as one picture: runs of equal cells become one stroke, so 10,000 cells stay small."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from markupsafe import Markup

# state character -> CSS class; each has a shape of its own beside its colour
STATES = {
    "d": ("done", "done"),
    "r": ("redone", "done after a re-claim"),
    "l": ("leased", "leased"),
    "s": ("stale", "stale"),
    ".": ("free", "free"),
}
_LARGEST_CELL = 18  # CSS pixels
_FEWEST, _MOST = 12, 160


@dataclass(frozen=True)
class Legend:
    """One line of the legend."""

    css: str
    word: str
    count: int
    sample: Markup


def columns(cells: int) -> int:
    """Columns of a grid that is about two and a half times as wide as high."""
    return min(_MOST, max(_FEWEST, math.ceil(math.sqrt(cells * 2.5))), max(1, cells))


def picture(grid: str) -> Markup:
    """`<svg>` with a unit square a shard, row by row.

    Args:
        grid: one character a shard, see `ExtractionView.grid`.
    """
    wide = columns(len(grid))
    high = max(1, math.ceil(len(grid) / wide))
    strokes: dict[str, list[str]] = {state: [] for state in STATES}
    for row in range(high):
        column = 0
        for state, cells in itertools.groupby(grid[row * wide : (row + 1) * wide]):
            length = sum(1 for _ in cells)
            strokes[state].append(_stroke(state, column, row, length))
            column += length
    paths = "".join(
        f'<path class="cell {STATES[state][0]}" d="{"".join(parts)}"/>' for state, parts in strokes.items() if parts
    )
    gaps = "".join(f"M{column} 0v{high}" for column in range(1, wide))
    notches = _notches(grid, wide)
    return Markup(
        f'<svg class="shards" viewBox="0 0 {wide} {high}" width="{wide * _LARGEST_CELL}" data-columns="{wide}"'
        f' data-cells="{len(grid)}" aria-hidden="true" focusable="false">{paths}'
        f'<path class="gap" d="{gaps}"/>{notches}<rect class="cursor" width="1" height="1" x="-9" y="-9"/></svg>'
    )


def legend(grid: str) -> list[Legend]:
    """States with their counts, in the order of the work."""
    return [
        Legend(css, word, grid.count(state), _sample(state))
        for state, (css, word) in STATES.items()
        if state in "dls." or grid.count(state)
    ]


def _stroke(state: str, column: int, row: int, length: int) -> str:
    if state == "s":  # a saw: seen as broken also without colour
        return f"M{column} {row + 0.85:g}" + "l.5-.7.5.7" * length
    return f"M{column} {row + 0.5:g}h{length}"


def _notches(grid: str, wide: int) -> str:
    """The dot in cells that were done after a re-claim."""
    dots = "".join(f"M{n % wide + 0.5:g} {n // wide + 0.5:g}h0" for n, state in enumerate(grid) if state == "r")
    return f'<path class="notch" d="{dots}"/>' if dots else ""


def _sample(state: str) -> Markup:
    css = STATES[state][0]
    notch = '<path class="notch" d="M.5 .5h0"/>' if state == "r" else ""
    return Markup(
        f'<svg class="swatch" viewBox="0 0 1 1" width="14" height="14" aria-hidden="true">'
        f'<path class="cell {css}" d="{_stroke(state, 0, 0, 1)}"/>{notch}</svg>'
    )
