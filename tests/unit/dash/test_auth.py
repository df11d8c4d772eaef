"""Who may look: tokens, sessions, attempts, forms."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from flask.testing import FlaskClient

from drafthouse.dash.auth import Attempts, Sessions, local_path, token_of
from drafthouse.dash.errors import DashError
from drafthouse.dash.serve import Server
from drafthouse.dash.settings import TOKEN, DashSettings
from drafthouse.dash.web import create_app
from tests.doubles import dash_sample

SECRET = "correct horse battery"
OUTSIDE = DashSettings(stores=("x",), host="0.0.0.0")


@pytest.fixture
def door() -> FlaskClient:
    return create_app(dash_sample.sample, OUTSIDE, token=SECRET).test_client()


def log_in(door: FlaskClient, token: str = SECRET, wanted: str = "/fleet", **more: object) -> object:
    form = re.search(r'name="form" value="([^"]+)"', door.get("/login").text)
    assert form is not None
    return door.post("/login", data={"form": form[1], "token": token, "next": wanted}, **more)  # type: ignore[arg-type]


def test_without_a_token_others_cannot_be_served() -> None:
    with pytest.raises(DashError, match=rf"0\.0\.0\.0: .*set {TOKEN} to at least 16"):
        token_of(OUTSIDE, {})
    with pytest.raises(DashError, match="fewer than 16"):
        token_of(OUTSIDE, {TOKEN: "x" * 15})
    with pytest.raises(DashError, match=r"dash\.example\.org"):
        token_of(DashSettings(stores=("x",), url="https://dash.example.org"), {})
    assert token_of(OUTSIDE, {TOKEN: "x" * 16}) == "x" * 16


def test_loopback_needs_no_token_but_takes_one() -> None:
    local = DashSettings(stores=("x",))
    assert token_of(local, {}) is None
    assert token_of(local, {TOKEN: ""}) is None
    assert token_of(local, {TOKEN: SECRET}) == SECRET
    with pytest.raises(DashError):
        token_of(local, {TOKEN: "short"})


@pytest.mark.parametrize("path", ["/", "/fleet", "/fleet/rented1", "/jobs?x=1"])
def test_a_page_leads_to_the_login_and_back(door: FlaskClient, path: str) -> None:
    answer = door.get(path)
    assert answer.status_code == 303
    assert answer.location.startswith("/login?next=/")
    page = door.get(answer.location)
    assert f'name="next" value="{path}"' in page.text


@pytest.mark.parametrize("path", ["/live/fleet", "/api/snapshot", "/metrics", "/live/shard/0/qwen-800k"])
def test_data_is_refused_without_a_session(door: FlaskClient, path: str) -> None:
    answer = door.get(path, headers={"HX-Request": "true"})
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert answer.headers["HX-Refresh"] == "true"
    assert b"rented" not in answer.data


def test_health_and_style_need_no_session(door: FlaskClient) -> None:
    assert door.get("/healthz").status_code == 200
    assert door.get("/static/dash.css").status_code == 200


def test_the_right_token_opens_and_logout_closes(door: FlaskClient) -> None:
    answer = log_in(door)
    assert (answer.status_code, answer.location) == (303, "/fleet")  # type: ignore[attr-defined]
    cookies = answer.headers.getlist("Set-Cookie")  # type: ignore[attr-defined]
    session = next(one for one in cookies if one.startswith("dash_session="))
    assert "HttpOnly" in session
    assert "SameSite=Strict" in session
    assert SECRET not in "".join(cookies)
    page = door.get("/fleet")
    assert page.status_code == 200
    stolen = door.get_cookie("dash_session")
    assert stolen is not None
    form = re.search(r'action="/logout"><input type="hidden" name="form" value="([^"]+)"', page.text)
    assert form is not None
    assert door.post("/logout", data={"form": form[1]}).location == "/login"
    assert door.get("/fleet").status_code == 303
    door.set_cookie("dash_session", stolen.value)
    assert door.get("/fleet").status_code == 303, "a session that was ended stays ended"


def test_logout_needs_our_own_form(door: FlaskClient) -> None:
    log_in(door)
    assert door.post("/logout", data={"form": "guess"}).status_code == 403
    assert door.get("/fleet").status_code == 200


def test_a_login_form_from_elsewhere_does_not_count(door: FlaskClient) -> None:
    assert door.post("/login", data={"token": SECRET}).status_code == 403
    assert log_in(door, headers={"Origin": "https://evil.example"}).status_code == 403  # type: ignore[attr-defined]
    assert door.get("/fleet").status_code == 303
    assert log_in(door, headers={"Origin": "http://localhost"}).status_code == 303  # type: ignore[attr-defined]


def test_wrong_tokens_are_counted_and_then_not_even_looked_at(door: FlaskClient) -> None:
    for number in range(5):
        answer = log_in(door, f"wrong {number}")
        assert answer.status_code == 403  # type: ignore[attr-defined]
        assert "That is not the token." in answer.text  # type: ignore[attr-defined]
    answer = log_in(door)
    assert answer.status_code == 429  # type: ignore[attr-defined]
    assert 0 < int(answer.headers["Retry-After"]) <= 60  # type: ignore[attr-defined]
    assert door.get("/metrics", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 429
    other = {"REMOTE_ADDR": "192.0.2.7"}
    assert log_in(door, environ_overrides=other).status_code == 303  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/metrics", "/api/snapshot", "/live/jobs", "/"])
def test_a_bearer_token_reads(door: FlaskClient, path: str) -> None:
    assert door.get(path, headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200
    assert door.get(path, headers={"Authorization": f"Basic {SECRET}"}).status_code in (303, 401)
    assert door.get(path, headers={"Authorization": "Bearer "}).status_code in (303, 401)
    assert door.get(f"{path}?token={SECRET}").status_code in (303, 401)


def test_guesses_as_bearer_are_counted(door: FlaskClient) -> None:
    for number in range(5):
        assert door.get("/metrics", headers={"Authorization": f"Bearer guess-{number}"}).status_code == 401
    answer = door.get("/metrics", headers={"Authorization": f"Bearer {SECRET}"})
    assert answer.status_code == 429
    assert 0 < int(answer.headers["Retry-After"]) <= 60


def test_a_scraper_with_the_old_token_locks_nobody_out(door: FlaskClient) -> None:
    for _ in range(50):
        assert door.get("/metrics", headers={"Authorization": "Bearer the-old-token-of-last-year"}).status_code == 401
    assert door.get("/metrics", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200
    assert log_in(door).status_code == 303  # type: ignore[attr-defined]


def test_cookies_are_secure_behind_https() -> None:
    settings = DashSettings(stores=("x",), url="https://dash.example.org")
    door = create_app(dash_sample.sample, settings, token=SECRET).test_client()
    answer = door.get("/login", base_url="https://dash.example.org")
    assert "; Secure" in answer.headers["Set-Cookie"]


@contextmanager
def served(settings: DashSettings) -> Iterator[str]:
    server = Server(create_app(dash_sample.sample, settings, token=SECRET), settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server.address
    finally:
        server.close()
        thread.join(120)


def status(url: str, token: str, visitor: str) -> int:
    headers = {"Authorization": f"Bearer {token}", "X-Forwarded-For": visitor}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}metrics", headers=headers), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_behind_a_proxy_of_this_machine_each_visitor_is_counted_alone() -> None:
    with served(DashSettings(stores=("x",), url="https://dash.example.org", port=0)) as url:
        assert [status(url, f"guess-{n}", "192.0.2.1") for n in range(5)] == [401] * 5
        assert status(url, SECRET, "192.0.2.1") == 429
        assert status(url, SECRET, "192.0.2.2") == 200


def test_without_a_proxy_nobody_says_who_they_are() -> None:
    with served(DashSettings(stores=("x",), host="0.0.0.0", port=0)) as url:
        address = url.replace("0.0.0.0", "127.0.0.1")
        assert [status(address, f"guess-{n}", f"192.0.2.{n}") for n in range(5)] == [401] * 5
        assert status(address, SECRET, "192.0.2.77") == 429


def test_attempts_are_forgotten_after_the_window_and_bounded_in_all() -> None:
    now = [0.0]
    attempts = Attempts(each=2, all_of_them=5, window_s=60, clock=lambda: now[0])
    attempts.failed("a", "one")
    now[0] = 10
    attempts.failed("a", "one")
    assert attempts.wait_s("a") == 0, "the same wrong token is no further guess"
    attempts.failed("a", "another")
    assert attempts.wait_s("a") == 50
    assert attempts.wait_s("b") == 0
    for who in "bcd":
        attempts.failed(who, "one")
    assert attempts.wait_s("e") == 50, "guessing from many addresses is slowed down too"
    now[0] = 61
    assert attempts.wait_s("a") == 0


def test_sessions_end_when_idle_and_go_on_while_used() -> None:
    now = [0.0]
    sessions = Sessions(idle_s=100, clock=lambda: now[0])
    used, idle = sessions.begin(), sessions.begin()
    assert used != idle
    now[0] = 80
    assert sessions.alive(used)
    now[0] = 120
    assert sessions.alive(used)
    assert not sessions.alive(idle)
    assert not sessions.alive(None)
    assert not sessions.alive("guess")
    sessions.end(used)
    assert not sessions.alive(used)


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "/\\evil.example", "https://evil.example", "", None, "/a\nb", "x"]
)
def test_the_login_leads_nowhere_else(wanted: str | None) -> None:
    assert local_path(wanted) == "/"


def test_the_login_keeps_the_path(door: FlaskClient) -> None:
    assert local_path("/fleet?q=a&state=silent") == "/fleet?q=a&state=silent"
    assert log_in(door, wanted="//evil.example").location == "/"  # type: ignore[attr-defined]
