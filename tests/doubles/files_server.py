"""Test double of a file server that misbehaves on order: breaks off, stalls, lies, ignores ranges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.doubles.loopback import serving


@dataclass
class Behaviour:
    """What the server does, and what it was asked.

    Attributes:
        break_after: bytes of a body after which the connection is cut; None: never.
        breaks: how many bodies are cut.
        stall_s: seconds of silence before the cut, instead of the cut, while `breaks` lasts.
        ranges: honours Range headers.
        status: answers every request with this status.
        requests: (path, first byte asked for, Authorization header) of each request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    break_after: int | None = None
    breaks: int = 0
    stall_s: float = 0.0
    ranges: bool = True
    status: int = 200
    requests: list[tuple[str, int, str]] = field(default_factory=list)


@contextmanager
def files_server(behaviour: Behaviour) -> Iterator[str]:
    """Serve `behaviour.files` on loopback; yields the base address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            asked = self.headers.get("Range", "")
            first = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            behaviour.requests.append((self.path, first, self.headers.get("Authorization", "")))
            body = behaviour.files.get(self.path.lstrip("/"))
            if behaviour.status != 200 or body is None:
                self.send_error(behaviour.status if behaviour.status != 200 else 404)
                return
            ranged = bool(first) and behaviour.ranges
            rest = body[first:] if ranged else body
            self.send_response(206 if ranged else 200)
            if ranged:
                self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            if behaviour.break_after is not None and behaviour.breaks > 0:
                behaviour.breaks -= 1
                self.wfile.write(rest[: behaviour.break_after])
                self.wfile.flush()
                time.sleep(behaviour.stall_s)
                self.close_connection = True
                return
            self.wfile.write(rest)

    with serving(Handler) as address:
        yield address
