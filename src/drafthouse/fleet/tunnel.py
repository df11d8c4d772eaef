"""A port of a node on this machine's loopback, for as long as it is needed.

Fabric's tunnel ends for good when the node's port is closed once, as one that a server has yet to open is, and asks a
hundred times a second; so this one is our own.
"""

from __future__ import annotations

import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import paramiko


@contextmanager
def tunnel(transport: paramiko.Transport, port: int) -> Iterator[int]:
    """Port on 127.0.0.1 here that leads to `port` on 127.0.0.1 there. A connection for which nobody listens there is
    closed at once, as if it had been reset."""
    server = _Server(transport, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        server.end()
        thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, transport: paramiko.Transport, port: int) -> None:
        self.transport, self.port = transport, port
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def end(self) -> None:
        """End connections that are still open: their threads then end by themselves."""
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        try:
            channel = self.server.transport.open_channel(
                "direct-tcpip", ("127.0.0.1", self.server.port), self.client_address, timeout=10
            )
        except (paramiko.SSHException, OSError, EOFError):
            return
        try:
            with suppress(OSError):
                _pump(self.request, channel)
        finally:
            channel.close()


def _pump(here: socket.socket, there: paramiko.Channel) -> None:
    """Copy both ways until both sides have said all that they had to say."""
    outward = inward = True
    while outward or inward:
        watched: list[Any] = [*([here] if outward else []), *([there] if inward else [])]
        readable, _, _ = select.select(watched, [], [])
        if here in readable:
            data = here.recv(1 << 16)
            if data:
                there.sendall(data)
            else:
                outward = False
                there.shutdown_write()
        if there in readable:
            data = there.recv(1 << 16)
            if data:
                here.sendall(data)
            else:
                inward = False
                here.shutdown(socket.SHUT_WR)
                if there.closed:
                    return
