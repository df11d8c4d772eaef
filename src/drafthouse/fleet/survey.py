"""What is: the records of all jobs beside what the nodes say runs on them, and tidying up where the two differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drafthouse.errors import FleetError, StoreError
from drafthouse.fleet.controller import Controller
from drafthouse.fleet.node import Node
from drafthouse.fleet.parallel import each
from drafthouse.fleet.records import LifeState, current_of
from drafthouse.fleet.runtime.choose import runtimes_of
from drafthouse.fleet.runtime.protocol import UnitStatus, parse_unit


@dataclass(frozen=True)
class NodeStatus:
    """A node as it answers now; `error` says why it does not."""

    name: str
    units: tuple[UnitStatus, ...]
    error: str | None = None


@dataclass(frozen=True)
class JobStatus:
    """A job's lives, the one that counts, and what its node says of it (None: the node does not answer).

    `unreadable`: what of its records cannot be read, as sentences. Nobody knows then which life counts: it is None.
    """

    name: str
    lives: tuple[LifeState, ...]
    current: LifeState | None
    unit: UnitStatus | None
    locked_by: str | None
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """The fleet as it is recorded and as it answers."""

    nodes: tuple[NodeStatus, ...]
    jobs: tuple[JobStatus, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what `fab status --json` prints."""
        return {
            "nodes": {
                node.name: {"answers": node.error is None, "error": node.error, "units": [_unit(u) for u in node.units]}
                for node in self.nodes
            },
            "jobs": {job.name: _job(job) for job in self.jobs},
        }


def survey(controller: Controller, pattern: str | None = None) -> Survey:
    """Ask all nodes at once (or those that `pattern` names); what is recorded needs no node."""
    nodes = controller.inventory.nodes(pattern)
    answers = each(nodes, lambda node: _units(controller, node), controller.progress)
    asked = [
        NodeStatus(name, (), str(answer)) if isinstance(answer, FleetError) else NodeStatus(name, tuple(answer))
        for name, answer in answers.items()
    ]
    found = {(node.name, unit.unit): unit for node in asked for unit in node.units}
    reading = controller.records.read()
    by_job: dict[str, list[LifeState]] = {job: [] for job, _ in reading.unreadable}
    for state in reading.lives:
        by_job.setdefault(state.life.job, []).append(state)
    jobs = []
    for name, lives in sorted(by_job.items()):
        unreadable = [str(error) for (job, _), error in reading.unreadable.items() if job == name]
        current = None if unreadable else current_of(lives)
        unit = found.get((current.life.node, current.life.unit)) if current else None
        try:
            holder = controller.lock_holder(name)
        except StoreError as error:
            holder = None
            unreadable.append(str(error))
        who = holder.who if holder else None
        jobs.append(JobStatus(name, tuple(lives), current, unit, who, tuple(unreadable)))
    return Survey(tuple(asked), tuple(jobs))


@dataclass(frozen=True)
class Rest:
    """Something that is left over. `do`: "stop" a unit whose life is over, "remove" what has ended, "close" the record
    of a life that never began to work and that nobody is working on, or nothing ("leave") with the reason."""

    do: Literal["stop", "remove", "close", "leave"]
    node: str
    unit: str
    text: str


def rests(found: Survey, *, keep: int = 2) -> list[Rest]:
    """What `gc` would do about a survey; pure.

    Args:
        keep: ended units of each job and node that stay, newest first, so that their logs can still be read.
    """
    lives = {(state.life.node, state.life.unit): state for job in found.jobs for state in job.lives}
    current = {job.name: job.current for job in found.jobs}
    unknown = {job.name for job in found.jobs if job.unreadable}
    plans: list[Rest] = []
    for node in found.nodes:
        ended: dict[str, int] = {}
        for unit in sorted(node.units, key=lambda one: parse_unit(one.unit) or ("", 0), reverse=True):
            state = lives.get((node.name, unit.unit))
            if (parse_unit(unit.unit) or ("", 0))[0] in unknown:
                plans.append(Rest("leave", node.name, unit.unit, "a record of its job cannot be read"))
                continue
            alive = unit.state in {"running", "restarting"}
            if state is None:
                plans.append(Rest("leave", node.name, unit.unit, "no life of it is recorded in this fleet's store"))
            elif not state.open and alive:
                plans.append(Rest("stop", node.name, unit.unit, f"it runs although its life is {state.status}"))
            elif not alive and state != current[state.life.job]:
                ended[state.life.job] = ended.get(state.life.job, 0) + 1
                if ended[state.life.job] > keep:
                    plans.append(Rest("remove", node.name, unit.unit, f"its life is {state.status}"))
    answering = {node.name for node in found.nodes if node.error is None}
    for job in found.jobs:
        for state in () if job.unreadable else job.lives:
            idle = job.locked_by is None and state.life.node in answering
            if state.status == "starting" and idle and state.life.epoch < max(s.life.epoch for s in job.lives):
                text = "it never began to work, and a later life was begun"
                plans.append(Rest("close", state.life.node, state.life.unit, text))
    return plans


def tidy(controller: Controller, plans: Sequence[Rest]) -> list[str]:
    """Carry `rests` out; returns what failed, as sentences."""
    failures = []
    with controller.progress.task("tidy up", float(len(plans))) as task:
        for rest in plans:
            try:
                _tidy(controller, rest)
            except FleetError as error:
                failures.append(f"{rest.node}: {rest.unit}: {error}")
            task.advance(1, rest.unit)
    return failures


def _tidy(controller: Controller, rest: Rest) -> None:
    found = parse_unit(rest.unit)
    assert found is not None
    job, epoch = found
    if rest.do in {"stop", "remove"}:
        connection = controller.connect(rest.node)
        life = next(state.life for state in controller.records.lives(job) if state.life.epoch == epoch)
        runtime = controller.runtime(life, rest.node)
        if rest.do == "stop":
            runtime.stop(connection, rest.unit, life.grace_s)
        runtime.remove(connection, rest.unit)
    elif rest.do == "close":
        controller.records.end(job, epoch, "failed", rest.text)
    if rest.do != "leave":
        controller.note("gc", job, node=rest.node, epoch=epoch, did=rest.do, because=rest.text)


def _units(controller: Controller, node: Node) -> list[UnitStatus]:
    connection = controller.connect(node.name)
    return [unit for runtime in runtimes_of(node) for unit in runtime.units(connection)]


def _unit(unit: UnitStatus) -> dict[str, Any]:
    return {
        "unit": unit.unit,
        "state": unit.state,
        "exit": unit.exit,
        "restarts": unit.restarts,
        "since": unit.since,
        "runtime": unit.runtime,
    }


def _job(job: JobStatus) -> dict[str, Any]:
    return {
        "status": "unknown" if job.unreadable else job.current.status if job.current else "over",
        "node": job.current.life.node if job.current else None,
        "unit": None if job.unit is None else _unit(job.unit),
        "locked_by": job.locked_by,
        "unreadable": list(job.unreadable),
        "lives": [
            {
                "epoch": state.life.epoch,
                "node": state.life.node,
                "status": state.status,
                "action": state.life.action,
                "who": state.life.who,
                "begun": state.begun.isoformat(timespec="seconds"),
                "evidence": state.evidence,
                "reason": state.reason,
            }
            for state in job.lives
        ],
    }
