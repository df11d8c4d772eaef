"""`drafthouse …`: the first of two doors. One function a verb; the work is done in the rooms."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from drafthouse import __version__
from drafthouse.config import load
from drafthouse.errors import DrafthouseError
from drafthouse.progress import Progress, Silent, Terminal

app = typer.Typer(
    name="drafthouse",
    help="From a bare GPU host to a served model with a speculative drafter trained for it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
target_app = typer.Typer(no_args_is_help=True, help="The served model, and the small one of the package.")
app.add_typer(target_app, name="target")

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def _progress(as_json: bool) -> Progress:
    return Silent() if as_json else Terminal(Console(stderr=True))


def _say(result: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        Console(highlight=False).print(text)


@target_app.command("train-tiny")
def train_tiny_verb(
    out: Annotated[Path, typer.Argument(help="Model folder to write.")],
    file: Annotated[Path | None, typer.Option("--file", help="Recipe (YAML); default: the package's own.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train a small Gated-DeltaNet hybrid from text that every machine has.

    [dim]Examples:[/dim]

      drafthouse target train-tiny runs/tiny --set training.steps=300 --set training.rows=8 --set corpus.samples=4000 --set corpus_parts=2

      drafthouse target train-tiny runs/tiny --set device=cuda
    """
    from drafthouse.loop.tiny import EMBEDDED_RECIPE, TargetSettings, train_embedded

    settings = load(TargetSettings, file or EMBEDDED_RECIPE, overrides or [])
    report = train_embedded(settings, out, _progress(as_json))
    guard = report["guard"]
    _say(
        report,
        as_json,
        f"{out}: {report['parameters']:,} parameters, {report['tokens']:,} tokens in {report['seconds']} s; held-out"
        f" loss {report['held_out']['assistant_loss']:.3f}, exact match {guard['exact_match']:.0%}, repeated 4-grams"
        f" {guard['repeated_4grams']:.0%}",
    )


@app.command("version")
def version_verb() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point: an error that a user can cause is one sentence on stderr and exit code 2."""
    try:
        app()
    except DrafthouseError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {error}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
