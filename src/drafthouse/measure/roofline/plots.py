"""Two pictures of a roofline: what a step's time is made of, and throughput against acceptance length.

On the page they are inline SVG in the page's own colours; `picture` puts both side by side into a PNG with a legend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafthouse.measure import units
from drafthouse.measure.charts import DASHES, Key, Plot, spoken
from drafthouse.measure.roofline.compare import Comparison
from drafthouse.measure.roofline.step import PARTS, Part, Roofline
from drafthouse.measure.svg import FONT_SIZE, INKS, panel, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PART_NAMES: Mapping[Part, str] = {
    "weights": "weights of the target",
    "attention_cache": "attention cache",
    "recurrent_state": "recurrent state",
    "logits": "logits",
    "draft": "drafter",
    "all_reduce": "all-reduce",
}
# Graphite is what nothing but fewer bytes changes; blue is the drafter, as everywhere in Drafthouse's pages.
PART_INKS: Mapping[Part, str] = {
    "weights": "baseline",
    "attention_cache": "fourth",
    "recurrent_state": "third",
    "logits": "ink",
    "draft": "ours",
    "all_reduce": "target",
}
DRAFT_NAMES = {"none": "plain decoding", "mtp": "MTP", "dflash": "DFlash", "eagle3": "EAGLE-3"}
_UNEXPLAINED = "measured beyond the bound"
# Less of a bar is no visible mark and only lengthens the legend.
_VISIBLE = 0.002
# The light theme of the report's style sheet, for pictures that stand alone.
_LIGHT = {
    "ink": "#15202c",
    "muted": "#4c5a69",
    "grid": "#dde4eb",
    "paper": "#ffffff",
    "ours": "#0a62ad",
    "baseline": "#68737f",
    "third": "#8a5a00",
    "fourth": "#2b7a4b",
    "target": "#b8321b",
}


@dataclass(frozen=True)
class _Bar:
    title: str
    roofline: Roofline
    measured_ms: float | None = None

    @property
    def end(self) -> float:
        return self.measured_ms or self.roofline.step_ms


def step_plot(name: str, bound: Roofline, comparison: Comparison | None) -> Plot:
    """Stacked bars: plain decoding, a round with its drafter, the measured step."""
    bars = _bars(bound, comparison)
    columns = ("step", *(PART_NAMES[part] for part in PARTS), "sum")
    rows = []
    for bar in bars:
        cells = [f"{bar.roofline.part_ms(part):.2f}" for part in PARTS]
        rows.append((bar.title, *cells, f"{bar.end:.2f}"))
    title, unit = "What a step's time is made of", "ms on each GPU"
    with panel(46.0 * len(bars) + 44) as figure:
        axes = figure.add_subplot()
        _draw_step(axes, bars, INKS, FONT_SIZE)
        svg = to_svg(figure, name, spoken(title, unit, rows, columns))
    return Plot(name, title, unit, svg, tuple(_step_keys(bars)), columns, tuple(rows))


def acceptance_plot(name: str, bound: Roofline, comparison: Comparison | None) -> Plot:
    """Throughput against acceptance length: the bound, the measured speed, and plain decoding as a level."""
    columns = ["acceptance length", "bound", "against plain decoding"]
    if comparison:
        columns.append("at the measured speed")
    rows = []
    for row in bound.table(comparison.measured_ms if comparison else None):
        cells = [units.length(row["acceptance"]), f"{row['bound_tokens_per_s']:.1f}", units.ratio(row["against_plain"])]
        if comparison:
            cells.append(f"{row['measured_tokens_per_s']:.1f}")
        rows.append(tuple(cells))
    title, unit = "Throughput against acceptance length", "tokens/s of all requests, over tokens a round"
    with panel(230) as figure:
        axes = figure.add_subplot()
        _draw_acceptance(axes, bound, comparison, INKS, FONT_SIZE)
        svg = to_svg(figure, name, spoken(title, unit, rows, columns))
    return Plot(name, title, unit, svg, tuple(_acceptance_keys(comparison)), tuple(columns), tuple(rows))


def picture(path: Path, title: str, bound: Roofline, comparison: Comparison | None) -> None:
    """Both pictures side by side as a PNG of 1600 × 700 pixels on white."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    size = 11.0
    style = {
        "font.size": size,
        "text.parse_math": False,
        "text.color": _LIGHT["ink"],
        "axes.labelcolor": _LIGHT["muted"],
        "axes.edgecolor": _LIGHT["muted"],
        "xtick.color": _LIGHT["muted"],
        "ytick.color": _LIGHT["muted"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": _LIGHT["grid"],
        "lines.linewidth": 2.2,
    }
    bars = _bars(bound, comparison)
    with matplotlib.style.context(["default", style]):
        figure = Figure(figsize=(12.8, 5.6), dpi=125, facecolor=_LIGHT["paper"])
        canvas = FigureCanvasAgg(figure)
        figure.text(0.02, 0.94, title, fontsize=size + 4, fontweight="bold")
        left, right = figure.add_axes((0.02, 0.27, 0.44, 0.56)), figure.add_axes((0.555, 0.27, 0.425, 0.56))
        _draw_step(left, bars, _LIGHT, size)
        left.set_title("What a step's time is made of", loc="left", fontsize=size + 1)
        _draw_acceptance(right, bound, comparison, _LIGHT, size)
        right.set_ylabel("tokens/s of all requests")
        right.set_title("Throughput against acceptance length", loc="left", fontsize=size + 1)
        for axes, keys, columns in ((left, _step_keys(bars), 3), (right, _acceptance_keys(comparison), 2)):
            handles = [
                Line2D([], [], color=_LIGHT[key.ink], linestyle=DASHES if key.mark == "dash" else "-", label=key.label)
                if key.mark in ("line", "dash")
                else Patch(**_fill(_LIGHT[key.ink], key.mark == "pale"), label=key.label)
                for key in keys
            ]
            axes.legend(
                handles=handles,
                loc="upper left",
                bbox_to_anchor=(-0.01, -0.2),
                ncols=columns,
                frameon=False,
                fontsize=size - 0.5,
            )
        canvas.print_png(str(path))


def _bars(bound: Roofline, comparison: Comparison | None) -> list[_Bar]:
    bars = [_Bar("plain decoding, least", bound.plain)]
    if bound.serving.draft != "none":
        bars.append(_Bar(f"a round with {DRAFT_NAMES[bound.serving.draft]}, least", bound))
    if comparison:
        bars.append(_Bar("measured", bound, comparison.measured_ms))
    return bars


def _step_keys(bars: list[_Bar]) -> list[Key]:
    seen = [part for part in PARTS if any(bar.roofline.shares[part] >= _VISIBLE for bar in bars)]
    keys = [Key(PART_NAMES[part], PART_INKS[part], "bar") for part in seen]
    if any(bar.measured_ms and bar.measured_ms > bar.roofline.step_ms for bar in bars):
        keys.append(Key(_UNEXPLAINED, "muted", "pale"))
    return keys


def _acceptance_keys(comparison: Comparison | None) -> list[Key]:
    keys = [Key("at most, by the hardware", "ours", "line")]
    if comparison:
        keys.append(Key("at the measured step", "target", "dash"))
    return [*keys, Key("plain decoding, at most", "baseline", "line")]


def _draw_step(axes: Axes, bars: list[_Bar], inks: Mapping[str, str], size: float) -> None:
    end = max(bar.end for bar in bars)
    for place, bar in enumerate(bars):
        left = 0.0
        for part in PARTS:
            width = bar.roofline.part_ms(part)
            if width:
                axes.barh(place, width, left=left, height=0.5, **_fill(inks[PART_INKS[part]], False))
            if width > 0.17 * end:
                label = f"{width:.1f} ms"
                axes.text(left + width / 2, place, label, color=inks["paper"], ha="center", va="center_baseline")
            left += width
        if bar.measured_ms and bar.measured_ms > left:
            axes.barh(place, bar.measured_ms - left, left=left, height=0.5, **_fill(inks["muted"], True))
        axes.text(0, place - 0.36, bar.title, color=inks["ink"], va="bottom", fontsize=size)
        axes.text(bar.end + end * 0.012, place, f"{bar.end:.1f} ms", va="center_baseline", fontsize=size)
    axes.set_xlim(0, end * 1.17)
    axes.set_ylim(len(bars) - 0.55, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms")


def _draw_acceptance(
    axes: Axes, bound: Roofline, comparison: Comparison | None, inks: Mapping[str, str], size: float
) -> None:
    lengths = [row["acceptance"] for row in bound.table()]
    axes.plot(lengths, [bound.tokens_per_s(length) for length in lengths], color=inks["ours"])
    plain = bound.plain.bound_tokens_per_s
    axes.axhline(plain, color=inks["baseline"])
    at = bound.acceptance
    here = bound.bound_tokens_per_s
    if comparison:
        speeds = [bound.tokens_per_s(length, comparison.measured_ms) for length in lengths]
        axes.plot(lengths, speeds, color=inks["target"], linestyle=DASHES)
        here = comparison.tokens_per_s
    if not bound.assumed and bound.longest > 1:
        ink = inks["target"] if comparison else inks["ours"]
        axes.plot([at], [here], color=ink, marker="o", markersize=7, linestyle="none")
        axes.vlines(at, 0, here, color=ink, linewidth=1.0, linestyle=":")
        # Down there are no lines but plain decoding's level; where that lies low, the figure stands above it.
        top = bound.tokens_per_s(bound.longest)
        floor = plain if plain < 0.15 * top else 0.0
        right = at < 1 + 0.5 * (bound.longest - 1)
        axes.annotate(
            f"{here:.0f} tokens/s at {at:.2f}",
            (at, floor),
            xytext=(size * (0.5 if right else -0.5), size * 0.5),
            textcoords="offset points",
            ha="left" if right else "right",
            fontsize=size,
        )
    if bound.longest == 1:
        axes.set_xlim(0.5, 1.5)
    else:
        margin = 0.03 * (bound.longest - 1)
        axes.set_xlim(1 - margin, bound.longest + margin)
    axes.set_ylim(0, bound.tokens_per_s(bound.longest) * 1.06)
    axes.set_xlabel("acceptance length: tokens a round, the target's own included")
    axes.grid(axis="x", visible=False)


def _fill(ink: str, pale: bool) -> dict[str, Any]:
    face = (ink, 0.18) if pale else ink
    # An edge would add its own width to a sliver of a bar.
    return {"facecolor": face, "edgecolor": ink, "linewidth": 0.8 if pale else 0.0, "hatch": "///" if pale else ""}
