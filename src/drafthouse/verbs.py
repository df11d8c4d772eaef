"""What all verbs of the command line share: `--json`, how a result is said, and who shows progress."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from drafthouse.progress import Progress, Silent, Terminal

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def progress_of(as_json: bool) -> Progress:
    """Bars on standard error; nothing beside JSON."""
    return Silent() if as_json else Terminal(Console(stderr=True))


def say(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print `result` as JSON, or `text` for people."""
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        # Not wrapped: a line may be a path or a launch line that somebody copies, and a pipe has no width.
        Console(highlight=False).print(text, markup=False, soft_wrap=True)
