"""A real HAProxy in front of the nodes of a test fleet, with its admin socket on a TCP port."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.patience import until
from tests.ports import free_ports

CONFIG = """\
global
    stats socket ipv4@{address}:{admin} level admin
defaults
    mode http
    option redispatch
    timeout connect 5s
    timeout check 5s
    timeout client 60s
    timeout server 60s
frontend clients
    bind {address}:{port}
    default_backend models
backend models
    option httpchk GET /health
    default-server inter 300ms fastinter 200ms downinter 300ms rise 1 fall 2
{servers}
"""


@dataclass(frozen=True)
class HaProxy:
    """`url` is where clients go; `admin` is host:port of the runtime API."""

    url: str
    admin: str

    def ask(self, command: str) -> str:
        """One command to the runtime API, from this machine."""
        host, _, port = self.admin.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as link:
            link.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: link.recv(65536), b"")).decode()


@contextmanager
def haproxy(
    address: str, servers: Mapping[str, tuple[str, int]], folder: Path, *, check: bool = True
) -> Iterator[HaProxy]:
    """Serve `servers` (name → address, port) on `address`; all of them are out (MAINT) until somebody lets them in."""
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    admin, port = free_ports(2, address)
    word = " check" if check else ""
    lines = "\n".join(f"    server {name} {host}:{number}{word} disabled" for name, (host, number) in servers.items())
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.format(address=address, admin=admin, port=port, servers=lines))
    with (folder / "haproxy.log").open("w") as log:
        process = subprocess.Popen([program, "-db", "-f", str(config)], stdout=log, stderr=log)
    found = HaProxy(f"http://{address}:{port}", f"{address}:{admin}")
    try:
        log_file = folder / "haproxy.log"
        until(
            lambda: found.ask("show info"),
            "the proxy's admin socket",
            unless=lambda: process.poll() is not None and f"it has ended: {log_file.read_text()}",
        )
        yield found
    finally:
        process.kill()
        process.wait()
