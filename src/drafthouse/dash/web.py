"""The page as a Flask application: views, their live fragments, JSON, /metrics; read only but for login and logout."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import werkzeug.exceptions
from flask import Flask, Response, make_response, redirect, render_template, request, url_for
from werkzeug.wrappers import Response as AnyResponse

from drafthouse.dash import auth, headers, pages, words
from drafthouse.dash.gone import GoneError
from drafthouse.dash.model import Snapshot
from drafthouse.dash.prometheus import CONTENT_TYPE, exposition
from drafthouse.dash.settings import DashSettings
from drafthouse.dash.view_runs import shard

OPEN = {"static", "login", "enter", "health"}
# A snapshot is called old when so many looks were missed, but never before 15 s.
_MISSED_LOOKS = 5


def create_app(snapshot: Callable[[], Snapshot], settings: DashSettings, *, token: str | None = None) -> Flask:
    """The application.

    Args:
        snapshot: gives the newest snapshot at once.
        settings: address and pace.
        token: asked for at the door; None: everyone who reaches the page may look.
    """
    app = Flask(__name__, static_folder="static", template_folder="templates")
    app.jinja_env.autoescape = True  # Flask would leave names that end in .j2 alone
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters.update(words.FILTERS)
    app.jinja_env.globals["asset"] = _assets(Path(str(app.static_folder)))
    # a year: addresses of static files carry the file's digest
    app.config.update(SEND_FILE_MAX_AGE_DEFAULT=31_536_000, MAX_CONTENT_LENGTH=16_384)
    guard = auth.Guard(token)
    headers.guard_host(app, settings)
    headers.add_headers(app)
    _Site(app, snapshot, settings, guard).add_routes()
    return app


class _Site:
    """Routes over one source of snapshots."""

    def __init__(self, app: Flask, snapshot: Callable[[], Snapshot], settings: DashSettings, guard: auth.Guard) -> None:
        self._app, self._snapshot, self._settings, self._guard = app, snapshot, settings, guard
        self._boot = secrets.token_hex(4)
        self._old_after_s = max(15.0, _MISSED_LOOKS * settings.refresh_s)
        self._secure = bool(settings.url and settings.url.startswith("https:"))

    def add_routes(self) -> None:
        app = self._app
        app.before_request(self._admit)
        app.register_error_handler(werkzeug.exceptions.HTTPException, self._refuse)
        app.register_error_handler(GoneError, self._gone)
        for view in pages.VIEWS:
            live = f"/live/{view.name}"
            app.add_url_rule(view.path, view.name, partial(self._view, view, False))
            app.add_url_rule(live, f"live_{view.name}", partial(self._view, view, True))
            if view.detail:
                app.add_url_rule(f"{view.path}/<path:key>", f"{view.name}_detail", partial(self._view, view, False))
                app.add_url_rule(f"{live}/<path:key>", f"live_{view.name}_detail", partial(self._view, view, True))
        app.add_url_rule("/live/shard/<int:index>/<path:key>", "shard", self._shard)
        app.add_url_rule("/api/snapshot", "api", self._api)
        app.add_url_rule("/metrics", "metrics", self._metrics)
        app.add_url_rule("/healthz", "health", self._health)
        app.add_url_rule("/login", "login", self._login)
        app.add_url_rule("/login", "enter", self._enter, methods=["POST"])
        app.add_url_rule("/logout", "leave", self._leave, methods=["POST"])

    # looking

    def _view(self, view: pages.View, live: bool, key: str | None = None) -> AnyResponse:
        now = self._snapshot()
        tag = self._tag(now, view.name, key or "", request.query_string.decode(errors="replace"))
        if live and request.if_none_match.contains_weak(tag):
            return self._about(Response(status=304), now, tag)
        if key is None:
            values = view.build(now, request.args)
        else:
            assert view.detail is not None
            values = view.detail(now, key)
        address = f"/live/{view.name}" + (f"/{quote(key, safe='')}" if key is not None else "")
        values = {"title": view.title, **values}
        body = render_template(
            "live.html.j2" if live else "page.html.j2",
            **self._frame(now),
            **values,
            here=view.name,
            detail=key is not None,
            live_address=address,
            tag=tag,
            live=live,
        )
        return self._about(make_response(body), now, tag if live else None)

    def _shard(self, index: int, key: str) -> AnyResponse:
        return make_response(render_template("shard.html.j2", **shard(self._snapshot(), key, index)))

    def _api(self) -> AnyResponse:
        now = self._snapshot()
        tag = self._tag(now, "api", "", "")
        if request.if_none_match.contains_weak(tag):
            return self._about(Response(status=304), now, tag)
        return self._about(Response(now.model_dump_json(), mimetype="application/json"), now, tag)

    def _metrics(self) -> AnyResponse:
        return Response(exposition(self._snapshot()), content_type=CONTENT_TYPE)

    def _health(self) -> AnyResponse:
        """Whether the page itself lives: 503 when nothing was looked at for long."""
        late = self._age_s(self._snapshot()) > 4 * self._old_after_s
        return Response("late\n" if late else "ok\n", status=503 if late else 200, mimetype="text/plain")

    def _frame(self, now: Snapshot) -> dict[str, Any]:
        """What every page shows beside its view."""
        return {
            "snapshot": now,
            "views": pages.VIEWS,
            "marks": pages.marks(now),
            "refresh_s": self._settings.refresh_s,
            "old_after_s": self._old_after_s,
            "is_old": self._age_s(now) > self._old_after_s,
            "now": datetime.now(UTC),
            "looking": not now.settled,
            "logout": self._guard.asks,
            "form_token": request.cookies.get(auth.FORM_COOKIE, ""),
        }

    def _age_s(self, now: Snapshot) -> float:
        return (datetime.now(UTC) - now.at).total_seconds()

    def _tag(self, now: Snapshot, *parts: str) -> str:
        """Weak tag of a fragment: the snapshot's number, this process, and what was asked for."""
        return f"{self._boot}-{now.sequence}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"

    def _about(self, response: AnyResponse, now: Snapshot, tag: str | None) -> AnyResponse:
        if tag is not None:
            response.set_etag(tag, weak=True)
        response.headers["Dash-As-Of"] = f"{now.at.timestamp():.3f}"
        response.headers["Dash-Now"] = f"{datetime.now(UTC).timestamp():.3f}"
        return response

    # the door

    def _admit(self) -> AnyResponse | None:
        if request.endpoint in OPEN:
            return None
        wait = self._guard.attempts.wait_s(auth.address(request)) if auth.bearer(request) else 0.0
        if self._guard.admits(request):
            return None
        door = url_for("login", next=request.full_path.rstrip("?") if request.method == "GET" else "/")
        if wait:
            return self._later(Response("too many wrong tokens\n", 429, mimetype="text/plain"), wait)
        if request.path.startswith(("/live/", "/api/", "/metrics")):
            answer = Response("log in, or send the token as Authorization: Bearer\n", 401, mimetype="text/plain")
            answer.headers["WWW-Authenticate"] = 'Bearer realm="drafthouse"'
            if "HX-Request" in request.headers:
                answer.headers["HX-Refresh"] = "true"
            return answer
        return redirect(door, 303)

    def _login(self, problem: str | None = None, status: int = 200) -> AnyResponse:
        if not self._guard.asks:
            return redirect("/", 303)
        form = secrets.token_urlsafe(24)
        body = render_template(
            "login.html.j2", form_token=form, next=auth.local_path(request.values.get("next")), problem=problem
        )
        answer = make_response(body, status)
        self._cookie(answer, auth.FORM_COOKIE, form)
        return answer

    def _enter(self) -> AnyResponse:
        if not auth.own_form(request):
            return self._login("The form was too old or came from elsewhere. Please try again.", 403)
        who = auth.address(request)
        wait = self._guard.attempts.wait_s(who)
        if wait:
            return self._later(self._login(f"Too many attempts. Try again in {int(wait) + 1} s.", 429), wait)
        given = request.form.get("token", "")
        if not self._guard.right(given):
            self._guard.attempts.failed(who, given)
            return self._login("That is not the token.", 403)
        answer = redirect(auth.local_path(request.form.get("next")), 303)
        self._cookie(answer, auth.SESSION_COOKIE, self._guard.sessions.begin())
        return answer

    def _later(self, answer: AnyResponse, wait_s: float) -> AnyResponse:
        answer.headers["Retry-After"] = str(int(wait_s) + 1)
        return answer

    def _leave(self) -> AnyResponse:
        if not auth.own_form(request):
            raise werkzeug.exceptions.Forbidden("the form was too old or came from elsewhere")
        self._guard.sessions.end(request.cookies.get(auth.SESSION_COOKIE))
        answer = redirect("/login", 303)
        answer.delete_cookie(auth.SESSION_COOKIE, httponly=True, samesite="Strict", secure=self._secure)
        return answer

    def _cookie(self, answer: AnyResponse, name: str, value: str) -> None:
        answer.set_cookie(name, value, httponly=True, samesite="Strict", secure=self._secure)

    # what goes wrong

    def _refuse(self, error: werkzeug.exceptions.HTTPException) -> AnyResponse:
        if request.path.startswith(("/live/", "/api/", "/metrics", "/static/")) or error.code == 421:
            return Response(f"{error.description}\n", error.code, mimetype="text/plain")
        body = render_template("problem.html.j2", title=error.name, what=error.description, code=error.code)
        answer = make_response(body, error.code or 500)
        answer.headers.extend((name, value) for name, value in error.get_headers() if name == "Allow")
        return answer

    def _gone(self, error: GoneError) -> AnyResponse:
        if request.path.startswith("/live/"):
            return Response(f"{error}\n", 404, mimetype="text/plain")
        return make_response(render_template("problem.html.j2", title="Not there", what=f"{error}.", code=404), 404)


def _assets(folder: Path) -> Callable[[str], str]:
    """`asset("dash.css")`: the file's address with its digest, so that it can be kept for long."""
    digests: Mapping[str, str] = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in folder.iterdir() if path.is_file()
    }
    return lambda name: f"/static/{name}?v={digests[name]}"
