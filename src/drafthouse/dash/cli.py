"""`drafthouse dash`: the verb's options."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drafthouse.config import load
from drafthouse.dash.errors import DashError
from drafthouse.dash.settings import TOKEN, DashSettings
from drafthouse.verbs import AsJson, say

if TYPE_CHECKING:
    from drafthouse.dash.model import Snapshot

INVENTORY = Path("inventory")


def dash(
    inventory: Annotated[
        Path | None, typer.Option("--inventory", metavar="FOLDER", help="Nodes, jobs and the fleet's store.")
    ] = None,
    runs: Annotated[
        list[Path] | None, typer.Option("--run", metavar="FOLDER", help="Run folder; may be repeated.")
    ] = None,
    stores: Annotated[
        list[str] | None, typer.Option("--store", metavar="URL", help="Store with runs and drafters; may be repeated.")
    ] = None,
    servers: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="NAME=URL", help="Served model whose /metrics is read; may be repeated."),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port, 0 for any free one; default: 8765.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Where a reverse proxy shows the page.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, say what was seen, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve the page that shows fleet, jobs, extraction, training, serving and stores.

    Read only. Without options it looks at the inventory/ of the current folder. At any address but loopback it asks
    for the token in DRAFTHOUSE_DASH_TOKEN.

    [dim]Examples:[/dim]

      drafthouse dash

      drafthouse dash --run runs/demo --port 0

      drafthouse dash --inventory inventory --server qwen=http://192.0.2.20:30000 --host 0.0.0.0

      drafthouse dash --run runs/demo --once --json
    """
    settings = settings_of(inventory, runs, stores, servers, host, port, url, overrides)
    _need("flask", "waitress", "prometheus_client")
    from drafthouse.dash.collector import Collector

    if once:
        snapshot = Collector(settings).refresh_now(probes=settings.probe_s > 0)
        say(snapshot.as_dict(), as_json, summary(snapshot))
        return
    if as_json:
        raise DashError("--json is for a single look", where="drafthouse dash", fix="add --once")
    from drafthouse.dash.auth import token_of
    from drafthouse.dash.serve import Server, run_until_told
    from drafthouse.dash.web import create_app

    token = token_of(settings, os.environ)
    collector = Collector(settings)
    server = Server(create_app(collector.snapshot, settings, token=token), settings)
    with collector:
        door = f"asks for the token in {TOKEN}" if token else "open to everyone on this machine"
        shown = f"; shown at {settings.url}" if settings.url else ""
        text = f"{server.address} ({door}{shown}; Ctrl-C ends it)"
        run_until_told(server, lambda: typer.echo(text))


def settings_of(
    inventory: Path | None,
    runs: list[Path] | None,
    stores: list[str] | None,
    servers: list[str] | None,
    host: str | None,
    port: int | None,
    url: str | None,
    overrides: list[str] | None,
) -> DashSettings:
    """The settings that the options say; options are overrides, so that one sentence tells what is wrong with them.

    Raises:
        DashError: there is nothing to look at, or a server has no name.
        ConfigError: a value that cannot be.
    """
    named = dict(_server(text) for text in servers or [])
    given: dict[str, Any] = {
        "inventory": None if inventory is None else str(inventory),
        "runs": [str(run) for run in runs or []],
        "stores": stores or [],
        "servers": named,
    }
    sources = ("inventory=", "runs=", "stores=", "servers.", "servers=")
    if not any(given.values()) and not any(one.startswith(sources) for one in overrides or []):
        if not (INVENTORY / "hosts.yml").is_file():
            raise DashError(
                "there is nothing to look at, and no inventory/ in this folder",
                where="drafthouse dash",
                fix="give --inventory FOLDER, --run FOLDER, --store URL or --server NAME=URL",
            )
        given["inventory"] = str(INVENTORY)
    given |= {"host": host, "port": port, "url": url}
    for what, paths in (("inventory", [inventory] if inventory else []), ("run", runs or [])):
        for path in paths:
            if not path.is_dir():
                raise DashError("there is no such folder", where=f"--{what} {path}", fix="correct the path")
    if inventory and not (inventory / "hosts.yml").is_file():
        raise DashError("there is no hosts.yml in it", where=f"--inventory {inventory}", fix="correct the path")
    options = [f"{key}={json.dumps(value)}" for key, value in given.items() if value not in (None, [], {})]
    return load(DashSettings, None, [*options, *(overrides or [])])


def summary(snapshot: Snapshot) -> str:
    """What was seen, in a line for each kind and one for each thing that needs attention."""
    from drafthouse.dash.attention import WORDS, concerns

    parts = {
        "node": len(snapshot.nodes),
        "job": len(snapshot.jobs),
        "extraction": len(snapshot.extractions),
        "training": len(snapshot.trainings),
        "server": len(snapshot.servers),
        "store": len(snapshot.stores),
    }
    first = ", ".join(f"{many} {name}{'' if many == 1 else 's'}" for name, many in parts.items())
    return "\n".join([first, *(f"{WORDS[one.severity]}: {one.subject} {one.what}" for one in concerns(snapshot))])


def _server(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not name or not url.startswith(("http://", "https://")):
        raise DashError(f"'{text}' is not of the form name=http://…", where="--server", fix="write it so")
    return name, url


def _need(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise DashError(
            f"the page needs packages that are not installed ({', '.join(missing)})",
            where="drafthouse dash",
            fix="pip install 'drafthouse[dash]'",
        )
