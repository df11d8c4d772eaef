"""Test doubles around S3: a server with faults that real ones show rarely, and a proxy that loses answers."""

from __future__ import annotations

import hashlib
import random
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.doubles.loopback import serving


@dataclass
class Faults:
    """What goes wrong. The counters say how many of the next PUTs are hit."""

    ignore_conditions: bool = False
    """If-None-Match is not looked at: every PUT overwrites."""
    lose_answers: int = 0
    """The object is stored and the connection closed without an answer."""
    conflicts: int = 0
    """409 ConditionalRequestConflict, and nothing is stored."""
    fail_puts: int = 0
    """500 InternalError, and nothing is stored."""
    short_reads: bool = False
    """Ranges end one byte early."""
    lose_completions: int = 0
    """A multipart upload is completed, its id forgotten, and the connection closed without an answer."""
    puts: int = 0
    """PUT requests seen so far."""


@dataclass
class S3Double:
    """The running double: `endpoint` for a store URL, `objects` by ``bucket/key``, and its `faults`."""

    endpoint: str
    faults: Faults = field(default_factory=Faults)
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def s3_double() -> Iterator[S3Double]:
    """Serve on a free loopback port until the block ends."""
    double = S3Double("")
    with serving(_Handler, double) as double.endpoint:
        yield double


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def double(self) -> S3Double:
        return self.server.double  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None:
        return None

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        double, faults, name = self.double, self.double.faults, self._name()
        with double.lock:
            faults.puts += 1
            query = self._query()
            if "uploadId" in query:
                double.uploads[query["uploadId"]][int(query["partNumber"])] = body
                return self._answer(200, b"", {"ETag": _etag(body)})
            if faults.conflicts:
                faults.conflicts -= 1
                return self._error(409, "ConditionalRequestConflict")
            if faults.fail_puts:
                faults.fail_puts -= 1
                return self._error(500, "InternalError")
            conditional = self.headers.get("If-None-Match") == "*" and not faults.ignore_conditions
            if conditional and name in double.objects:
                return self._error(412, "PreconditionFailed")
            double.objects[name] = body
            if faults.lose_answers:
                faults.lose_answers -= 1
                self.close_connection = True
                return None
        return self._answer(200, b"", {"ETag": _etag(body)})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        double, query = self.double, self._query()
        with double.lock:
            if "uploads" in query:
                identity = f"upload-{len(double.uploads)}"
                double.uploads[identity] = {}
                answer = (
                    f"<InitiateMultipartUploadResult><UploadId>{identity}</UploadId></InitiateMultipartUploadResult>"
                )
                return self._answer(200, answer.encode(), {})
            parts = double.uploads.get(query["uploadId"])
            if not parts:
                return self._error(404, "NoSuchUpload")
            double.objects[self._name()] = b"".join(parts[number] for number in sorted(parts))
            double.uploads[query["uploadId"]] = {}
            if double.faults.lose_completions:
                double.faults.lose_completions -= 1
                self.close_connection = True
                return None
        answer = f"<CompleteMultipartUploadResult><ETag>{_etag(b'')}</ETag></CompleteMultipartUploadResult>"
        return self._answer(200, answer.encode(), {})

    def do_GET(self) -> None:
        query = self._query()
        if "list-type" in query:
            return self._list(query.get("prefix", ""))
        body = self.double.objects.get(self._name())
        if body is None:
            return self._error(404, "NoSuchKey")
        headers = {"ETag": _etag(body), "Last-Modified": _now()}
        asked = self.headers.get("Range")
        if asked is None:
            return self._answer(200, body, headers)
        first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        part = body[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(body)}"
        return self._answer(206, part[:-1] if self.double.faults.short_reads else part, headers)

    def do_HEAD(self) -> None:
        body = self.double.objects.get(self._name())
        headers = {"ETag": _etag(body or b""), "Last-Modified": _now()}
        self._answer(404 if body is None else 200, body or b"", headers, send_body=False)

    def do_DELETE(self) -> None:
        self.double.objects.pop(self._name(), None)
        self._answer(204, b"", {})

    def _list(self, prefix: str) -> None:
        bucket = self._name().strip("/")
        entries = ""
        for name, body in sorted(self.double.objects.items()):
            key = name.removeprefix(f"{bucket}/")
            if name.startswith(f"{bucket}/") and key.startswith(prefix):
                when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                entries += (
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                    f"<ETag>{_etag(body)}</ETag><Size>{len(body)}</Size></Contents>"
                )
        answer = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        self._answer(200, answer.encode(), {})

    def _query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(), {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], *, send_body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if send_body:
            self.wfile.write(body)


@dataclass
class Losses:
    """The running proxy: its own `endpoint`, and how many answers it has passed on and lost."""

    endpoint: str
    server: tuple[str, int]
    probability: float
    dice: random.Random
    passed: int = 0
    lost: int = 0
    open: set[socket.socket] = field(default_factory=set, repr=False)


@contextmanager
def losing_proxy(endpoint: str, probability: float, seed: int = 0) -> Iterator[Losses]:
    """Stand before a real server and lose some of its answers: the connection closes when an answer begins.

    By then the server has done what it was asked, and its client cannot know. Bytes are passed on as they are, so
    that signatures (which cover the Host header as the client wrote it) stay valid.
    """
    host, _, port = endpoint.removeprefix("http://").partition(":")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Relay) as proxy:
        proxy.daemon_threads = True
        address = f"http://127.0.0.1:{proxy.server_address[1]}"
        losses = Losses(address, (host, int(port)), probability, random.Random(seed))
        proxy.losses = losses  # type: ignore[attr-defined]
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield losses
        finally:
            proxy.shutdown()
            thread.join()
            for each in list(losses.open):
                _end(each)


class _Relay(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        losses: Losses = self.server.losses  # type: ignore[attr-defined]
        client: socket.socket = self.request
        asked = threading.Event()

        def questions() -> None:
            with suppress(OSError):
                while data := client.recv(2**16):
                    asked.set()
                    server.sendall(data)
            _end(server)

        with socket.create_connection(losses.server) as server:
            losses.open |= {client, server}
            thread = threading.Thread(target=questions, daemon=True)
            thread.start()
            with suppress(OSError):
                while data := server.recv(2**16):
                    if asked.is_set() and losses.dice.random() < losses.probability:
                        losses.lost += 1
                        break
                    losses.passed += asked.is_set()
                    asked.clear()
                    client.sendall(data)
            _end(client)
            thread.join()
            losses.open -= {client, server}


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _now() -> str:
    return format_datetime(datetime.now(UTC), usegmt=True)
