"""Carrying a plan out: one method a kind of step. Each may be repeated; what failed is taken back by `operations`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from drafthouse.errors import FleetError
from drafthouse.fleet.controller import Controller
from drafthouse.fleet.errors import UnreachableError
from drafthouse.fleet.gates import CanaryGate, Gate, RunningGate, ShardGate, StepGate, wait
from drafthouse.fleet.jobs import Job
from drafthouse.fleet.plan import Do, Situation, Step
from drafthouse.fleet.proxy import Proxy
from drafthouse.fleet.records import Life
from drafthouse.fleet.runtime.docker import Docker
from drafthouse.fleet.runtime.protocol import unit_name
from drafthouse.progress import Task


@dataclass
class Execution:
    """One plan being carried out.

    Attributes:
        begun: kinds of steps that were begun, in order.
        seconds: of every step that was begun, by its text.
        evidence: what the gate saw.
        notes: what did not go as planned and did not stop it.
    """

    controller: Controller
    job: Job
    situation: Situation
    old: Life | None
    task: Task
    begun: list[Do] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    evidence: str = ""
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    def perform(self, step: Step) -> None:
        """Do one step and time it."""
        self.begun.append(step.do)
        self.task.advance(0, step.text)
        began = time.monotonic()
        method: Callable[[Step], None] = getattr(self, f"_{step.do}")
        try:
            method(step)
        finally:
            self.seconds[step.text] = round(time.monotonic() - began, 2)
        self.task.advance(1)

    def _provide(self, step: Step) -> None:
        assert self.job.image is not None
        Docker().provide(self.controller.connect(step.node), self.job.image, progress=self.controller.progress)

    def _begin(self, step: Step) -> None:
        self.controller.records.begin(
            Life(
                job=self.job.name,
                epoch=step.epoch,
                node=step.node,
                kind=self.job.kind,
                runtime=self.job.runtime,
                image=self.job.image,
                digest=self.job.digest(),
                spec=self.job.model_dump(mode="json"),
                action=self.situation.action,
                replaces=self.situation.old.epoch if self.situation.old else None,
                who=self.controller.who,
                grace_s=self.job.stop_grace_s,
            )
        )

    def _fence(self, step: Step) -> None:
        fence = self.controller.fence_of(self.job)
        if fence is not None:
            fence.raise_to(step.epoch, {"who": self.controller.who, "action": self.situation.action, "to": step.node})

    def _stop(self, step: Step) -> None:
        # Never the reason that a job does not move: what cannot be stopped now is fenced off.
        own = step.epoch == self.situation.epoch
        grace = self.job.stop_grace_s if own or self.old is None else self.old.grace_s
        runtime = self.controller.runtime(self.job if own or self.old is None else self.old, step.node)
        try:
            stopped = runtime.stop(self.controller.connect(step.node), unit_name(self.job.name, step.epoch), grace)
        except UnreachableError as error:
            if step.node == self.situation.to:
                raise  # the new life would meet the old one on its own node
            self.notes.append(f"{unit_name(self.job.name, step.epoch)} could not be stopped ({error})")
            return
        if stopped.how == "kill":
            self.notes.append(f"{stopped.unit} did not end within {grace:g} s and was killed")

    def _start(self, step: Step) -> None:
        launch = self.controller.launch(self.job, step.epoch, step.node)
        self.controller.runtime(self.job, step.node).start(self.controller.connect(step.node), launch)

    def _gate(self, step: Step) -> None:
        settings = self.job.gate
        self.evidence = wait(
            self._gate_of(step),
            self.controller.runtime(self.job, step.node),
            self.controller.connect(step.node),
            unit_name(self.job.name, step.epoch),
            timeout_s=settings.timeout_s,
            poll_s=settings.poll_s,
            task=self.task,
        )

    def _live(self, step: Step) -> None:
        self.controller.records.mark_live(self.job.name, step.epoch, self.evidence)

    def _switch(self, step: Step) -> None:
        proxy, server = self._proxied(step.node)
        proxy.enable(server)

    def _drain(self, step: Step) -> None:
        proxy, server = self._proxied(step.node)
        grace = self.old.grace_s if self.old is not None else self.job.stop_grace_s
        if not proxy.drain(server, timeout_s=grace):
            self.notes.append(f"requests to {step.node} were still open after {grace:g} s")

    def _end(self, step: Step) -> None:
        records, name = self.controller.records, self.job.name
        if step.epoch == self.situation.epoch:
            records.end(name, step.epoch, "failed", self.failure)
        elif self.situation.action == "recover":
            records.end(name, step.epoch, "lost", f"{step.node} was given up; goes on on {self.situation.to}")
        else:
            records.end(name, step.epoch, "retired", f"replaced by life {self.situation.epoch} on {self.situation.to}")

    def _proxied(self, node: str) -> tuple[Proxy, str]:
        proxy = self.controller.proxy(self.job)
        assert proxy is not None
        assert self.job.proxy is not None
        return proxy, self.job.proxy.servers[node]

    def _gate_of(self, step: Step) -> Gate:
        job, store = self.job, self.controller.store_of(self.job)
        if job.kind == "serve":
            return CanaryGate(self.controller.connect(step.node), job.serving_port(), job.serving_profile())
        if job.kind == "command":
            return RunningGate(job.gate.runs_s)
        if store is None:
            raise FleetError("an extraction or training job needs a store", where=f"job {job.name}", fix="set `store`")
        if job.kind == "extract":
            return ShardGate(store, job.run, f"{step.node}-e{step.epoch}-", job.gate.runs_s)
        assert job.recipe is not None
        return StepGate(store, job.recipe, step.epoch)
