"""What a deployment or a migration will do, as a pure function of what is known: the same list is shown by
`--dry-run` and carried out.

The order by kind, and why:

    train     begin, stop old, FENCE, start, gate, retire    two trainers must never both write; a stop that is heard
                                                             ends with a checkpoint, which a fence would refuse
    command   the same: nothing is known about what it writes
    extract   begin, start, gate, FENCE, stop old, retire    leases make the overlap safe, so no time is lost
    serve     begin, start, gate, switch, drain, stop old, retire    clients never meet a closed door

On the node that the old life holds (an update in place) the old one is stopped first for every kind: GPUs and ports
cannot be held twice. An old node that cannot be reached blocks nothing: its life is fenced, and whatever still runs
there is ended by `gc` when the node is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from drafthouse.fleet.runtime.protocol import unit_name

Action = Literal["deploy", "migrate", "recover", "rollback"]
Do = Literal["provide", "begin", "fence", "stop", "start", "gate", "live", "switch", "drain", "end"]

EXCLUSIVE = ("train", "command")


@dataclass(frozen=True)
class Step:
    """One thing that is done. `epoch` is the life that it concerns."""

    do: Do
    node: str
    epoch: int
    text: str


@dataclass(frozen=True)
class Finding:
    """Something that speaks against a plan (severity "error": it is refused) or that must be known."""

    severity: Literal["error", "warning", "note"]
    text: str
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.text}; {self.fix}" if self.fix else self.text


@dataclass(frozen=True)
class Place:
    """The life that is replaced: where it is, under which epoch, and whether its node answers."""

    node: str
    epoch: int
    reachable: bool


@dataclass(frozen=True)
class Situation:
    """All that a plan depends on.

    Attributes:
        job, kind: what is moved.
        action: what the operator asked for.
        to: node where it will live.
        epoch: the number of the new life.
        old: the life that it replaces; None for a first one.
        image: of a container, by digest; None for a process.
        image_there: the node has that image.
        proxied: clients reach the job through the proxy.
        fenced: the job has a store, in which a fence can be read by its workers.
        findings: what the probe of the new node and the job file said.
    """

    job: str
    kind: str
    action: Action
    to: str
    epoch: int
    old: Place | None = None
    image: str | None = None
    image_there: bool = True
    proxied: bool = False
    fenced: bool = True
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The steps in their order, and what speaks against them."""

    job: str
    action: Action
    steps: tuple[Step, ...]
    findings: tuple[Finding, ...] = field(default=())

    @property
    def refused(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def lines(self) -> list[str]:
        """For people: numbered steps, then the findings."""
        lines = [f"{number:>2}. {step.text}" for number, step in enumerate(self.steps, 1)]
        return lines + [f"    {finding.severity}: {finding}" for finding in self.findings]


def plan(situation: Situation) -> Plan:
    """The way from the old life to the new one."""
    s = situation
    steps: list[Step] = []
    if s.image is not None and not s.image_there:
        steps.append(Step("provide", s.to, s.epoch, f"{s.to}: bring the image {_short(s.image)}"))
    steps.append(Step("begin", s.to, s.epoch, f"record life {s.epoch} of {s.job} on {s.to}"))
    start = [
        Step("start", s.to, s.epoch, f"{s.to}: start {unit_name(s.job, s.epoch)}"),
        Step("gate", s.to, s.epoch, f"{s.to}: wait until {_PROOF[s.kind]}"),
        Step("live", s.to, s.epoch, f"record that life {s.epoch} works"),
    ]
    if s.old is None:
        steps += [*_fence(s), *start, *_switch(s)]
    elif s.kind in EXCLUSIVE or s.old.node == s.to:
        steps += [*_drain(s, early=True), *_stop(s), *_fence(s), *start, *_switch(s), *_end(s)]
    elif s.kind == "serve":
        steps += [*start, *_switch(s), *_drain(s), *_stop(s), *_end(s)]
    else:
        steps += [*start, *_fence(s), *_stop(s), *_end(s)]
    return Plan(s.job, s.action, tuple(steps), (*s.findings, *_warnings(s)))


_PROOF = {
    "extract": "it has committed a shard",
    "train": "it has logged a step",
    "serve": "it has answered the canary",
    "command": "it has run for a while, or ended well",
}


def _fence(s: Situation) -> list[Step]:
    if not s.fenced or (s.old is None and s.epoch == 1):
        return []
    return [Step("fence", s.to, s.epoch, f"fence off every life of {s.job} before {s.epoch}")]


def _stop(s: Situation) -> list[Step]:
    assert s.old is not None
    unit = unit_name(s.job, s.old.epoch)
    if not s.old.reachable:
        return []  # said as a warning: nothing can be done there now
    return [Step("stop", s.old.node, s.old.epoch, f"{s.old.node}: stop {unit}")]


def _end(s: Situation) -> list[Step]:
    assert s.old is not None
    word = "lost" if s.action == "recover" else "retired"
    return [Step("end", s.old.node, s.old.epoch, f"record that life {s.old.epoch} on {s.old.node} is {word}")]


def _switch(s: Situation) -> list[Step]:
    return [Step("switch", s.to, s.epoch, f"proxy: send clients to {s.to}")] if s.proxied else []


def _drain(s: Situation, *, early: bool = False) -> list[Step]:
    if not s.proxied or s.old is None or (early and s.old.node != s.to):
        return []
    return [Step("drain", s.old.node, s.old.epoch, f"proxy: take {s.old.node} out and let its requests finish")]


def _warnings(s: Situation) -> list[Finding]:
    found = []
    if s.old is not None and not s.old.reachable:
        how = "it is fenced off" if s.fenced and s.kind != "serve" else "nothing tells it to stop"
        found.append(
            Finding(
                "warning",
                f"{s.old.node} cannot be reached: what runs there may go on ({how})",
                f"run `fab gc --node {s.old.node}` when it answers again",
            )
        )
    if s.kind == "serve" and not s.proxied and s.old is not None:
        found.append(
            Finding("warning", "no proxy is declared: clients must be told the new address", "add `proxy` to the job")
        )
    if s.kind == "serve" and s.old is not None and s.old.node == s.to:
        found.append(
            Finding("warning", f"{s.to} cannot hold both at once: clients wait while it starts", "or deploy elsewhere")
        )
    if s.kind == "command" and not s.fenced and s.old is not None:
        found.append(Finding("note", "the job has no store, so a life that cannot be reached cannot be fenced off"))
    return found


def _short(image: str) -> str:
    name, _, digest = image.rpartition("sha256:")
    return f"{name}sha256:{digest[:12]}"


@dataclass(frozen=True)
class WayBack:
    """What undoes a plan that failed half-way.

    Attributes:
        steps: take the new life away again.
        restart_old: the old life was stopped, so its job is started again there, as a life of its own.
    """

    steps: tuple[Step, ...]
    restart_old: bool


def way_back(situation: Situation, begun: Sequence[Do]) -> WayBack:
    """What to do after a failure, given the steps that were begun (the one that failed included).

    The old life was never given up before the new one had passed its gate, unless both could not be at once: then it
    is started again.
    """
    s, steps = situation, []
    if "switch" in begun:
        if s.old is not None and "stop" not in begun:
            steps.append(Step("switch", s.old.node, s.old.epoch, f"proxy: send clients to {s.old.node} again"))
        steps.append(Step("drain", s.to, s.epoch, f"proxy: take {s.to} out"))
    if "start" in begun:
        steps.append(Step("stop", s.to, s.epoch, f"{s.to}: stop {unit_name(s.job, s.epoch)}"))
    if "begin" in begun:
        steps.append(Step("end", s.to, s.epoch, f"record that life {s.epoch} on {s.to} failed"))
    stopped = s.old is not None and "stop" in begun and s.old.reachable
    return WayBack(tuple(steps), stopped)
