"""Operations and surveys for people: what a task prints when it does not print JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drafthouse.fleet.operations import Report
from drafthouse.fleet.survey import JobStatus, Rest, Survey

_STYLE = {
    "live": "green",
    "running": "green",
    "done": "green",
    "unchanged": "green",
    "starting": "yellow",
    "restarting": "yellow",
    "planned": "cyan",
    "failed": "red",
    "lost": "red",
}


def report(found: Report) -> RenderableType:
    """One operation: the plan (dry run) or every step with its time, then the outcome."""
    way = f"{found.source} → {found.to}" if found.source not in {None, found.to} else f"on {found.to}"
    head = Text.assemble((f"{found.action} {found.job}", "bold"), f" ({found.kind}) {way}: ", _word(found.outcome))
    if found.outcome == "planned":
        return Group(head, *(Text(f"  {line}") for line in found.plan))
    lines: list[RenderableType] = [head]
    lines += [Text(f"  {seconds:7.2f} s  {text}") for text, seconds in found.steps.items()]
    if found.evidence:
        lines.append(Text(f"  proof      {found.evidence}"))
    if found.redone:
        lines.append(Text("  redone     " + ", ".join(f"{count} {what}" for what, count in found.redone.items())))
    lines += [Text(f"  note       {note}", style="yellow") for note in found.notes]
    if found.error:
        lines.append(Text(f"  failed     {found.error}", style="red"))
    if found.steps:
        lines.append(Text(f"  {found.seconds:7.2f} s  in all"))
    return Group(*lines)


def survey(found: Survey) -> RenderableType:
    """Jobs with the life that counts, nodes with what runs there."""
    jobs = Table("job", "status", "node", "epoch", "unit", "since", "lives", "lock", title="jobs", title_justify="left")
    for job in found.jobs:
        jobs.add_row(*_row(job))
    sentences = [Text(f"  {job.name}: {sentence}", style="red") for job in found.jobs for sentence in job.unreadable]
    nodes = Table("node", "answers", "units", title="nodes", title_justify="left")
    for node in found.nodes:
        units = ", ".join(f"{unit.unit} [{_STYLE.get(unit.state, 'dim')}]{unit.state}[/]" for unit in node.units)
        if node.error is None:
            nodes.add_row(node.name, "[green]yes[/]", units or "[dim]none[/]")
        else:
            nodes.add_row(node.name, "[red]no[/]", f"[dim]{escape(node.error)}[/]")
    return Group(jobs, *sentences, nodes)


def tidying(plans: Sequence[Rest]) -> RenderableType:
    """What `gc` does, one line each."""
    if not plans:
        return Text("nothing is left over")
    return Group(*(Text(f"  {rest.do:<7} {rest.node}: {rest.unit} ({rest.text})") for rest in plans))


def audit(entries: Sequence[dict[str, object]]) -> RenderableType:
    """The audit log, newest last."""
    table = Table("when", "who", "action", "job", "outcome", "facts")
    for entry in entries:
        facts = {
            key: value
            for key, value in entry.items()
            if key not in {"when", "who", "action", "job", "outcome"} and value not in (None, "", [], {}, ())
        }
        text = ", ".join(f"{key} {value}" for key, value in facts.items())
        table.add_row(
            *(escape(str(entry.get(key, ""))) for key in ("when", "who", "action", "job", "outcome")), escape(text)
        )
    return table


def _row(job: JobStatus) -> tuple[str, ...]:
    current = job.current
    if job.unreadable:
        return (job.name, "[red]unknown[/]", "", "", "", "", str(len(job.lives)), escape(job.locked_by or ""))
    if current is None:
        last = job.lives[-1]
        return (job.name, f"[dim]{last.status}[/]", f"[dim]{last.life.node}[/]", "", "", "", str(len(job.lives)), "")
    unit = "[red]no answer[/]" if job.unit is None else f"[{_STYLE.get(job.unit.state, 'red')}]{job.unit.state}[/]"
    since = (current.live_since or current.begun).strftime("%d %b %H:%M")
    status = f"[{_STYLE.get(current.status, 'dim')}]{current.status}[/]"
    return (
        job.name,
        status,
        current.life.node,
        str(current.life.epoch),
        unit,
        since,
        str(len(job.lives)),
        escape(job.locked_by or ""),
    )


def _word(word: str) -> tuple[str, str]:
    return word, _STYLE.get(word, "")
