"""`drafthouse serve …`: show a launch line, judge it, and ask a served model for its proofs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from drafthouse.verbs import AsJson, progress_of, say

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
    say(result, as_json, "\n".join([*notes, forms[form]]))


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
    say(result, as_json, "\n".join(lines))
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
    report = canary_of(profile, url or profile.address, progress_of(as_json))
    word = {True: "passed", False: "FAILED", None: "unknown"}
    lines = [f"{word[one.passed]:<8}{one.name}: {one.sentence} ({one.seconds:.1f} s)" for one in report.checks]
    lines.append(f"{report.base_url}: the canary {'lives' if report.passed else 'is dead'}")
    say(report.as_dict(), as_json, "\n".join(lines))
    if not report.passed:
        raise typer.Exit(1)


@app.command("sweep")
def sweep_verb(
    name: Annotated[
        str | None, typer.Argument(metavar="[PROFILE]", help="Name under inventory/profiles, or a YAML file.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Address of the server; default: the profile's host and port.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Served name; default: the profile's.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder or hub id, to make prompts of a length; default: model.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Results; a sweep there is continued.")] = Path(
        "runs/sweep"
    ),
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", metavar="N,N,…", help="Requests at once; default: 1 to 100.")
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="N,N,…", help="Tokens of a prompt; default: 1K to 120K.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All pairs, instead of both axes through the smallest values.")
    ] = False,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens of every answer.")] = 256,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Requests that each concurrent user sends.")] = 3,
    limit_s: Annotated[float, typer.Option("--limit", help="Seconds after which a point is given up.")] = 3_600,
    generator: Annotated[
        Literal["guidellm", "aiperf"] | None, typer.Option("--generator", help="Default: the one that is installed.")
    ] = None,
    program: Annotated[
        Path | None, typer.Option("--program", metavar="FILE", help="Its console script, in any environment.")
    ] = None,
    overrides: Overrides = None,
    profiles: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server over concurrency and context; exit code 1 when requests failed.

    An existing load generator sends the requests, acceptance is read from the engine's own counters. Writes
    sweep.json (which `drafthouse roofline --sweep` reads), sweep.md and sweep.png. Run again, it goes on where it
    stood.

    [dim]Examples:[/dim]

      drafthouse serve sweep qwen3.6-27b-mtp-a6000x2 --out runs/sweep-mtp

      drafthouse serve sweep qwen3.6-27b-mtp-a6000x2 --concurrency 1,10,100 --context 1024,32768 --full

      drafthouse serve sweep qwen3.6-27b-mtp-a6000x2 --url http://192.0.2.20:30000 --generator aiperf --json
    """
    from drafthouse.serve.load import load_profile
    from drafthouse.serve.sweep import run_sweep
    from drafthouse.serve.sweep_generators import find_generator
    from drafthouse.serve.sweep_plan import Load, places, server
    from drafthouse.serve.sweep_plots import picture
    from drafthouse.serve.sweep_result import aligned

    profile = load_profile(name, overrides or [], profiles) if name is not None else None
    target = server(profile, url=url, model=model, tokenizer=tokenizer)
    load = Load(output_tokens=output_tokens, rounds=rounds, limit_s=limit_s)
    points = places(target, load, _numbers(concurrency), _numbers(context), full=full)
    found = find_generator(generator, program)
    progress = progress_of(as_json)
    sweep = run_sweep(target, load, points, found, out, progress)
    lines = [aligned(sweep.points)]
    if len(sweep.broken) < len(sweep.points):
        picture(out / "sweep.png", f"{target.model}, measured by {found.name}", sweep.points)
        lines.append(str(out / "sweep.png"))
    lines += [
        f"BROKEN {one.context} tokens, {one.concurrency} at once: {one.measured.failed} of {one.measured.asked}"
        f" requests failed ({one.measured.reason or 'without a reason'})"
        for one in sweep.broken
    ]
    say(sweep.as_dict(), as_json, "\n".join(lines))
    if sweep.broken:
        raise typer.Exit(1)


def _numbers(text: str | None) -> list[int] | None:
    from drafthouse.serve.sweep_plan import SweepError

    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SweepError(f"'{text}' is no list of whole numbers", where="sweep", fix="write 1,10,100") from None
