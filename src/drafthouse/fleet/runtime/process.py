"""Units as processes of the node itself, for rented containers and machines without an engine.

Where systemd is pid 1 the supervisor is a transient unit (`systemd-run`), else it detaches itself; what it does is the
same in both cases, see `supervisor.py`. Nothing comes back by itself after a reboot of the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from drafthouse.fleet.runtime.on_node import ask, call, command, install
from drafthouse.fleet.runtime.protocol import Launch, Stopped, UnitStatus, parse_unit

if TYPE_CHECKING:
    from drafthouse.fleet.connection import Answer, NodeConnection


class Process:
    """The process runtime; `protocol.Runtime` says what the calls mean."""

    name = "process"

    def start(self, node: NodeConnection, launch: Launch) -> None:
        ask(node, "start", launch.unit, request=asdict(launch))

    def stop(self, node: NodeConnection, unit: str, grace_s: float) -> Stopped:
        ended = ask(node, "stop", unit, str(grace_s), timeout_s=grace_s + 30)
        return Stopped(unit, ended["how"], ended["seconds"])

    def status(self, node: NodeConnection, unit: str) -> UnitStatus:
        return self._status(ask(node, "status", unit, again=True))

    def units(self, node: NodeConnection) -> list[UnitStatus]:
        found = [self._status(value) for value in ask(node, "units", again=True)]
        return [status for status in found if parse_unit(status.unit)]

    def logs(self, node: NodeConnection, unit: str, *, lines: int | None = None, follow: bool = False) -> Iterator[str]:
        install(node)
        words = ["-1" if lines is None else str(lines), "follow" if follow else "once"]
        return node.stream(command(node, "logs", unit, *words))

    def exec(self, node: NodeConnection, unit: str, argv: Sequence[str], *, timeout_s: float = 60.0) -> Answer:
        return call(node, command(node, "exec", unit, *argv), None, timeout_s)

    def remove(self, node: NodeConnection, unit: str) -> None:
        ask(node, "remove", unit)

    def _status(self, value: dict[str, Any]) -> UnitStatus:
        return UnitStatus(runtime=self.name, **value)
