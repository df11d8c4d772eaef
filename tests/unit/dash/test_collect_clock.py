"""The time of a store that nothing is written to."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler

import pytest

from drafthouse.dash.collect import clock as module
from drafthouse.dash.collect.clock import StoreClock
from tests.doubles.loopback import serving

HOUR = timedelta(hours=1)


class Refusing(BaseHTTPRequestHandler):
    """An S3 server whose clock is an hour ahead, and which refuses whoever has no signature."""

    asked = 0

    def log_message(self, *_: object) -> None:
        return None

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((datetime.now(UTC) + HOUR).timestamp())

    def do_HEAD(self) -> None:
        Refusing.asked += 1
        self.send_response(403)
        self.end_headers()


@pytest.fixture
def ahead() -> Iterator[str]:
    Refusing.asked = 0
    with serving(Refusing) as address:
        yield address


def off_by(clock: StoreClock) -> float:
    return abs((clock.now() - datetime.now(UTC) - HOUR).total_seconds())


def test_a_server_tells_its_time_also_when_it_refuses(ahead: str) -> None:
    clock = StoreClock(f"s3://bucket/prefix?endpoint={ahead}&region=x", {})
    assert off_by(clock) < 1.5
    for _ in range(5):
        clock.now()
    assert Refusing.asked == 1, "it is not asked for every look"


def test_it_is_asked_again_after_a_while(ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.0)
    clock = StoreClock(f"s3://bucket?endpoint={ahead}", {})
    clock.now()
    clock.now()
    assert Refusing.asked == 2


def test_the_endpoint_may_stand_in_the_environment(ahead: str) -> None:
    assert off_by(StoreClock("s3://bucket/prefix", {"AWS_ENDPOINT_URL": ahead})) < 1.5


@pytest.mark.parametrize("url", ["/some/folder", "file:///x", "memory://x", "s3://b?endpoint=http://127.0.0.1:9"])
def test_without_an_answer_it_is_this_machines(url: str) -> None:
    assert abs((StoreClock(url, {}).now() - datetime.now(UTC)).total_seconds()) < 1


def test_a_time_that_was_seen_cannot_lie_ahead() -> None:
    clock = StoreClock("memory://x")
    clock.seen(datetime.now(UTC) + HOUR)
    assert off_by(clock) < 1
    clock.seen(datetime.now(UTC) - HOUR)
    clock.seen(None)
    assert off_by(clock) < 1
