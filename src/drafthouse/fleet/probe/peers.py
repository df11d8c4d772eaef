"""Whether nodes reach each other: a listener there, a connection from here, and back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from drafthouse.errors import FleetError

if TYPE_CHECKING:
    from drafthouse.fleet.connection import NodeConnection
    from drafthouse.fleet.jobs import Job

CONNECT_S = 5
ANSWER_S = 30
"""That it is our listener which answers takes it a turn on a processor, and a machine that works hard has few to give;
that the connection arrives is the kernel's doing alone."""
LISTEN_S = 120
"""Longer than all that is done while it is needed."""
# Ends by itself: should the connection break, nothing stays behind.
LISTEN = """
import errno, socket, sys, time
port, token, seconds = int(sys.argv[1]), sys.argv[2].encode(), float(sys.argv[3])
try:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
except OSError as error:
    print("taken" if error.errno == errno.EADDRINUSE else f"error {error.strerror}", flush=True)
    sys.exit()
print("listening", flush=True)
end = time.monotonic() + seconds
while time.monotonic() < end:
    server.settimeout(max(end - time.monotonic(), 0.01))
    try:
        with server.accept()[0] as caller:
            caller.sendall(token)
    except OSError:
        pass
"""
CONNECT = """
import json, socket, sys
host, port, connect_s, answer_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
connected, said, error = False, b"", ""
try:
    with socket.create_connection((host, port), connect_s) as connection:
        connected = True
        if answer_s:
            connection.settimeout(answer_s)
            while len(said) < 64:
                more = connection.recv(64)
                if not more:
                    break
                said += more
except OSError as raised:
    error = raised.strerror or str(raised)
print(json.dumps({"said": said.decode("latin-1"), "connected": connected, "error": error}))
"""


@dataclass(frozen=True)
class Reach:
    """Whether a connection from `source` arrives at `port` of `target`; `reason` says why it does not."""

    source: str
    target: str
    port: int
    arrives: bool
    reason: str = ""


def reach(source: NodeConnection, target: NodeConnection, port: int) -> Reach:
    """Try a connection. Where the port is taken already (the peer works), who has it is reached.

    Raises:
        UnreachableError, HostKeyError, AccessError: one of them cannot be asked.
    """
    token = secrets.token_hex(8)
    words = ["python3", "-c", LISTEN, str(port), token, str(LISTEN_S)]
    # The iterator's end is the listener's.
    with closing(cast("Generator[str]", target.stream(words))) as lines:
        said = next(lines, "error it does not start")
        if said.startswith("error"):
            return Reach(source.node.name, target.node.name, port, False, f"cannot listen: {said[len('error ') :]}")
        answer_s = 0 if said == "taken" else ANSWER_S  # nobody knows what the peer would say
        answer = source.script(CONNECT, [target.node.host, str(port), str(CONNECT_S), str(answer_s)])
    found = json.loads(answer.stdout)
    arrives = found["connected"] if said == "taken" else found["said"] == token
    reason = "something else answers there" if found["connected"] else found["error"]
    return Reach(source.node.name, target.node.name, port, arrives, "" if arrives else reason)


def both_ways(one: NodeConnection, other: NodeConnection, port: int) -> tuple[Reach, Reach]:
    """`reach` from each of two nodes to the other."""
    return reach(one, other, port), reach(other, one, port)


def of_job(job: Job, node: NodeConnection, connect: Callable[[str], NodeConnection]) -> list[Reach]:
    """Both ways between a node and the peers that a job needs (`needs.peers`).

    Args:
        connect: gives the connection to a node by its name.
    """
    found: list[Reach] = []
    for name, port in job.needs.peers.items():
        if name == node.node.name:
            continue
        try:
            found += both_ways(node, connect(name), port)
        except FleetError as error:
            found.append(Reach(node.node.name, name, port, False, f"{name} cannot be asked: {error}"))
    return found
