"""Ports for servers that a test starts.

A port that the kernel chose (bind to 0, close) lies among those it gives to every outgoing connection and to the
servers of tests that run beside: it can be taken again before the server has it. These lie below that range, and no two
processes are given the same one.
"""

from __future__ import annotations

import fcntl
import getpass
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

FIRST = 15_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, address: str = "127.0.0.1") -> range:
    """Numbers in a row on which nobody listens; each is given out once in a round of all."""
    end = int(_RANGE.read_text().split()[0])
    with (Path(tempfile.gettempdir()) / f"drafthouse-test-ports-{getpass.getuser()}").open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        first = int(counter.read() or FIRST)
        for _ in range(end - FIRST):
            first = first if first + count <= end else FIRST
            found = range(first, first + count)
            if all(_free(address, port) for port in found):
                counter.truncate(0)
                counter.write(str(found.stop))
                return found
            first += 1
    raise RuntimeError(f"{address} has no {count} free ports in a row from {FIRST} to {end - 1}")


def free_port(address: str = "127.0.0.1") -> int:
    return free_ports(1, address)[0]


def _free(address: str, port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        # As servers do: what an ended connection left behind (TIME_WAIT) is no hindrance, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return True
    return False
