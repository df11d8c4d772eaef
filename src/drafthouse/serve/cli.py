"""`drafthouse serve …`: show a launch line, judge it, and ask a served model for its proofs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from drafthouse.progress import Silent, Terminal

app = typer.Typer(
    no_args_is_help=True,
    help="""Serving profiles: what would be launched, whether it can work, and whether it does.

    [dim]Example:[/dim]

      drafthouse serve plan qwen3.6-27b-mtp-a6000x2
    """,
)

Name = Annotated[str, typer.Argument(metavar="PROFILE", help="Name under inventory/profiles, or a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the profile; may be repeated."),
]
Folder = Annotated[
    Path | None, typer.Option("--profiles", metavar="FOLDER", help="Where names are looked up; default: inventory.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def _say(result: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        # Not wrapped: a launch line is there to be copied.
        Console(highlight=False).print(text, markup=False, soft_wrap=True)


@app.command("plan")
def plan(
    name: Name,
    form: Annotated[
        Literal["shell", "container", "systemd"], typer.Option("--as", help="How the line is written.")
    ] = "shell",
    overrides: Overrides = None,
    profiles: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show the launch line of a profile; nothing is started.

    [dim]Examples:[/dim]

      drafthouse serve plan qwen3.6-27b-mtp-a6000x2

      drafthouse serve plan qwen3.6-27b-dflash-a6000x2 --as systemd
    """
    import shlex

    from drafthouse.serve.launch import launch_line, render_container, render_shell, render_systemd, translated
    from drafthouse.serve.load import load_profile

    profile = load_profile(name, overrides or [], profiles)
    line = launch_line(profile)
    changes = [{"flag": c.old, "action": c.action, "text": c.text} for c in translated(profile).changes]
    forms = {"shell": render_shell(line), "systemd": render_systemd(line, profile)}
    if profile.container is not None or form == "container":
        forms["container"] = shlex.join(render_container(line, profile))
    result = {
        "profile": profile.name,
        "digest": profile.digest(),
        "argv": list(line.argv),
        "env": line.env,
        "changes": changes,
        "forms": forms,
    }
    notes = [f"# {change['flag']}: {change['action']}; {change['text']}" for change in changes]
    _say(result, as_json, "\n".join([*notes, forms[form]]))


@app.command("check")
def check(
    name: Name,
    model: Annotated[Path | None, typer.Option("--model", metavar="FOLDER", help="The model's folder.")] = None,
    draft: Annotated[Path | None, typer.Option("--draft", metavar="FOLDER", help="The drafter's folder.")] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="Interpreter that has the engine; default: the profile's.")
    ] = None,
    facts_file: Annotated[
        Path | None, typer.Option("--facts", metavar="FILE", help="Judge these facts instead of this machine's.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save-facts", metavar="FILE", help="Also write the facts that were judged.")
    ] = None,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="This machine is not the node: judge profile and folders only.")
    ] = False,
    overrides: Overrides = None,
    profiles: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Judge a launch before it is made; exit code 1 when it would fail or serve nonsense.

    What is not known is listed as not checked. Facts that were saved on a node can be judged anywhere.

    [dim]Examples:[/dim]

      drafthouse serve check qwen3.6-27b-mtp-a6000x2 --model /models/Qwen3.6-27B

      drafthouse serve check qwen3.6-27b-mtp-a6000x2 --facts node.json --json
    """
    from dataclasses import asdict

    from drafthouse.serve.collect import collect_facts
    from drafthouse.serve.facts import EngineFacts, HostFacts, read_facts, write_facts
    from drafthouse.serve.findings import errors
    from drafthouse.serve.load import load_profile
    from drafthouse.serve.preflight import preflight
    from drafthouse.serve.resolver import resolve
    from drafthouse.serve.rules.memory import memory_estimate

    wanted = [*(overrides or []), *([f"engine.python={python}"] if python else [])]
    profile = load_profile(name, wanted, profiles)
    if facts_file is not None:
        facts = read_facts(facts_file)
    else:
        facts = collect_facts(profile, model=model, draft=draft)
        if elsewhere:
            facts = facts.model_copy(update={"host": HostFacts(), "engine": EngineFacts()})
        if model is not None:
            facts = facts.model_copy(update={"resolution": resolve(profile, facts, model=model, draft=draft)})
    if save is not None:
        write_facts(facts, save)
    findings = preflight(profile, facts)
    wrong = errors(findings)
    memory = memory_estimate(profile, facts)
    lines = [f"{found.severity:<8}{found.id}: {found.sentence}; {found.fix}" for found in findings]
    unknown = sum(found.id == "not-checked" for found in findings)
    lines.append(f"{profile.name}: {len(wrong)} errors, {unknown} not checked")
    result = {
        "profile": profile.name,
        "errors": len(wrong),
        "findings": [asdict(found) for found in findings],
        "memory": asdict(memory) if memory else None,
    }
    _say(result, as_json, "\n".join(lines))
    if wrong:
        raise typer.Exit(1)


@app.command("canary")
def canary_verb(
    name: Name,
    url: Annotated[
        str | None, typer.Option("--url", help="Address of the server; default: the profile's host and port.")
    ] = None,
    overrides: Overrides = None,
    profiles: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Ask a served model for its proofs; exit code 1 when one fails.

    Known answers, no degenerate output, drafts that are accepted, a JSON schema, a resumed long prefix.

    [dim]Examples:[/dim]

      drafthouse serve canary qwen3.6-27b-mtp-a6000x2

      drafthouse serve canary qwen3.6-27b-mtp-a6000x2 --url http://192.0.2.20:30000 --json
    """
    from drafthouse.serve.canary import canary_of
    from drafthouse.serve.load import load_profile

    profile = load_profile(name, overrides or [], profiles)
    report = canary_of(profile, url or profile.address, Silent() if as_json else Terminal(Console(stderr=True)))
    word = {True: "passed", False: "FAILED", None: "unknown"}
    lines = [f"{word[one.passed]:<8}{one.name}: {one.sentence} ({one.seconds:.1f} s)" for one in report.checks]
    lines.append(f"{report.base_url}: the canary {'lives' if report.passed else 'is dead'}")
    _say(report.as_dict(), as_json, "\n".join(lines))
    if not report.passed:
        raise typer.Exit(1)
