"""The lives of a job on a common axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from markupsafe import Markup

from drafthouse.dash.model import LifeView
from drafthouse.dash.words import tone

WIDTH, ROW = 600, 14


def lives(lives: Sequence[LifeView], now: datetime) -> Markup:
    """A bar for each life, the oldest on top: pale while it started, full from when it had proven itself, and at its
    end a mark in the colour of how it ended."""
    if not lives:
        return Markup("")
    oldest = min(life.begun for life in lives)
    span = max(1.0, (now - oldest).total_seconds())

    def at(moment: datetime) -> float:
        return min(WIDTH, max(0.0, (moment - oldest).total_seconds() / span * WIDTH))

    parts = []
    for row, life in enumerate(sorted(lives, key=lambda life: life.epoch)):
        begun, end = at(life.begun), at(life.ended or now)
        live = at(life.live_since) if life.live_since else end
        y, kind = row * ROW + 2, "past" if life.ended else "now"
        parts.append(f'<rect class="start" x="{begun:.1f}" y="{y}" width="{max(2.0, live - begun):.1f}" height="10"/>')
        if life.live_since:
            parts.append(
                f'<rect class="{kind}" x="{live:.1f}" y="{y}" width="{max(2.0, end - live):.1f}" height="10"/>'
            )
        if life.ended:
            parts.append(
                f'<rect class="{tone(life.status)}" x="{min(end, WIDTH - 3):.1f}" y="{y - 2}" width="3" height="14"/>'
            )
    return Markup(
        f'<svg class="lives" viewBox="0 0 {WIDTH} {ROW * len(lives)}" preserveAspectRatio="none"'
        f' height="{ROW * len(lives)}" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'
    )
