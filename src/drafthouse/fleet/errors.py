"""What can be wrong with a node. The class says what the caller may conclude, above all: unreachable is not dead."""

from __future__ import annotations

from drafthouse.errors import FleetError
from drafthouse.store.fence import FencedError

__all__ = [
    "AccessError",
    "CommandError",
    "FencedError",
    "HostKeyError",
    "UnknownOutcomeError",
    "UnreachableError",
]


class UnreachableError(FleetError):
    """No answer in time. Nothing is known about what runs there."""


class HostKeyError(FleetError):
    """The node's host key is unknown or has changed: whoever answers may be somebody else."""


class AccessError(FleetError):
    """The node answered and refused our key, or its account may not do what was asked."""


class CommandError(FleetError):
    """A command on a node failed, and said so with an exit status.

    Args:
        exit: the exit status.
        stderr: its last lines.
    """

    def __init__(self, what: str, *, exit: int, stderr: str = "", where: str | None = None, fix: str | None = None):
        self.exit, self.stderr = exit, stderr
        super().__init__(what, where=where, fix=fix)


class UnknownOutcomeError(FleetError):
    """The connection broke while a command ran: it may have happened or not. Look before trying again."""
