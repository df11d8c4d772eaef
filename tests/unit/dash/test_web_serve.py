"""The server around the application: addresses, refusals, an end that loses no answer."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from drafthouse.dash.errors import DashError
from drafthouse.dash.model import Snapshot
from drafthouse.dash.serve import Server
from drafthouse.dash.settings import DashSettings
from drafthouse.dash.web import create_app
from tests.doubles import dash_sample


def settings(host: str, port: int = 0) -> DashSettings:
    return DashSettings(stores=("x",), host=host, port=port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_answers_at_the_address_that_it_says(host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 loopback here")
    server = Server(create_app(dash_sample.sample, settings(host)), settings(host))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        with urllib.request.urlopen(f"{server.address}healthz", timeout=120) as answer:
            assert answer.read() == b"ok\n"
            assert "Server" not in answer.headers
    finally:
        server.close()
        thread.join(120)
    assert not thread.is_alive()


def test_what_is_being_answered_is_answered_to_the_end() -> None:
    asked = threading.Event()

    def slow() -> Snapshot:
        asked.set()
        time.sleep(0.5)
        return dash_sample.sample(datetime.now(UTC))

    server = Server(create_app(slow, settings("127.0.0.1")), settings("127.0.0.1"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: urllib.request.urlopen(f"{server.address}api/snapshot", timeout=120).read())
        assert asked.wait(120)
        server.close()
        assert b"qwen-800k" in answer.result(120)
    thread.join(120)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("host", "sentence"),
    [("192.0.2.1", "192.0.2.1:0: cannot be listened on"), ("no.such.host.invalid", "the host name has no address")],
)
def test_an_address_that_is_not_ours_is_one_sentence(host: str, sentence: str) -> None:
    with pytest.raises(DashError) as caught:
        Server(create_app(dash_sample.sample, settings(host), token="t" * 16), settings(host))
    assert sentence in str(caught.value)


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = settings("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(DashError, match="the port is in use; give another --port"):
            Server(create_app(dash_sample.sample, wanted), wanted)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
