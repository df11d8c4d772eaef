"""The page of one or several rooflines: one HTML file without network or script, its figures as JSON, its pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from drafthouse.measure import units
from drafthouse.measure.roofline.compare import Comparison
from drafthouse.measure.roofline.errors import RooflineError
from drafthouse.measure.roofline.hardware import Hardware
from drafthouse.measure.roofline.plots import DRAFT_NAMES, PART_NAMES, acceptance_plot, picture, step_plot
from drafthouse.measure.roofline.published import Check
from drafthouse.measure.roofline.step import Component, Roofline

JSON_NAME, HTML_NAME = "roofline.json", "roofline.html"
Row = tuple[str, ...]
# More than the last-level cache of any accelerator or CPU of the day.
_CACHEABLE = 1.5e9


@dataclass(frozen=True)
class Case:
    """One served model on one kind of hardware.

    Attributes:
        name: of files and anchors: lower case letters, digits, dashes.
        model: what is served, for people.
    """

    name: str
    model: str
    roofline: Roofline
    comparison: Comparison | None = None
    sweep: tuple[Comparison, ...] = ()

    @property
    def title(self) -> str:
        serving = self.roofline.serving
        count = "" if serving.tensor_parallel == 1 else f"{serving.tensor_parallel}× "
        return f"{self.model} on {count}{self.roofline.hardware.title}, {DRAFT_NAMES[serving.draft]}"

    @property
    def headline(self) -> str:
        return self.comparison.headline if self.comparison else bound_sentence(self.roofline)

    @property
    def sentence(self) -> str:
        return self.comparison.sentence if self.comparison else bound_sentence(self.roofline)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before he trusts the bound."""
        cached = (
            f"All that a step reads is {units.size(self.roofline.memory_bytes)}: where a cache holds it, a step can be"
        )
        caveat = (f"{cached} faster than this.",) if self.roofline.memory_bytes < _CACHEABLE else ()
        return (*self.roofline.hardware.notes, *caveat)

    def as_dict(self) -> dict[str, Any]:
        measured = {"measured": self.comparison.as_dict()} if self.comparison else {}
        points = {"sweep": [sweep_point(point) for point in self.sweep]} if self.sweep else {}
        return (
            {"name": self.name, "model": self.model}
            | self.roofline.as_dict()
            | measured
            | points
            | {"notes": self.notes}
        )


def sweep_point(point: Comparison) -> dict[str, float]:
    """One point of a sweep, plain values."""
    serving = point.roofline.serving
    return {
        "concurrency": serving.batch,
        "context": serving.context,
        "acceptance": point.roofline.acceptance,
        "measured_ms": point.measured_ms,
        "bound_ms": point.roofline.step_ms,
        "tokens_per_s": point.tokens_per_s,
        "share_of_bound": point.share,
    }


def bound_sentence(bound: Roofline) -> str:
    """The bound in a sentence, for a step that nobody measured."""
    waits = {"memory": "memory bandwidth", "compute": "arithmetic", "link": "the link between GPUs"}[bound.bound]
    rate = f"{bound.bound_tokens_per_s:.0f} tokens/s"
    if bound.serving.draft == "none":
        rate = f"that is {rate} at most"
    elif bound.assumed:
        rate = f"{rate} at most, if all of the {bound.longest} tokens of every round were accepted"
    else:
        rate = f"{rate} at most at an acceptance length of {units.length(bound.acceptance)}"
    share = units.percent(bound.limits[bound.bound])
    return f"A step takes at least {bound.step_ms:.1f} ms, {share} of it bound by {waits}: {rate}."


