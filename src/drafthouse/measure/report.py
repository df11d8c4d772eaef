"""`report.json` → `report.html`: one file that needs nothing else, neither a network nor a script."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from drafthouse.measure import plots, provenance, samples, units, view
from drafthouse.measure.report_schema import Report, ReportError, parse_report

JSON_NAME = "report.json"
HTML_NAME = "report.html"


def render(report: Mapping[str, Any]) -> str:
    """The page of a report. The same dict always gives the same text.

    Raises:
        ReportError: a required key is missing, a value is of the wrong kind, or figures contradict each
            other; the sentence names the path of the key.
    """
    return _page(parse_report(report))


def write_report(report: Mapping[str, Any], out_dir: Path) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into `out_dir` (made when absent); their paths, JSON first.

    Each file appears whole or not at all; a report that breaks the contract leaves what was there before.

    Raises:
        ReportError: the dict breaks the contract, or the folder cannot be written.
    """
    html = render(report)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    json_path, html_path = out_dir / JSON_NAME, out_dir / HTML_NAME
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        _replace({json_path: text, html_path: html})
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ReportError(
            f"the report cannot be written ({reason})", where=str(out_dir), fix="free or change it"
        ) from error
    return json_path, html_path


def _page(report: Report) -> str:
    lines = view.dimensions(report)
    by_kind = [plots.acceptance_by_kind(report, mode) for mode in plots.MODES]
    slots = [plots.acceptance_by_slot(report), plots.accuracy_by_slot(report)]
    acceptance = [*slots, plots.acceptance_by_budget(report), plots.passes(report), *by_kind]
    style = resources.files(__package__).joinpath("templates", "report.css").read_text(encoding="utf-8")
    template = _environment().get_template("report.html.j2")
    return template.render(
        report=report,
        css=Markup(style),
        dimensions=lines,
        scale_end=view.scale_end(lines),
        facts=view.facts(report),
        steps=view.steps(report),
        drafters=plots.inks(report.training),
        acceptance_rows=view.acceptance_rows(report),
        trees_below_chain=view.trees_below_chain(report),
        acceptance_plots=[plot for plot in acceptance if plot is not None],
        run_keys=samples.run_keys(report),
        samples=samples.sample_views(report),
        gauges=view.gauges(report),
        exact_match_plot=plots.exact_match(report, view.EXACT_MATCH_AT_LEAST),
        speed_plot=plots.speed(report),
        speed_sentences=view.speed_sentences(report),
        training_plots=plots.training_plots(report),
        recipe_rows=provenance.recipe_rows(report),
        corpus_rows=provenance.corpus_rows(report),
        shard_rows=provenance.shard_rows(report),
        machine_rows=provenance.machine_rows(report),
        version_rows=provenance.version_rows(report),
        seed_rows=provenance.seed_rows(report),
        config_text=provenance.config_text(report),
        layers_text=provenance.layers_text(report.target.layer_types),
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("drafthouse.measure", "templates"),
        autoescape=True,  # sample texts hold <, > and quotes, and a model may write anything
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": units.count,
        "compact": units.compact,
        "size": units.size,
        "duration": units.duration,
        "percent": units.percent,
        "length_of": units.length,
        "newlines": _newlines,
    }
    return environment


def _newlines(text: str) -> Markup:
    """A token that is only a line break would show no colour: its sign stands where it breaks."""
    return escape(text).replace("\n", Markup('<i class="nl" aria-hidden="true">↵</i>\n'))


def _replace(files: Mapping[Path, str]) -> None:
    """All files are on the disk before the first takes its name."""
    temporary: dict[Path, Path] = {}
    try:
        for path, text in files.items():
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            temporary[path] = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary[path].chmod(0o644)  # mkstemp keeps files to their owner; a report is for reading
        for path, written in temporary.items():
            written.replace(path)
    finally:
        for written in temporary.values():
            with contextlib.suppress(FileNotFoundError):
                written.unlink()
