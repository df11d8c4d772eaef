"""`drafthouse roofline`: the verb's options, and its answer as text, JSON or page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from drafthouse.config import load
from drafthouse.measure.roofline.compare import compare, compare_sweep
from drafthouse.measure.roofline.errors import RooflineError
from drafthouse.measure.roofline.hardware import Hardware, load_hardware
from drafthouse.measure.roofline.page import COMPONENT_COLUMNS, Case, component_rows, sweep_point, write
from drafthouse.measure.roofline.probe import cpu_hardware, hardware_from_probe
from drafthouse.measure.roofline.profile import Plan, drafter_config, model_config, plan_of, read_profile
from drafthouse.measure.roofline.published import checks
from drafthouse.measure.roofline.serving import Serving
from drafthouse.measure.roofline.step import roofline as bound_of

DEFAULT_MODEL = "Qwen/Qwen3.6-27B"


def roofline(
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="Serving profile: its name, or its file.")
    ] = None,
    profiles: Annotated[
        Path, typer.Option("--profiles", metavar="FOLDER", help="Where profiles are looked for.")
    ] = Path("inventory/profiles"),
    model: Annotated[
        str | None, typer.Option("--model", help="Model folder, 'embedded' or hub name; default: the profile's.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Drafter folder or hub name; default: the profile's.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Entry of the table, 'probe' (measure this node) or 'cpu' (measure its CPU)."),
    ] = None,
    link: Annotated[str | None, typer.Option("--link", help="pcie or nvlink; default: the profile's.")] = None,
    context: Annotated[int | None, typer.Option("--context", help="Tokens that each request has cached.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Requests decoded together.")] = None,
    acceptance: Annotated[
        float | None, typer.Option("--acceptance", help="Tokens a round, the target's own included.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one setting of serving; may be repeated."),
    ] = None,
    measured_ms: Annotated[
        float | None, typer.Option("--measured-ms", help="Measured time of one decode step, to set beside the bound.")
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            "--sweep", metavar="JSON", help="Measured points: concurrency, context, tokens_per_s, acceptance."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Write the page and its pictures.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Say how fast a decode step can be at all, what it is made of, and how near a measurement comes.

    [dim]Examples:[/dim]

      drafthouse roofline --profile qwen3.6-27b-mtp-a6000x2 --json

      drafthouse roofline --profile qwen3.6-27b-mtp-a6000x2 --acceptance 3.1 --measured-ms 44 --out runs/roofline

      drafthouse roofline --model Qwen/Qwen3.6-27B-FP8 --hardware h200 --context 8192 --batch 16

      drafthouse roofline --model embedded --hardware cpu --batch 4
    """
    plan = _plan(profile, profiles, model, drafter, hardware)
    given = {"context": context, "batch": batch, "acceptance": acceptance}
    wanted = plan.serving | {key: value for key, value in given.items() if value is not None}
    serving = load(
        Serving, None, [*(f"{key}={json.dumps(value)}" for key, value in wanted.items()), *(overrides or [])]
    )
    entry = _hardware(plan.hardware)
    chosen = link or plan.link
    entry = entry.with_link(chosen) if chosen else entry
    bound = bound_of(plan.model, entry, serving, draft=plan.drafter)
    case = Case(
        name=re.sub(r"[^a-z0-9]+", "-", f"{plan.served}-{entry.name}".casefold()).strip("-"),
        model=plan.served,
        roofline=bound,
        comparison=None if measured_ms is None else compare(bound, measured_ms),
        sweep=tuple(compare_sweep(plan.model, entry, serving, _points(sweep), draft=plan.drafter)) if sweep else (),
    )
    written = write([case], checks(), out) if out else []
    if as_json:
        typer.echo(json.dumps(case.as_dict(), indent=1))
    else:
        text = "\n".join([*_lines(case), *(str(path) for path in written)])
        Console(highlight=False).print(text, markup=False, soft_wrap=True)


def _plan(profile: str | None, folder: Path, model: str | None, drafter: str | None, hardware: str | None) -> Plan:
    """The profile's plan, or one of the options alone; options take precedence."""
    if profile is not None:
        values = dict(read_profile(profile, folder))
        if model is not None:
            values["model"] = {**values.get("model", {}), "path": model}
        if drafter is not None:
            speculation = values.get("speculation") or {}
            values["speculation"] = {**speculation, "draft": {"path": drafter}}
        plan = plan_of(values, profile)
        # Another GPU need not have the link that the profile's has.
        return plan if hardware is None else replace(plan, hardware=hardware, link=None)
    if hardware is None:
        raise RooflineError(
            "neither a profile nor hardware is given", where="roofline", fix="give --profile NAME or --hardware NAME"
        )
    path = model or DEFAULT_MODEL
    config, weights = model_config(path)
    return Plan(
        served=path.rstrip("/").rsplit("/", 1)[-1],
        model=config,
        hardware=hardware,
        serving={"weights": weights} if weights else {},
        drafter=drafter_config(drafter) if drafter else None,
    )


def _hardware(name: str) -> Hardware:
    if name == "probe":
        return hardware_from_probe()
    return cpu_hardware() if name == "cpu" else load_hardware(name)


def _points(path: Path) -> list[dict[str, Any]]:
    """The points of a sweep: a list, or an object that holds it under "points"."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise RooflineError(f"cannot be read ({reason})", where=str(path), fix="check the path") from None
    except (yaml.YAMLError, ValueError):
        raise RooflineError("is not JSON", where=str(path), fix="give the JSON of a sweep") from None
    points = data.get("points") if isinstance(data, dict) else data
    if not isinstance(points, list) or not points or not all(isinstance(point, dict) for point in points):
        raise RooflineError(
            "holds no list of points",
            where=str(path),
            fix='write [{"concurrency": 1, "context": 1024, "tokens_per_s": 70, "acceptance": 3.1}]',
        )
    return points


def _lines(case: Case) -> list[str]:
    """What is said without --json: the sentence, the components, throughput against acceptance length, the sweep."""
    bound = case.roofline
    measured = case.comparison.measured_ms if case.comparison else None
    lines = [case.title, "", case.sentence, ""]
    lines += _columns([COMPONENT_COLUMNS, *component_rows(bound)], left=2)
    if bound.longest > 1:
        rows = [("acceptance", "tokens/s at most", "against plain", *(["at the measured step"] if measured else []))]
        for row in bound.table(measured):
            values = [f"{row['acceptance']:.2f}", f"{row['bound_tokens_per_s']:.1f}", f"{row['against_plain']:.2f}×"]
            rows.append((*values, *([f"{row['measured_tokens_per_s']:.1f}"] if measured else [])))
        lines += ["", *_columns(rows, left=0)]
    if case.sweep:
        points = [sweep_point(point) for point in case.sweep]
        rows = [tuple(points[0]), *(tuple(f"{value:.4g}" for value in point.values()) for point in points)]
        lines += ["", *_columns(rows, left=0)]
    notes = case.notes
    return [*lines, *(["", *notes] if notes else [])]


def _columns(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """Rows as aligned columns, the first `left` of them to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
