"""What an operator asks of the fleet: deploy, migrate, recover, roll back, stop, tidy up.

Each looks at the world first and makes a plan of it (`plan`), which is refused, shown or carried out; then it says
what happened, and appends it to the audit log, also when it failed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from drafthouse.errors import DrafthouseError, FleetError
from drafthouse.fleet.controller import Controller
from drafthouse.fleet.errors import UnreachableError
from drafthouse.fleet.execute import Execution
from drafthouse.fleet.gates import train_progress
from drafthouse.fleet.jobs import Job
from drafthouse.fleet.plan import Action, Finding, Place, Plan, Situation, plan, way_back
from drafthouse.fleet.probe.fit import misfits
from drafthouse.fleet.probe.peers import of_job
from drafthouse.fleet.probe.run import probe
from drafthouse.fleet.records import Life, LifeState, current_of, newest_before
from drafthouse.fleet.runtime.docker import Docker
from drafthouse.store import Board


@dataclass(frozen=True)
class Report:
    """What an operation did to one job.

    Attributes:
        job, kind, action: what was asked.
        source, to: nodes; source None for a first life.
        epoch: number of the new life; None when nothing was begun.
        outcome: "planned" (dry run), "unchanged", "done", or "failed" (and taken back).
        evidence: what the gate saw.
        seconds: wall time of the whole, and of every step by its text.
        redone: work that was done a second time, e.g. {"shards": 1} or {"steps": 12}.
        notes: what did not go as planned.
        plan: the steps in words.
        error: the sentence of a failure.
    """

    job: str
    kind: str
    action: str
    source: str | None
    to: str
    epoch: int | None
    outcome: str
    evidence: str
    seconds: float
    steps: dict[str, float]
    redone: dict[str, int]
    notes: tuple[str, ...]
    plan: tuple[str, ...]
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class RefusedError(FleetError):
    """The plan has findings that speak against it; nothing was touched."""


class OperationError(FleetError):
    """A plan failed half-way and was taken back; `report` says how far it came."""

    def __init__(self, report: Report, *, fix: str | None = None) -> None:
        self.report = report
        super().__init__(report.error or "it failed", where=f"{report.action} {report.job}", fix=fix)


def deploy(controller: Controller, name: str, *, node: str | None = None, dry_run: bool = False) -> Report:
    """Start a job, or put its changed file into effect where it lives; an unchanged one that runs is left alone.

    Raises:
        RefusedError: the node does not fit, or the job lives on another node (that is a migration).
        OperationError: the new life did not pass its gate; what was there before is there again.
    """
    job = controller.job(name)
    current = controller.records.current(name)
    to = node or (current.life.node if current else None) or job.node
    if to is None:
        raise RefusedError("no node is named", where=f"job {name}", fix="pass --node, or set `node` in the job file")
    if current is not None and current.life.node != to:
        raise RefusedError(
            f"'{name}' lives on {current.life.node}",
            where=f"deploy to {to}",
            fix=f"use `fab migrate --from {current.life.node} --to {to} --job {name}`",
        )
    if current is not None and current.live_since is not None and current.life.digest == job.digest():
        status = controller.runtime(current.life, to).status(controller.connect(to), current.life.unit)
        if status.state in {"running", "restarting"}:
            return _report(job, "deploy", to, current.life, "unchanged", evidence=current.evidence or "")
    return _carry(controller, job, "deploy", to, current, dry_run=dry_run)


def migrate(
    controller: Controller, source: str, to: str, *, job: str | None = None, dry_run: bool = False
) -> list[Report]:
    """Move every job that lives on `source` (or one) to `to`, one after another.

    Raises:
        RefusedError: nothing lives there, both are one node, or `to` does not fit.
        OperationError: a job did not pass its gate on the new node; jobs moved before it stay moved.
    """
    return _move(controller, "migrate", source, to, job, dry_run)


def recover(
    controller: Controller, source: str, to: str, *, job: str | None = None, force: bool = False, dry_run: bool = False
) -> list[Report]:
    """The node is gone: fence its lives off and start them elsewhere, without asking it anything.

    Raises:
        RefusedError: `source` answers (then `migrate` loses less), and `force` is not given; else as `migrate`.
    """
    if not force and _reachable(controller, source):
        raise RefusedError(
            f"{source} answers, so it is not gone",
            where=f"recover --from {source}",
            fix=f"use `fab migrate --from {source} --to {to}`, or --force when it must not be asked",
        )
    return _move(controller, "recover", source, to, job, dry_run)


def rollback(controller: Controller, name: str, *, dry_run: bool = False) -> Report:
    """Start the newest earlier life of a job that worked and was something else, where it was.

    Raises:
        RefusedError: there is none.
    """
    lives = controller.records.lives(name)
    current = current_of(lives)
    reference = current or (lives[-1] if lives else None)
    if reference is None:
        raise RefusedError(f"'{name}' has never lived", where="rollback", fix="use `fab deploy`")
    before = next(
        (
            state
            for state in newest_before(lives, reference.life.epoch)
            if (state.life.digest, state.life.node) != (reference.life.digest, reference.life.node)
        ),
        None,
    )
    if before is None:
        raise RefusedError(f"no earlier life of '{name}' worked and differed", where="rollback", fix="see `fab status`")
    job = controller.job_of(before.life)
    return _carry(controller, job, "rollback", before.life.node, current, dry_run=dry_run)


def stop(controller: Controller, name: str, *, dry_run: bool = False) -> Report:
    """End a job for good: its unit is stopped, its life recorded as stopped.

    Raises:
        RefusedError: it lives nowhere.
        UnreachableError: its node does not answer; nothing is recorded.
    """
    current = controller.records.current(name)
    if current is None:
        raise RefusedError(f"'{name}' lives nowhere", where="stop", fix="see `fab status`")
    life, job = current.life, controller.job_of(current.life)
    text = f"{life.node}: stop {life.unit}, at most {life.grace_s:g} s"
    if dry_run:
        return _report(job, "stop", life.node, life, "planned", plan_lines=(text,))
    began = time.monotonic()
    with controller.locked(name, "stop"):
        proxy = controller.proxy(job)
        if proxy is not None and job.proxy is not None and life.node in job.proxy.servers:
            proxy.drain(job.proxy.servers[life.node], timeout_s=life.grace_s)
        stopped = controller.runtime(life, life.node).stop(controller.connect(life.node), life.unit, life.grace_s)
        controller.records.end(name, life.epoch, "stopped", f"by {controller.who}")
        controller.note("stop", name, node=life.node, epoch=life.epoch, how=stopped.how)
    report = _report(job, "stop", life.node, life, "done", evidence=f"ended by {stopped.how}", plan_lines=(text,))
    return replace(report, seconds=_since(began))


def _move(controller: Controller, action: Action, source: str, to: str, job: str | None, dry_run: bool) -> list[Report]:
    controller.node(source)
    target = controller.node(to)
    if source == to:
        raise RefusedError("source and destination are one node", where=f"{action} --from {source}", fix="name two")
    if target.decommissioned:
        raise RefusedError(f"{to} is out of service", where=f"{action} --to {to}", fix="name another node")
    lives = controller.records.on_node(source, job)
    # A life that only ever started there while the job works elsewhere has nothing to move.
    lives = [state for state in lives if controller.records.current(state.life.job) == state]
    if not lives:
        what = "no job lives" if job is None else f"'{job}' does not live"
        raise RefusedError(f"{what} on {source}", where=f"{action} --from {source}", fix="see `fab status`")
    return [_carry(controller, controller.job_of(state.life), action, to, state, dry_run=dry_run) for state in lives]


def _carry(
    controller: Controller, job: Job, action: Action, to: str, current: LifeState | None, *, dry_run: bool
) -> Report:
    """Look, plan, refuse | show | carry out | take back. What is carried out was planned under the job's lock."""
    if dry_run:
        situation = _situation(controller, job, action, to, current)
        return _planned(controller, job, situation, current, plan(situation), dry_run=True)
    began = time.monotonic()
    with controller.locked(job.name, action):
        if controller.records.current(job.name) != current:
            raise RefusedError(
                "somebody else has changed this job meanwhile", where=f"{action} {job.name}", fix="see `fab status`"
            )
        situation = _situation(controller, job, action, to, current)
        steps = plan(situation)
        report = _planned(controller, job, situation, current, steps)
        with controller.progress.task(f"{action} {job.name}", float(len(steps.steps))) as task:
            execution = Execution(controller, job, situation, current.life if current else None, task)
            try:
                for step in steps.steps:
                    execution.perform(step)
            except BaseException as error:  # a defect of ours leaves no half-moved job behind either
                failed = replace(_taken_back(execution, error, report), seconds=_since(began))
                controller.note(action, job.name, **_audited(failed))
                if not isinstance(error, DrafthouseError | KeyboardInterrupt):
                    raise
                raise OperationError(failed, fix="see `fab logs` and `fab status`") from error
        report = replace(
            report,
            outcome="done",
            evidence=execution.evidence,
            seconds=_since(began),
            steps=execution.seconds,
            redone=_redone(controller, job, situation),
            notes=tuple(execution.notes),
        )
        controller.note(action, job.name, **_audited(report))
    return report


