"""What every runtime offers. A unit is one life of one job on one node: `drafthouse-<job>-e<epoch>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from drafthouse.fleet.connection import Answer, NodeConnection

FENCED = 76
"""Exit status of a worker whose job was moved elsewhere (`fleet.errors.FencedError`): never restarted. Launchers as
torchrun make another one of it, so the worker also leaves the file that its runtime names in DRAFTHOUSE_FENCED."""

State = Literal["running", "restarting", "exited", "absent"]

_UNIT = re.compile(r"drafthouse-(?P<job>[a-z0-9][a-z0-9-]{0,62})-e(?P<epoch>[1-9][0-9]{0,8})")


def unit_name(job: str, epoch: int) -> str:
    """Name of the unit of `job` in its life number `epoch` (counted from 1)."""
    return f"drafthouse-{job}-e{epoch}"


def parse_unit(name: str) -> tuple[str, int] | None:
    """Job and epoch of a unit's name; None when it is not one of ours."""
    match = _UNIT.fullmatch(name)
    return (match["job"], int(match["epoch"])) if match else None


@dataclass(frozen=True)
class Launch:
    """Everything that a runtime needs to start a unit; the same for all runtimes.

    Attributes:
        job, epoch: whose life it is.
        argv: what runs, words as they are (no shell).
        env: values that may be seen by anyone.
        secrets: values that go to the node in a file of mode 0600 and nowhere else: not into argv, logs, labels.
        files: small files (path relative to the job's folder -> content) written before the start, mode 0600.
        image: of a container, by digest; None: a process on the node itself.
        venv: folder of the virtual environment whose bin/ comes first in PATH; None: a container.
        gpus: number of GPUs, or indices/UUIDs of exactly these; 0: none.
        mounts: folder on the node -> path inside the container, ":ro" appended when read-only (containers only).
        grace_s: seconds between SIGTERM and SIGKILL.
        restart: after a failure, at most `retries` times ("on-failure"), whatever happens ("always"), or "never".
        retries: how often.
        workdir: folder in which it runs; None: the job's folder (which lives as long as the job: epochs share it).
        ports: TCP ports that it listens on (containers share the node's network).
        shm_gib: of a container; None: the node's own /dev/shm.
        labels: further labels or notes, for people.
    """

    job: str
    epoch: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    image: str | None = None
    venv: str | None = None
    gpus: int | tuple[str, ...] = 0
    mounts: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 60.0
    restart: Literal["never", "on-failure", "always"] = "on-failure"
    retries: int = 5
    workdir: str | None = None
    ports: tuple[int, ...] = ()
    shm_gib: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return unit_name(self.job, self.epoch)


@dataclass(frozen=True)
class UnitStatus:
    """What a node says about a unit. `exit` is its last exit status (128 + signal), `since` is when it entered its
    state, by the node's clock (for people, never for decisions)."""

    unit: str
    state: State
    runtime: str
    exit: int | None = None
    restarts: int = 0
    since: str | None = None
    image: str | None = None
    pid: int | None = None


@dataclass(frozen=True)
class Stopped:
    """How a unit ended: `how` is "absent" when there was nothing to stop."""

    unit: str
    how: Literal["absent", "term", "kill"]
    seconds: float


class Runtime(Protocol):
    """Start, stop and watch units on a node. Every call is idempotent and bounded in time."""

    name: str

    def start(self, node: NodeConnection, launch: Launch) -> None:
        """Start the unit and return when the node says that it runs. A unit of that name that runs already is left
        alone (a repeated deploy), one that has exited is replaced.

        Raises:
            CommandError: it cannot be started: the image or program is missing, a port is taken, a disk is full.
            UnknownOutcomeError: the connection broke: ask `status`.
        """

    def stop(self, node: NodeConnection, unit: str, grace_s: float) -> Stopped:
        """SIGTERM, `grace_s` seconds, then SIGKILL for every process of exactly this unit, and remove it from what
        would bring it back (restart policy, boot). Its logs stay until `remove`."""

    def status(self, node: NodeConnection, unit: str) -> UnitStatus: ...

    def units(self, node: NodeConnection) -> list[UnitStatus]:
        """All units of ours on the node, whatever their state."""

    def logs(
        self, node: NodeConnection, unit: str, *, lines: int | None = None, follow: bool = False
    ) -> Iterator[str]: ...

    def exec(self, node: NodeConnection, unit: str, argv: Sequence[str], *, timeout_s: float = 60.0) -> Answer:
        """Run a command where the unit runs: in its container, or in its environment and folder."""

    def remove(self, node: NodeConnection, unit: str) -> None:
        """Forget a stopped unit: container, logs, state. Never touches one that runs."""
