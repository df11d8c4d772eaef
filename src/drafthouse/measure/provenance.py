"""What ran, on what and with what: corpus, shards, recipes, machine, versions, seeds, settings as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from drafthouse.measure import units
from drafthouse.measure.plots import inks
from drafthouse.measure.report_schema import Report


@dataclass(frozen=True)
class ShardRow:
    cells: tuple[str, ...]
    redone: bool
    sha256: str


@dataclass(frozen=True)
class RecipeRow:
    name: str
    cells: tuple[str, ...]
    differs: bool


def shard_rows(report: Report) -> list[ShardRow]:
    table = report.shards.table
    first = min((row.epoch for row in table), default=0)
    rows = []
    for row in table:
        redone = row.epoch > first if row.redone is None else row.redone
        seconds = "–" if row.seconds is None else units.duration(row.seconds)
        cells = (
            _short(row.shard, 12),
            units.count(row.samples),
            units.count(row.tokens),
            units.size(row.bytes),
        )
        rows.append(ShardRow((*cells, row.worker, str(row.epoch), seconds), redone, row.sha256))
    return rows


def recipe_rows(report: Report) -> list[RecipeRow]:
    """Recipes side by side, then what they cost; rows in which the drafters differ are marked."""
    runs = [report.training[name] for name in inks(report.training)]
    names = dict.fromkeys(key for run in runs for key in run.recipe)
    rows = [_recipe_row(name.replace("_", " "), [_value(run.recipe.get(name)) for run in runs]) for name in names]
    rows.append(_recipe_row("steps", [units.count(run.steps) for run in runs]))
    rows.append(_recipe_row("tokens seen", [units.count(run.tokens) for run in runs]))
    rows.append(_recipe_row("parameters", [units.count(run.parameters) for run in runs]))
    return rows


def corpus_rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind, cell in report.corpus.kinds.items():
        share = units.percent(cell.masked / cell.tokens) if cell.tokens else "–"
        rows.append((kind, units.count(cell.samples), units.count(cell.tokens), units.count(cell.masked), share))
    return rows


def machine_rows(report: Report) -> list[tuple[str, str]]:
    """The machine in words; what it could not tell is left out, what it says beyond the usual is kept."""
    machine = dict(report.machine)
    machine.pop("versions", None)
    rows: list[tuple[str, str]] = []

    def add(label: str, text: str | None) -> None:
        if text:
            rows.append((label, text))

    def take(key: str) -> Any:
        return machine.pop(key, None)

    add("processor", take("cpu_model"))
    add("architecture", take("architecture"))
    logical, usable, quota = take("cpu_cores_logical"), take("cpu_cores_usable"), take("cpu_quota_cores")
    cores = [f"{logical} logical" if logical else "", f"{usable} usable by this process" if usable else ""]
    cores.append(f"{quota:g} by quota" if isinstance(quota, int | float) else "")
    add("cores", ", ".join(part for part in cores if part))
    total, free, limit = (
        take("memory_total_bytes"),
        take("memory_available_bytes"),
        take("memory_limit_bytes"),
    )
    memory = [
        f"{units.size(total)} in all" if total else "",
        f"{units.size(free)} free at the start" if free else "",
    ]
    memory.append(f"limited to {units.size(limit)}" if limit else "")
    add("memory", ", ".join(part for part in memory if part))
    loads = [take(f"load_average_{minutes}min") for minutes in (1, 5, 15)]
    if all(isinstance(load, int | float) for load in loads):
        add("load at the start", ", ".join(f"{load:.2f}" for load in loads) + " (1, 5, 15 min)")
    gpus = take("gpus") or []
    add("GPUs", ", ".join(_gpu(gpu) for gpu in gpus) if gpus else "none")
    for label in ("os", "kernel", "python"):
        add({"os": "system", "python": "Python"}.get(label, label), take(label))
    for key, value in machine.items():
        add(key.replace("_", " "), None if value is None else _value(value))
    return rows


def version_rows(report: Report) -> list[tuple[str, str]]:
    versions = report.machine.get("versions")
    known = {str(name): str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}
    return sorted((known | report.versions).items())


def seed_rows(report: Report) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), _value(seed)) for name, seed in report.seeds.items()]


def config_text(report: Report) -> str:
    return yaml.safe_dump(report.config, sort_keys=False, allow_unicode=True, default_flow_style=None, width=90)


def layers_text(layer_types: list[str]) -> str:
    """`["linear", "linear", "full"]` → `2 × linear, 1 × full`, in order of appearance."""
    counts = {kind: layer_types.count(kind) for kind in dict.fromkeys(layer_types)}
    return ", ".join(f"{number} × {kind.replace('_', ' ')}" for kind, number in counts.items())


def _recipe_row(name: str, cells: list[str]) -> RecipeRow:
    return RecipeRow(name, tuple(cells), len(set(cells)) > 1)


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items())
    return str(value)


def _gpu(gpu: Any) -> str:
    if not isinstance(gpu, Mapping):
        return str(gpu)
    memory, driver = gpu.get("memory_bytes"), gpu.get("driver")
    extras = [units.size(memory) if memory else "", f"driver {driver}" if driver else ""]
    extras = [extra for extra in extras if extra]
    return str(gpu.get("name", "unnamed")) + (f" ({', '.join(extras)})" if extras else "")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
