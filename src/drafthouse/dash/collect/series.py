"""Many points as few, and what is left of them in a window of time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from drafthouse.dash.model import Series

MOST = 600
"""Points of one series on a page."""


def thinned(x: Sequence[float], y: Sequence[float | None], most: int = MOST) -> tuple[list[float], list[float | None]]:
    """At most `most` points of a curve: first and last, and of every stretch between the smallest and the largest, in
    their order, so that no spike is lost.

    Args:
        x: rising.
        most: at least 4.
    """
    if len(x) <= most:
        return list(x), list(y)
    values = np.array([math.nan if value is None else value for value in y], dtype=np.float64)
    edges = np.linspace(1, len(x) - 1, (most - 2) // 2 + 1).astype(int)
    kept = [0]
    for begin, end in pairwise(edges):
        stretch = values[begin:end]
        if np.isnan(stretch).all():
            kept.append(int(begin))
        else:
            kept += sorted({int(begin + np.nanargmin(stretch)), int(begin + np.nanargmax(stretch))})
    kept.append(len(x) - 1)
    return [x[index] for index in kept], [y[index] for index in kept]


def series(name: str, unit: str, unit_x: str, x: Sequence[float], y: Sequence[float | None]) -> Series:
    """A thinned `Series`; what is no number is None in it."""
    few_x, few_y = thinned(x, [value if value is not None and math.isfinite(value) else None for value in y])
    return Series.model_validate({"name": name, "unit": unit, "unit_x": unit_x, "x": few_x, "y": few_y})


class History:
    """Values of a few quantities over the last `seconds`, one point a look.

    A look every two seconds for an hour is 1,800 points; they are kept as they are, and thinned when they are shown.
    """

    def __init__(self, units: dict[str, str], seconds: float) -> None:
        self._units, self._seconds = units, seconds
        self._points: deque[tuple[float, dict[str, float | None]]] = deque()

    def add(self, at: float, values: dict[str, float | None]) -> None:
        """One point: `at` in seconds since the epoch, values by name."""
        self._points.append((at, values))
        while self._points and self._points[0][0] < at - self._seconds:
            self._points.popleft()

    def shown(self) -> tuple[Series, ...]:
        """The quantities of which anything is known."""
        x = [at for at, _ in self._points]
        columns = {name: [values.get(name) for _, values in self._points] for name in self._units}
        return tuple(
            series(name, self._units[name], "time", x, column)
            for name, column in columns.items()
            if any(value is not None for value in column)
        )


def rates(at: np.ndarray, amounts: np.ndarray, begin: float, end: float, bins: int) -> tuple[list[float], list[float]]:
    """Amounts a second in `bins` equal stretches between `begin` and `end`: the middles of the stretches, and rates.

    Args:
        at: float64 [n], when something was finished (seconds).
        amounts: float64 [n], how much that was.
    """
    sums, edges = np.histogram(at, bins=bins, range=(begin, end), weights=amounts)
    width = (end - begin) / bins
    return ((edges[:-1] + edges[1:]) / 2).tolist(), (sums / width).tolist()