def _planned(
    controller: Controller,
    job: Job,
    situation: Situation,
    current: LifeState | None,
    steps: Plan,
    *,
    dry_run: bool = False,
) -> Report:
    if steps.refused:
        reasons = [str(finding) for finding in steps.refused]
        if not dry_run:
            controller.note(situation.action, job.name, to=situation.to, outcome="refused", reasons=reasons)
        raise RefusedError("; ".join(reasons), where=f"{situation.action} {job.name} to {situation.to}")
    old = current.life if current is not None else None
    return _report(job, situation.action, situation.to, old, "planned", epoch=situation.epoch, plan_lines=steps.lines())


def _situation(controller: Controller, job: Job, action: Action, to: str, current: LifeState | None) -> Situation:
    connection = controller.connect(to)
    findings = [
        Finding("error", f"{to}: {one.what}: {one.have} where {one.need} is needed", one.fix)
        for one in misfits(job, probe(connection), of_job(job, connection, controller.connect))
    ]
    image_there = job.image is None or Docker().present(connection, job.image)
    old = None
    if current is not None:
        asked = action != "recover" and (current.life.node == to or _reachable(controller, current.life.node))
        old = Place(current.life.node, current.life.epoch, asked)
    proxy = controller.proxy(job)
    if proxy is not None and job.proxy is not None:
        if to not in job.proxy.servers:
            findings.append(Finding("error", f"the proxy has no server for {to}", "add it to `proxy.servers`"))
        else:
            proxy.check([job.proxy.servers[to]])
    controller.launch(job, 1, to)  # secrets and files that are missing are told before anything is touched
    return Situation(
        job=job.name,
        kind=job.kind,
        action=action,
        to=to,
        epoch=controller.records.next_epoch(job.name),
        old=old,
        image=job.image,
        image_there=image_there,
        proxied=proxy is not None,
        fenced=job.store is not None and job.kind != "serve",
        findings=tuple(findings),
    )