def render(cases: Sequence[Case], checks: Sequence[Check] = ()) -> str:
    """The page. The same cases give the same text."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(__package__), PackageLoader("drafthouse.measure")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = resources.files("drafthouse.measure").joinpath("templates", "report.css").read_text(encoding="utf-8")
    return environment.get_template("roofline.html.j2").render(
        css=Markup(style),
        json_name=JSON_NAME,
        cases=[_view(case) for case in cases],
        calculated=[_check_row(check) for check in checks if check.kind == "calculated"],
        measured=[_check_row(check) for check in checks if check.kind == "measured"],
        sources=sorted({check.source for check in checks}),
    )


def write(cases: Sequence[Case], checks: Sequence[Check], folder: Path) -> list[Path]:
    """Write roofline.html, roofline.json and a PNG for each case into `folder` (made when absent).

    Raises:
        RooflineError: the folder cannot be written.
    """
    html = render(cases, checks)
    data = {"cases": [case.as_dict() for case in cases], "published": [check_dict(check) for check in checks]}
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    pictures = [folder / f"{case.name}.png" for case in cases]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for case, path in zip(cases, pictures, strict=True):
            picture(path, case.title, case.roofline, case.comparison)
        (folder / JSON_NAME).write_text(text, encoding="utf-8")
        (folder / HTML_NAME).write_text(html, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        what = f"the page cannot be written ({reason})"
        raise RooflineError(what, where=str(folder), fix="free or change it") from error
    return [folder / HTML_NAME, folder / JSON_NAME, *pictures]


def check_dict(check: Check) -> dict[str, Any]:
    """A check as plain values."""
    return vars(check) | {"deviation": check.deviation, "holds": check.holds}


def component_rows(bound: Roofline) -> list[Row]:
    """Every component that takes time, with its part, bytes, FLOPs, ms, share and limit."""
    return [_component_row(component, bound) for component in bound.components if component.ms]


COMPONENT_COLUMNS = ("component", "part", "bytes", "FLOPs", "ms", "share", "limited by")
HARDWARE_COLUMNS = ("figure", "value", "from")


def hardware_rows(hardware: Hardware) -> list[Row]:
    """Every figure that the bound uses, with its source."""
    memory = hardware.bandwidth_gb_s
    rows = [_figure("memory bandwidth", memory.value, "GB/s", memory.source)]
    if hardware.memory_gb:
        rows.append(_figure("memory", hardware.memory_gb.value, "GB", hardware.memory_gb.source))
    for kind, figure in hardware.tflops.items():
        rows.append(_figure(f"{kind}, dense", figure.value, "TFLOP/s", figure.source))
    if hardware.link:
        link = hardware.links[hardware.link]
        rows.append(_figure(f"{link.kind}, one direction", link.gb_s.value, "GB/s", link.gb_s.source))
        rows.append(_figure("latency of a collective, base", link.base_us.value, "µs", link.base_us.source))
        rows.append(_figure("and a hop", link.hop_us.value, "µs", link.hop_us.source))
    return rows


def _view(case: Case) -> dict[str, Any]:
    bound = case.roofline
    return {
        "name": case.name,
        "title": case.title,
        "headline": case.headline,
        "sentence": case.sentence,
        "advice": case.comparison.advice if case.comparison else "",
        "facts": _facts(case),
        "plots": [
            step_plot(f"{case.name}-step", bound, case.comparison),
            acceptance_plot(f"{case.name}-acceptance", bound, case.comparison),
        ],
        "component_columns": COMPONENT_COLUMNS,
        "components": component_rows(bound),
        "hardware_columns": HARDWARE_COLUMNS,
        "hardware": _without_repeats(hardware_rows(bound.hardware)),
        "notes": case.notes,
        "settings": [(key.replace("_", " "), str(value)) for key, value in bound.serving if value is not None],
        "sweep": [_sweep_row(point) for point in case.sweep],
    }


def _without_repeats(rows: list[Row]) -> list[Row]:
    """A source is told once for figures that follow each other."""
    before = ["", *(row[-1] for row in rows)]
    return [(*row[:-1], "" if row[-1] == last else row[-1]) for row, last in zip(rows, before, strict=False)]


def _facts(case: Case) -> list[dict[str, str]]:
    bound, facts = case.roofline, []
    facts.append(_fact("Least time of a step", f"{bound.step_ms:.1f} ms", f"weights alone {bound.weights_ms:.1f} ms"))
    if case.comparison:
        measured = case.comparison
        share = units.percent(measured.share)
        facts.append(_fact("Share of what is possible", share, f"measured {measured.measured_ms:.1f} ms a step"))
    rate, at = f"{bound.bound_tokens_per_s:.0f} tokens/s", f"at acceptance length {units.length(bound.acceptance)}"
    facts.append(_fact("At most", rate, f"{at}, all accepted" if bound.assumed else at))
    if bound.serving.draft != "none":
        even = units.length(bound.break_even)
        plain = f"plain decoding: {bound.plain.bound_tokens_per_s:.0f} tokens/s at most"
        facts.append(_fact("Speculation pays above", even, plain))
    rows = f"{bound.serving.batch * bound.width} rows a pass now"
    facts.append(_fact("Arithmetic takes over at", f"{bound.ridge_rows:.0f} rows", rows))
    held = f"{bound.memory_bytes / 1e9:.1f} GB"
    fits = {None: "of a memory not known", True: "which fits", False: "which does NOT fit"}[bound.fits]
    facts.append(_fact("Held on each GPU", held, f"weights, caches, states; {fits}"))
    return facts


def _fact(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value.replace(" ", units.SPACE), "detail": detail}


def _component_row(component: Component, bound: Roofline) -> Row:
    flops = f"{units.compact(component.flops)}FLOP" if component.flops >= 1e3 else "–"
    moved = units.size(component.bytes) if component.bytes else "–"
    share = units.percent(component.ms / bound.step_ms)
    return (component.name, PART_NAMES[component.part], moved, flops, f"{component.ms:.3f}", share, component.limit)


def _figure(name: str, value: float, unit: str, source: str) -> Row:
    return (name, f"{value:.4g}{units.SPACE}{unit}" if value < 1e4 else f"{value:.0f}{units.SPACE}{unit}", source)


def _sweep_row(point: Comparison) -> Row:
    serving = point.roofline.serving
    return (
        units.count(serving.batch),
        units.count(serving.context),
        units.length(point.roofline.acceptance),
        f"{point.measured_ms:.1f}",
        f"{point.roofline.step_ms:.1f}",
        f"{point.tokens_per_s:.1f}",
        units.percent(point.share),
    )


def _check_row(check: Check) -> Row:
    last = units.change(check.ours, check.published)
    if check.kind == "measured":
        last = units.percent(check.published / check.ours)
    unit = f" {check.unit}".rstrip()
    return (check.hardware, check.what, check.why, f"{check.published:g}{unit}", f"{check.ours:.4g}{unit}", last)
