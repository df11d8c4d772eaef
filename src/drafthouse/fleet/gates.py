"""What a life must show before the old one is given up: progress, not an open port.

A server has answered its health check and hung on every request (sglang#22779); a process has run and waited for a
lease that it never got. So the proof is a shard committed, a step logged, a generation that is right.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from drafthouse.errors import FleetError
from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.errors import UnknownOutcomeError, UnreachableError
from drafthouse.fleet.runtime.protocol import Runtime, UnitStatus
from drafthouse.progress import Task
from drafthouse.serve.canary import canary_of
from drafthouse.serve.endpoint import Endpoint, ServerError
from drafthouse.serve.profile import Profile
from drafthouse.store import Board, Store
from drafthouse.store.translate import ObjectMissingError


class GateError(FleetError):
    """A life has not shown that it works; `where` is its node."""


class Gate(Protocol):
    """Asked again and again until it gives its evidence."""

    def evidence(self, unit: UnitStatus) -> str | None:
        """One line that says what was seen; None: nothing yet.

        Raises:
            GateError: it is certain that the life does not work.
        """


class ShardGate:
    """Extraction: a shard was committed by a worker of this life, or nothing is left to do.

    While others hold every shard that is left, a life has nothing to show: then it counts that it runs, for as long as
    a command has to. What they hold becomes free when they end.
    """

    def __init__(self, store: Store, run: str, worker_prefix: str, runs_s: float) -> None:
        self._board, self._prefix, self._running = Board(store, run), worker_prefix, RunningGate(runs_s)

    def evidence(self, unit: UnitStatus) -> str | None:
        done = self._board.all_done()
        own = [marker for marker in done if marker.worker.startswith(self._prefix)]
        if own:
            return f"committed shard {own[0].shard} ({own[0].tokens} tokens)"
        spec = self._board.spec()
        shards = None if spec is None else int(spec.get("shards", len(done) + 1))
        if shards is None:
            return None
        if len(done) >= shards:
            return f"the run is complete: all {shards} shards are committed"
        ran = self._running.evidence(unit)
        others = len(self._board.held())
        if ran is not None and len(done) + others >= shards:
            return f"{ran}; {len(done)} of {shards} shards are committed and others hold the rest"
        return None


class StepGate:
    """Training: a step was logged by this life, or the drafter is finished."""

    def __init__(self, store: Store, recipe: str, epoch: int) -> None:
        self._store, self._recipe, self._epoch = store, recipe, epoch

    def evidence(self, unit: UnitStatus) -> str | None:
        found = train_progress(self._store, self._recipe, self._epoch)
        if found is None:
            return None
        step, first = int(found.get("step", 0)), int(found.get("resumed_from") or 0)
        if found.get("finished"):
            return f"the drafter is finished: {step} steps"
        return f"step {step} after resuming from {first}, loss {found.get('loss', 0):.4g}" if step > first else None


def train_progress(store: Store, recipe: str, epoch: int) -> dict[str, float] | None:
    """What the trainer of a life has last said of itself; None before its first word, or when it could not be made out:
    it is said again every few seconds."""
    try:
        value = json.loads(store.get(f"drafters/{recipe}/progress/{epoch}"))
    except (ObjectMissingError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class CanaryGate:
    """Serving: the canary of the profile, through a tunnel to the node, as soon as the model answers at all."""

    def __init__(self, node: NodeConnection, port: int, profile: Profile) -> None:
        self._node, self._port, self._profile = node, port, profile

    def evidence(self, unit: UnitStatus) -> str | None:
        with self._tunnel() as port:
            url = f"http://127.0.0.1:{port}"
            try:
                with Endpoint(url, self._profile.canary) as endpoint:
                    endpoint.models()
            except ServerError:
                return None  # it still loads
            report = canary_of(self._profile, url)
        if not report.passed:
            failed = next(check for check in report.checks if not check.passed)
            raise GateError(f"the canary failed at '{failed.name}': {failed.sentence}", where=self._node.node.name)
        drafts = "" if report.acceptance_length is None else f", acceptance length {report.acceptance_length:.2f}"
        return f"canary passed: {report.right} of {report.asked} questions right{drafts}"

    def _tunnel(self) -> AbstractContextManager[int]:
        return self._node.forward(self._port)


@dataclass
class RunningGate:
    """Any command: it has run for `seconds` without ending, or has ended well."""

    seconds: float
    _since: float | None = None

    def evidence(self, unit: UnitStatus) -> str | None:
        if unit.state == "exited" and unit.exit == 0:
            return "it has ended with exit status 0"
        if unit.state != "running":
            self._since = None
            return None
        self._since = self._since or time.monotonic()
        ran = time.monotonic() - self._since
        return f"it has run for {ran:.0f} s" if ran >= self.seconds else None


def wait(
    gate: Gate, runtime: Runtime, node: NodeConnection, unit: str, *, timeout_s: float, poll_s: float, task: Task
) -> str:
    """The gate's evidence.

    Raises:
        GateError: the unit ended, the time is over, or the gate knows better; with the unit's last lines.
    """
    end = time.monotonic() + timeout_s
    status = UnitStatus(unit, "absent", runtime.name)
    while True:
        try:
            status = runtime.status(node, unit)
            found = gate.evidence(status)
            if found is not None:
                return found
            # Its work may have been finished before we looked: evidence first, then its end.
            if status.state in {"exited", "absent"}:
                raise _failed(runtime, node, unit, f"it ended with exit status {status.exit}")
            task.advance(0, f"{status.state}, {max(0.0, end - time.monotonic()):.0f} s left")
        except (UnreachableError, UnknownOutcomeError):
            task.advance(0, "no answer")  # a short outage is no failure; the time limit decides
        if time.monotonic() > end:
            raise _failed(runtime, node, unit, f"nothing was shown within {timeout_s:g} s ({status.state})")
        time.sleep(poll_s)


def _failed(runtime: Runtime, node: NodeConnection, unit: str, what: str) -> GateError:
    try:
        said = [line.strip() for line in runtime.logs(node, unit, lines=8)]
        last = list(dict.fromkeys(line for line in said if line))  # every restart ends with the same words
    except FleetError:
        last = []
    words = f"; its last words: {' | '.join(last[-4:])[-600:]}" if last else "; it has said nothing"
    return GateError(f"{unit}: {what}{words}", where=node.node.name)
