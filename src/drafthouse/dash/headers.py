"""What every answer carries: a strict content policy, and the refusal of foreign host names."""

from __future__ import annotations

import gzip
from urllib.parse import urlsplit

from flask import Flask, Request, Response, abort, request

from drafthouse.dash.settings import DashSettings

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # not no-referrer: it would turn the Origin of our own forms into "null"
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_SMALLEST_TO_COMPRESS = 2000


def guard_host(app: Flask, settings: DashSettings) -> None:
    """Refuse host names that are not ours while the page is open to everyone on this machine.

    A page of somebody else could otherwise let its name point to 127.0.0.1 and read ours (DNS rebinding). At another
    address the token stands before everything, and cookies belong to one name.
    """
    if not settings.loopback:
        return
    ours = {"localhost", "127.0.0.1", "[::1]", settings.host}
    if settings.url:
        ours.add(urlsplit(settings.url).netloc.rpartition("@")[2].partition(":")[0])

    @app.before_request
    def check() -> None:
        if _name(request) not in ours:
            abort(421, description="this host name is not served here; use the address that drafthouse dash printed")


def add_headers(app: Flask) -> None:
    """Set `HEADERS` on every answer, forbid caches to keep what may be private, compress what is large."""

    @app.after_request
    def add(response: Response) -> Response:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if request.endpoint != "static":
            # not no-cache: going back would show the page as it was when it was opened
            response.headers["Cache-Control"] = "no-store"
        # Pages with a form stay uncompressed: the length of an answer must tell nothing about a secret in it.
        if request.path.startswith(("/live/", "/api/", "/metrics")):
            _compress(response)
        return response


def _compress(response: Response) -> None:
    response.vary.add("Accept-Encoding")
    if response.status_code != 200 or not request.accept_encodings.quality("gzip") or response.content_encoding:
        return
    body = response.get_data()
    if len(body) < _SMALLEST_TO_COMPRESS:
        return
    response.set_data(gzip.compress(body, compresslevel=1, mtime=0))
    response.content_encoding = "gzip"


def _name(asked: Request) -> str:
    """Host name without its port; an IPv6 address keeps its brackets."""
    host = asked.headers.get("Host", "")
    end = host.find("]")
    return host[: end + 1] if host.startswith("[") and end > 0 else host.partition(":")[0].casefold()
