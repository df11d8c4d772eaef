"""Who may look: login with one shared token, sessions in memory, attempts that are counted.

Cookies are HttpOnly and SameSite=Strict; a form counts only with the token that its own page carried (double submit)
and from this origin. The token is never part of an address and is compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

from flask import Request

from drafthouse.dash.errors import DashError
from drafthouse.dash.settings import TOKEN, DashSettings

SESSION_COOKIE, FORM_COOKIE = "dash_session", "dash_form"
SHORTEST = 16
IDLE_S = 12 * 3600.0
_MOST_SESSIONS = 1000


def token_of(settings: DashSettings, environment: Mapping[str, str]) -> str | None:
    """The token that is asked for; None when only this machine can reach the page and none is set.

    Raises:
        DashError: others could reach the page and there is no token, or the token could be guessed.
    """
    token = environment.get(TOKEN) or None
    if token is None and settings.loopback and settings.url is None:
        return None
    where = settings.url or settings.host
    if token is None:
        raise DashError(
            "others can reach this address, so the page asks for a token, and none is set",
            where=where,
            fix=f"set {TOKEN} to at least {SHORTEST} random characters, or serve it at 127.0.0.1",
        )
    if len(token) < SHORTEST:
        raise DashError(f"{TOKEN} has fewer than {SHORTEST} characters", where=where, fix="choose a longer one")
    return token


class Attempts:
    """Failed attempts in the last minute, by address and in all.

    The same wrong token counts once, however often it comes: a scraper that still has the old one guesses nothing, and
    locks nobody out behind its address.
    """

    def __init__(
        self,
        *,
        each: int = 5,
        all_of_them: int = 200,
        window_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._each, self._all, self._window_s, self._clock = each, all_of_them, window_s, clock
        self._failed: deque[tuple[float, str, str]] = deque()
        self._lock = threading.Lock()

    def wait_s(self, address: str) -> float:
        """Seconds until `address` may try again; 0: now."""
        now = self._clock()
        with self._lock:
            while self._failed and self._failed[0][0] <= now - self._window_s:
                self._failed.popleft()
            own = [moment for moment, who, _ in self._failed if who == address]
            if len(own) >= self._each:
                return own[-self._each] + self._window_s - now
            if len(self._failed) >= self._all:
                return self._failed[0][0] + self._window_s - now
        return 0.0

    def failed(self, address: str, given: str) -> None:
        """Count the wrong token `given`."""
        what = _digest(given)
        with self._lock:
            if not any((who, seen) == (address, what) for _, who, seen in self._failed):
                self._failed.append((self._clock(), address, what))


class Sessions:
    """Who is logged in. Only digests are kept, and all are forgotten when the page ends."""

    def __init__(self, *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s, self._clock = idle_s, clock
        self._until: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self) -> str:
        """A new session's secret."""
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._until[_digest(secret)] = self._clock() + self._idle_s
            while len(self._until) > _MOST_SESSIONS:
                self._until.popitem(last=False)
        return secret

    def alive(self, secret: str | None) -> bool:
        """Whether the session goes on; being asked prolongs it."""
        if not secret:
            return False
        key, now = _digest(secret), self._clock()
        with self._lock:
            if self._until.get(key, 0.0) <= now:
                self._until.pop(key, None)
                return False
            self._until[key] = now + self._idle_s
        return True

    def end(self, secret: str | None) -> None:
        """Log out."""
        with self._lock:
            self._until.pop(_digest(secret or ""), None)


class Guard:
    """Decides over requests: may it look, is the token right, does the form come from our own page."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else _digest(token)
        self.attempts, self.sessions = Attempts(), Sessions()

    @property
    def asks(self) -> bool:
        """Whether a login is needed at all."""
        return self._token is not None

    def right(self, given: str) -> bool:
        """Whether `given` is the token. Digests are compared, so that neither length nor prefix shows in the time."""
        return self._token is not None and hmac.compare_digest(_digest(given), self._token)

    def admits(self, request: Request) -> bool:
        """Whether the request has a session, or the token as `Authorization: Bearer`."""
        if not self.asks or self.sessions.alive(request.cookies.get(SESSION_COOKIE)):
            return True
        given = bearer(request)
        if not given or self.attempts.wait_s(address(request)):
            return False
        if self.right(given):
            return True
        self.attempts.failed(address(request), given)
        return False


def bearer(request: Request) -> str:
    """The token that a request carries itself; empty when it carries none."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.casefold() == "bearer" else ""


def address(request: Request) -> str:
    """Whom an attempt is counted against."""
    return request.remote_addr or "?"


def own_form(request: Request) -> bool:
    """Whether a form was sent from our own page: same origin, and the page's token in cookie and form."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return False
    cookie, field = request.cookies.get(FORM_COOKIE, ""), request.form.get("form", "")
    return bool(cookie) and hmac.compare_digest(_digest(cookie), _digest(field))


def local_path(wanted: str | None) -> str:
    """A path of this page to go on to; anything that could lead elsewhere becomes the overview."""
    if not wanted or not wanted.startswith("/") or wanted[1:2] in ("/", "\\") or "\\" in wanted or "\n" in wanted:
        return "/"
    return wanted


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
