"""An HTTP server on a free loopback port, for the doubles that are one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    """Threads end with the process, and a client that hangs up is no news."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None


class JsonHandler(BaseHTTPRequestHandler):
    """Silent; is asked and answers in JSON."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return None

    def asked(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], double: Any = None) -> Iterator[str]:
    """Serve until the block ends; yields the address. Handlers find `double` as `self.server.double`."""
    server = QuietServer(("127.0.0.1", 0), handler)
    server.double = double  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
