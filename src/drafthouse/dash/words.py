"""How the page says numbers, times and states: every figure with its unit, what nobody could tell as a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache

from markupsafe import Markup, escape

from drafthouse.dash.model import ServerView, StoreView
from drafthouse.measure import units

UNKNOWN = Markup('<span class="unknown" title="nobody could tell">–</span>')
GIB = 2**30

# glyph and word, so that a state is never told by colour alone
GLYPHS = {"ok": "●", "busy": "◐", "warn": "▲", "bad": "✖", "idle": "○"}

STATES = {
    # nodes
    "answers": "ok",
    "silent": "bad",
    "unknown": "idle",
    # jobs and their lives (fleet.records)
    "live": "ok",
    "starting": "busy",
    "retired": "idle",
    "stopped": "idle",
    "finished": "ok",
    "failed": "bad",
    "lost": "bad",
    # trainings
    "training": "ok",
    "out of time": "warn",
    # shards
    "done": "ok",
    "done after a re-claim": "ok",
    "leased": "busy",
    "stale": "bad",
    "free": "idle",
    # extractions, workers, servers, stores
    "complete": "ok",
    "extracting": "ok",
    "nobody works": "bad",
    "waits": "warn",
    "works": "ok",
    "idle": "idle",
    "ended": "idle",
    "up": "ok",
    "down": "bad",
    "not begun": "idle",
}


def tone(state: str) -> str:
    """`ok`, `busy`, `warn`, `bad` or `idle` of a state's word; `idle` for a word that the page does not know."""
    return STATES.get(state, "idle")


@lru_cache(maxsize=256)  # a large fleet has thousands of states and a dozen words for them
def badge(state: str, kind: str | None = None) -> Markup:
    """A state as glyph and word."""
    kind = kind or tone(state)
    return Markup(f'<span class="st {kind}"><i aria-hidden="true">{GLYPHS[kind]}</i>{escape(state)}</span>')


def reached(one: ServerView | StoreView) -> str:
    """`up`, `down`, or `not asked yet`."""
    return "up" if one.up else "down" if one.known.asked or one.known.error else "not asked yet"


def utc(moment: datetime | None) -> str:
    """`14:02:11`, with the date in front where it is not today's."""
    if moment is None:
        return "–"
    moment = moment.astimezone(UTC)
    today = datetime.now(UTC).date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%Y-%m-%d %H:%M}"


def ago(moment: datetime | None, now: datetime | None = None) -> Markup:
    """`<time>12 s ago</time>`; the browser lets it grow between two answers."""
    if moment is None:
        return Markup('<span class="unknown">never</span>')
    seconds = max(0.0, ((now or datetime.now(UTC)) - moment).total_seconds())
    moment = moment.astimezone(UTC)
    stamp = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    return Markup(f'<time datetime="{moment.isoformat()}" title="{stamp}" data-ago>{age(seconds)} ago</time>')


def age(seconds: float) -> str:
    """`0 s`, `59 s`, `4 min`, `3 h 05 min`, `12 d`: whole, because it moves while it is read."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}{units.SPACE}s"
    if whole < 3600:
        return f"{whole // 60}{units.SPACE}min"
    if whole < 48 * 3600:
        return f"{whole // 3600}{units.SPACE}h {whole % 3600 // 60:02d}{units.SPACE}min"
    return f"{whole // 86400}{units.SPACE}d"


def known(value: float | None, write: Callable[[float], str]) -> str:
    """`write(value)`, or the dash."""
    return UNKNOWN if value is None else write(value)


def count(value: float | None) -> str:
    """`12,345`."""
    return known(value, units.count)


def rate(value: float | None, unit: str = "tokens/s") -> str:
    """`443 k tokens/s`."""
    return known(value, lambda one: f"{units.compact(_three(one))}{units.SPACE}{unit}")


def compact(value: float | None) -> str:
    """`1.04 M`."""
    return known(value, lambda one: units.compact(_three(one)))


def size(value: float | None) -> str:
    """Bytes, decimal prefixes up to PB."""
    return known(value, _size)


def _size(value: float) -> str:
    for limit, prefix in ((1e15, "PB"), (1e12, "TB")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{units.SPACE}{prefix}"
    return units.size(value)


def gib(value: float | None) -> str:
    """Bytes in GiB."""
    return known(value, lambda one: f"{one / GIB:,.0f}{units.SPACE}GiB")


def percent(value: float | None) -> str:
    """A share of 1 as `71 %`."""
    return known(value, units.percent)


def duration(seconds: float | None) -> str:
    """`4 min 50 s`; days from 48 h on."""
    return known(seconds, lambda one: units.duration(one) if one < 172800 else f"{one / 86400:.1f}{units.SPACE}days")


def figure(value: float | None) -> str:
    """A number of any size in at most four significant digits: `0.0003`, `2.381`, `12,300`."""
    return known(value, _figure)


def _figure(value: float) -> str:
    if value == 0 or 0.001 <= abs(value) < 1e3:
        return f"{value:.4g}".replace("-", "−")
    if 1e3 <= abs(value) < 1e4:
        return f"{value:,.0f}".replace("-", "−")
    if abs(value) >= 1e4:
        return units.compact(value).replace("-", "−") if abs(value) < 1e12 else f"{value:.3g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")


def total(values: Iterable[float | None]) -> float | None:
    """The sum of what is known; None when nothing is."""
    known_ones = [value for value in values if value is not None]
    return sum(known_ones) if known_ones else None


def _three(value: float) -> float:
    return float(f"{value:.3g}")


FILTERS = {
    "ago": ago,
    "age": age,
    "badge": badge,
    "compact": compact,
    "count": count,
    "duration": duration,
    "figure": figure,
    "gib": gib,
    "percent": percent,
    "reached": reached,
    "rate": rate,
    "size": size,
    "tone": tone,
    "utc": utc,
}