def _reachable(controller: Controller, node: str) -> bool:
    try:
        controller.connect(node).run(["true"], timeout_s=15)
    except UnreachableError:
        return False
    return True


def _taken_back(execution: Execution, error: BaseException, planned: Report) -> Report:
    """Undo a plan that failed; what cannot be undone is said and does not hide the failure."""
    reason = "interrupted by the operator" if isinstance(error, KeyboardInterrupt) else str(error)
    back = way_back(execution.situation, execution.begun)
    execution.failure = reason
    for step in back.steps:
        try:
            execution.perform(step)
        except DrafthouseError as trouble:
            execution.notes.append(f"{step.text}: {trouble}")
    if back.restart_old and execution.old is not None:
        execution.notes.append(_restarted(execution.controller, execution.old))
    return replace(planned, outcome="failed", steps=execution.seconds, notes=tuple(execution.notes), error=reason)


def _restarted(controller: Controller, old: Life) -> str:
    """Start the old life's job again where it was: its fence has been passed, so it gets a number of its own."""
    job = controller.job_of(old)
    current = next(state for state in controller.records.lives(old.job) if state.life.epoch == old.epoch)
    situation = replace(
        _situation(controller, job, "rollback", old.node, current), findings=(), old=Place(old.node, old.epoch, True)
    )
    with controller.progress.task(f"rollback {old.job}", None) as task:
        execution = Execution(controller, job, situation, old, task)
        try:
            for step in plan(situation).steps:
                execution.perform(step)
        except DrafthouseError as error:
            return f"{old.job} could not be started again on {old.node}: {error}"
    return f"{old.job} was started again on {old.node} as life {situation.epoch}: {execution.evidence}"


