"""Serves the application until it is told to end."""

from __future__ import annotations

import errno
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from flask import Flask
from waitress.server import create_server

from drafthouse.dash.errors import DashError
from drafthouse.dash.settings import DashSettings

THREADS = 8
# It warns of every request that waits a moment for a thread, on the terminal of whoever started the page.
logging.getLogger("waitress.queue").setLevel(logging.ERROR)


class Server:
    """A bound waitress server; `address` is where it listens.

    Raises:
        DashError: the address cannot be listened on.
    """

    def __init__(self, app: Flask, settings: DashSettings) -> None:
        where = f"{settings.host}:{settings.port}"
        # Only a proxy on this machine is believed who its visitor is: failed logins are counted by that address.
        proxy: dict[str, Any] = (
            {"trusted_proxy": "127.0.0.1", "trusted_proxy_headers": {"x-forwarded-for"}}
            if settings.url and settings.loopback
            else {}
        )
        self._open: dict[int, Any] = {}
        self._closed = False
        try:
            self._server = create_server(
                app,
                map=self._open,
                host=settings.host,
                port=settings.port,
                threads=THREADS,
                ident=None,
                clear_untrusted_proxy_headers=True,
                **proxy,
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise DashError("the port is in use", where=where, fix="give another --port, or --port 0") from None
            reason = error.strerror or type(error).__name__
            raise DashError(f"cannot be listened on ({reason})", where=where, fix="correct --host or --port") from None
        except ValueError:  # waitress: the host name has no address
            raise DashError("the host name has no address", where=where, fix="correct --host") from None

    @property
    def address(self) -> str:
        """Its URL."""
        pairs = getattr(self._server, "effective_listen", None) or [
            (self._server.effective_host, self._server.effective_port)
        ]
        host, port = pairs[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def run(self) -> None:
        """Serve until `close`, SIGINT or SIGTERM."""
        try:
            self._server.run()
        except OSError:
            if not self._closed:
                raise  # a socket that `close` takes away in another thread is no fault

    def close(self) -> None:
        """Finish what is being answered, then stop listening and close every connection."""
        self._closed = True
        self._server.task_dispatcher.shutdown()
        self._server.close()
        for connection in list(self._open.values()):
            connection.close()


def run_until_told(server: Server, begun: Callable[[], None]) -> None:
    """Serve; SIGINT and SIGTERM end it as a normal end, `begun` is called once it can answer."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        begun()
        server.run()
    except SystemExit:
        pass  # told to end before, or while, it served
    finally:
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)
