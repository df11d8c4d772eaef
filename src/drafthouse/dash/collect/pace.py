"""How fast a run goes, by when its shards were finished."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafthouse.dash.collect.series import rates, series
from drafthouse.dash.model import Series

WINDOW_S = 300.0
MARKERS = 20
"""Shards that a rate is taken from at least, if the history has as many: long shards are seldom finished."""
_BINS = 120


@dataclass(frozen=True)
class Pace:
    """Tokens and shards a second now; None: nothing was finished in the history."""

    tokens_per_s: float | None
    shards_per_s: float | None


class Finished:
    """When shards were finished, and how many tokens they had. Times in seconds since the epoch, the store's own."""

    def __init__(self) -> None:
        self._at: np.ndarray = np.zeros(0)
        self._tokens: np.ndarray = np.zeros(0)

    def add(self, at: list[float], tokens: list[float]) -> None:
        """Some more, in any order."""
        if at:
            every_at, every = np.concatenate([self._at, at]), np.concatenate([self._tokens, tokens])
            order = np.argsort(every_at, kind="stable")
            self._at, self._tokens = every_at[order], every[order]

    def pace(self, now: float, begun: float, history_s: float) -> Pace:
        """The rate over the last five minutes; over a longer time when too few shards were finished in them.

        Args:
            begun: when the run's first lease was taken: before, there was nothing to be fast at.
            history_s: the longest time that is looked back.
        """
        begin = now - WINDOW_S
        if len(self._at) - int(np.searchsorted(self._at, begin)) < MARKERS:
            begin = min(begin, float(self._at[-MARKERS]) if len(self._at) >= MARKERS else begun)
        begin = max(begin, begun, now - history_s)
        inside = self._at > begin
        seconds = now - begin
        if not inside.any() or seconds <= 0:
            return Pace(None, None)
        return Pace(float(self._tokens[inside].sum()) / seconds, int(inside.sum()) / seconds)

    def curve(self, now: float, begun: float, history_s: float) -> Series | None:
        """Tokens a second over the last `history_s` seconds of the run's life; None without any."""
        if not len(self._at):
            return None
        end = min(now, float(self._at[-1]) + WINDOW_S)
        begin = max(begun, end - history_s)
        if end - begin < 1.0:
            return None
        bins = int(min(_BINS, max(1, (end - begin) // 5)))
        return series("tokens/s", "tokens/s", "time", *rates(self._at, self._tokens, begin, end, bins))
