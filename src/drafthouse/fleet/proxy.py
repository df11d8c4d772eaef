"""The switch between two lives of a served model: HAProxy, told over its runtime API.

https://www.haproxy.com/documentation/haproxy-runtime-api/ (checked with 2.6). The proxy itself is configured by whoever
runs it; here only the administrative state of servers that stand in its configuration changes. `server-state-file` and
`load-server-state-from-file` let that state survive a reload.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from drafthouse.errors import FleetError

State = Literal["ready", "drain", "maint"]


class Ask(Protocol):
    """Sends one command to the admin socket and gives what was answered."""

    def __call__(self, command: str) -> str: ...


@dataclass(frozen=True)
class Server:
    """One line of a backend: `state` as HAProxy tells it (UP, DRAIN, MAINT, no check, ...), open sessions included."""

    name: str
    state: str
    address: str
    sessions: int


class Proxy:
    """One backend of a HAProxy.

    Args:
        ask: reaches the admin socket.
        backend: its name in the configuration.
        where: for messages.
    """

    def __init__(self, ask: Ask, backend: str, where: str) -> None:
        self._ask, self.backend, self._where = ask, backend, where

    def servers(self) -> dict[str, Server]:
        """The servers of the backend.

        Raises:
            FleetError: there is no such backend, or what answers is no HAProxy.
        """
        text = self._ask("show stat").lstrip("# ")
        rows = [row for row in csv.DictReader(io.StringIO(text)) if row.get("pxname") == self.backend]
        if not rows:
            raise FleetError(
                f"the proxy has no backend '{self.backend}'", where=self._where, fix="correct `proxy.backend`"
            )
        return {
            row["svname"]: Server(row["svname"], row["status"], row.get("addr") or "", int(row["scur"] or 0))
            for row in rows
            if row["svname"] not in {"FRONTEND", "BACKEND"}
        }

    def check(self, names: list[str]) -> None:
        """Raise FleetError unless the backend has all these servers: asked before anything is started."""
        missing = sorted(set(names) - self.servers().keys())
        if missing:
            raise FleetError(
                f"the backend '{self.backend}' has no server '{missing[0]}'",
                where=self._where,
                fix="add it to the proxy's configuration, or correct `proxy.servers`",
            )

    def set(self, server: str, state: State) -> None:
        """Change the administrative state of a server.

        Raises:
            FleetError: the proxy refuses; its words are in the message.
        """
        answer = self._ask(f"set server {self.backend}/{server} state {state}").strip()
        if answer:
            raise self._says(answer)

    def enable(self, server: str, *, timeout_s: float = 30.0) -> None:
        """Let clients reach a server, and wait until the proxy counts it as up.

        Raises:
            FleetError: its health check does not succeed in time.
        """
        # Out of maintenance HAProxy counts a server as up until a check fails, and clients would meet a closed door in
        # between: in the same breath it is called down, and has to earn it. Without a check it could never do that.
        name = f"{self.backend}/{server}"
        earn = f"; set server {name} health down" if self._checked(server) else ""
        answer = self._ask(f"set server {name} state ready{earn}").strip()
        if answer:
            raise self._says(answer)
        self._await(server, timeout_s, lambda found: found.state.startswith(("UP", "no check")), "up")

    def drain(self, server: str, *, timeout_s: float) -> bool:
        """No new requests for a server; wait for the open ones, then take it out. False: some were still open."""
        self.set(server, "drain")
        try:
            self._await(server, timeout_s, lambda found: found.sessions == 0, "drained")
        except FleetError:
            return False
        finally:
            self.set(server, "maint")
        return True

    def _checked(self, server: str) -> bool:
        """Whether the configuration lets HAProxy check the server (bit 2 of `srv_check_state`)."""
        lines = [line.split(" ") for line in self._ask(f"show servers state {self.backend}").splitlines()]
        names = next((line[1:] for line in lines if line[:2] == ["#", "be_id"]), [])
        rows = [dict(zip(names, line, strict=False)) for line in lines if line[0].isdigit()]
        return any(row["srv_name"] == server and int(row["srv_check_state"]) & 2 for row in rows if "srv_name" in row)

    def _says(self, answer: str) -> FleetError:
        return FleetError(f"the proxy says: {answer}", where=self._where, fix="see its configuration")

    def _await(self, server: str, timeout_s: float, done: Callable[[Server], bool], word: str) -> None:
        end = time.monotonic() + timeout_s
        while not done(found := self.servers()[server]):
            if time.monotonic() > end:
                raise FleetError(
                    f"'{server}' is not {word} after {timeout_s:g} s: {found.state}, {found.sessions} sessions",
                    where=self._where,
                )
            time.sleep(0.2)