def _redone(controller: Controller, job: Job, situation: Situation) -> dict[str, int]:
    """Work that the change of place cost, as far as it is known when the gate has been passed."""
    store = controller.store_of(job)
    if store is None or situation.old is None:
        return {}
    if job.kind == "extract":
        prefix = f"{situation.to}-e{situation.epoch}-"
        again = [one for one in Board(store, job.run).all_done() if one.epoch > 1 and one.worker.startswith(prefix)]
        return {"shards": len(again)}
    if job.kind == "train" and job.recipe is not None:
        before = train_progress(store, job.recipe, situation.old.epoch) or {}
        after = train_progress(store, job.recipe, situation.epoch) or {}
        return {"steps": max(0, int(before.get("step", 0)) - int(after.get("resumed_from") or 0))}
    return {}


def _report(
    job: Job,
    action: str,
    to: str,
    old: Life | None,
    outcome: str,
    *,
    epoch: int | None = None,
    evidence: str = "",
    plan_lines: Sequence[str] = (),
) -> Report:
    return Report(
        job=job.name,
        kind=job.kind,
        action=action,
        source=old.node if old else None,
        to=to,
        epoch=epoch if epoch is not None else (old.epoch if old else None),
        outcome=outcome,
        evidence=evidence,
        seconds=0.0,
        steps={},
        redone={},
        notes=(),
        plan=tuple(plan_lines),
    )


def _audited(report: Report) -> dict[str, Any]:
    keys = ("source", "to", "epoch", "outcome", "evidence", "seconds", "redone", "notes", "error")
    return {key: value for key, value in report.as_dict().items() if key in keys}


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def life_of(controller: Controller, name: str, epoch: int | None) -> Life:
    """The life that counts, or the one with that number; when all are over, the last.

    Raises:
        RefusedError: there is none.
    """
    lives = controller.records.lives(name)
    if epoch is not None:
        lives = [state for state in lives if state.life.epoch == epoch]
    if not lives:
        what = f"'{name}' has never lived" if epoch is None else f"'{name}' has no life {epoch}"
        raise RefusedError(what, where=controller.inventory.fleet_store, fix="see `fab status`")
    return (current_of(lives) or lives[-1]).life


def provide(controller: Controller, name: str, node: str | None, via: str | None) -> str:
    """Bring a job's image to a node; says what was done.

    Raises:
        RefusedError: the job is a process, or no node is named.
        CommandError: neither the registry nor the other machine gave it.
    """
    job = controller.job(name)
    to = node or job.node
    if job.image is None or to is None:
        what = "it runs without an image" if job.image is None else "no node is named"
        raise RefusedError(what, where=f"job {name}", fix="pass --node" if job.image else None)
    source = None if via is None else controller.connect(via)
    connection = controller.connect(to)
    if Docker().present(connection, job.image):
        return f"{to}: the image is there"
    Docker().provide(connection, job.image, via=source, progress=controller.progress)
    controller.note("pull-image", name, to=to, via=via, image=job.image)
    return f"{to}: the image was brought"


def audit_entries(controller: Controller, newest: int) -> list[dict[str, Any]]:
    """The newest entries of the audit log, oldest first."""
    entries = controller.journal.entries(newest=newest)
    return [{"when": entry.at.isoformat(timespec="seconds"), **entry.body} for entry in entries]
