"""The pictures of a sweep: throughput and waiting over concurrency, decode speed over context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drafthouse.serve.sweep_plan import SweepError
from drafthouse.serve.sweep_result import Percentiles, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#15202c", "#4c5a69", "#dde4eb"
# From light to dark: the order of a series is an order of sizes. All are readable on white.
SHADES = ("#6aa5d9", "#4a8ecb", "#2f77ba", "#0a62ad", "#084c87", "#063661", "#15202c")
SHARES = (("p50", "#0a62ad", "-"), ("p90", "#8a5a00", "--"), ("p99", "#b8321b", ":"))
_SIZE = 11.0


def picture(path: Path, title: str, points: Sequence[Point]) -> None:
    """Four panels as one PNG of 1600 × 1200 pixels on white; broken points are left out.

    Raises:
        SweepError: there is no complete point.
    """
    whole = sorted((point for point in points if point.complete), key=lambda one: (one.context, one.concurrency))
    if not whole:
        raise SweepError("no point of the sweep is complete", where=str(path), fix="see the reasons in sweep.json")
    # About a second to import, needed only where something is drawn.
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style = {
        "font.size": _SIZE,
        "text.parse_math": False,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": GRID,
        "lines.linewidth": 2.2,
        "lines.markersize": 6,
        "legend.frameon": False,
        "legend.fontsize": _SIZE - 1,
    }
    shortest = [point for point in whole if point.context == whole[0].context]
    with matplotlib.style.context(["default", style]):
        figure = Figure(
            figsize=(12.8, 9.6), dpi=125, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        )
        canvas = FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.012, ha="left", fontsize=_SIZE + 4, fontweight="bold")
        (speed, decode), (first, between) = figure.subplots(2, 2)
        _series(
            speed,
            "Throughput of all requests, tokens/s",
            _groups(whole, lambda one: one.context, lambda one: (one.concurrency, one.measured.tokens_per_s)),
            "requests at once",
            "tokens of\ncontext",
        )
        speeds = "Decode speed of one request, tokens/s"
        if shortest == whole:
            # One length of prompts: over the other axis, or all points would stand above one another.
            lines = _groups(whole, lambda one: one.context, lambda one: (one.concurrency, one.decode_tokens_per_s or 0))
            _series(decode, speeds, lines, "requests at once", "tokens of\ncontext")
        else:
            lines = _groups(whole, lambda one: one.concurrency, lambda one: (one.context, one.decode_tokens_per_s or 0))
            _series(decode, speeds, lines, "tokens of context", "requests\nat once")
        unit = f"requests at once, {_short(shortest[0].context)} tokens of context"
        waits = [(one.concurrency, one.measured.ttft_ms) for one in shortest]
        _percentiles(first, "Time to the first token, ms", waits, unit)
        gaps = [(one.concurrency, one.measured.inter_token_ms) for one in shortest]
        _percentiles(between, "Time between tokens, mean of a request, ms", gaps, unit)
        canvas.print_png(str(path))


def _groups(
    points: Iterable[Point], key: Callable[[Point], int], place: Callable[[Point], tuple[int, float]]
) -> dict[int, list[tuple[int, float]]]:
    found: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        found.setdefault(key(point), []).append(place(point))
    return {name: sorted(found[name]) for name in sorted(found)}


def _series(axes: Axes, title: str, groups: dict[int, list[tuple[int, float]]], unit: str, legend: str) -> None:
    """A line a group. A group of one point among longer ones says nothing here that the table does not."""
    longest = max(map(len, groups.values()))
    shown = {name: line for name, line in groups.items() if len(line) > 1 or longest == 1}
    for index, (name, line) in enumerate(shown.items()):
        shade = SHADES[round(index * (len(SHADES) - 1) / max(1, len(shown) - 1))] if len(shown) > 1 else SHADES[3]
        axes.plot(*zip(*line, strict=True), color=shade, marker="o", label=_short(name))
    _dress(axes, title, unit, legend, {x for line in shown.values() for x, _ in line})


def _percentiles(axes: Axes, title: str, line: Sequence[tuple[int, Percentiles | None]], unit: str) -> None:
    for name, ink, dashes in SHARES:
        known = [(x, float(getattr(times, name))) for x, times in line if times is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=ink, linestyle=dashes, marker="o", label=name)
    _dress(axes, title, unit, "percentile", {x for x, _ in line})


def _dress(axes: Axes, title: str, unit: str, legend: str, places: set[int]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_title(title, loc="left", fontsize=_SIZE + 1)
    axes.set_xlabel(unit)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(round(value))))
    axes.set_ylim(0, axes.dataLim.y1 * 1.08)
    axes.grid(axis="x", visible=False)
    # Beside the axes: with seven lines there is no free corner inside.
    axes.legend(title=legend, loc="upper left", bbox_to_anchor=(1, 1.03), handlelength=2.4, alignment="left")


def _short(value: int) -> str:
    """`1024` → `1K`, `122880` → `120K`; other numbers in full."""
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else str(value)
