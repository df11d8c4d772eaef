"""Switching between servers with a real HAProxy: nobody is sent to a closed door, open requests are waited for."""

from __future__ import annotations

import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from drafthouse.errors import FleetError
from drafthouse.fleet.proxy import Proxy
from tests.doubles.openai_server import Behaviour, OpenAiDouble, openai_double
from tests.fleet.haproxy import HaProxy, haproxy
from tests.patience import until

pytestmark = pytest.mark.skipif(
    shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin") is None, reason="haproxy is not installed"
)


@pytest.fixture
def both() -> Iterator[tuple[OpenAiDouble, OpenAiDouble]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(openai_double(Behaviour(model=name))) for name in ("a", "b"))  # type: ignore[misc]


@pytest.fixture
def front(both: tuple[OpenAiDouble, OpenAiDouble], tmp_path: Path) -> Iterator[HaProxy]:
    servers = {name: ("127.0.0.1", int(one.url.rpartition(":")[2])) for name, one in zip("ab", both, strict=True)}
    with haproxy("127.0.0.1", servers, tmp_path) as found:
        yield found


def proxy(front: HaProxy, backend: str = "models") -> Proxy:
    return Proxy(front.ask, backend, "proxy")


def test_a_server_is_let_in_when_its_health_check_passes(front: HaProxy) -> None:
    found = proxy(front)
    assert {server.state for server in found.servers().values()} == {"MAINT"}
    found.enable("a")
    assert found.servers()["a"].state.startswith("UP")
    with urllib.request.urlopen(f"{front.url}/v1/models") as answer:
        assert b'"a"' in answer.read()


def test_a_server_that_does_not_answer_is_not_called_up(front: HaProxy, tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    servers = {"dead": ("127.0.0.1", 9)}
    with (
        haproxy("127.0.0.1", servers, tmp_path / "dead") as other,
        pytest.raises(FleetError, match="'dead' is not up after"),
    ):
        proxy(other).enable("dead", timeout_s=1.5)


def test_a_server_without_checks_is_up_by_declaration(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with haproxy("127.0.0.1", {"plain": ("127.0.0.1", 9)}, tmp_path / "plain", check=False) as other:
        proxy(other).enable("plain", timeout_s=1.5)
        assert proxy(other).servers()["plain"].state == "no check"


def test_draining_waits_for_the_request_that_is_open(front: HaProxy, both: tuple[OpenAiDouble, OpenAiDouble]) -> None:
    found, answers = proxy(front), []
    found.enable("a")
    held = both[0].behaviour.held = threading.Event()

    def ask() -> None:
        body = b'{"messages": [{"role": "user", "content": "x"}]}'
        with urllib.request.urlopen(urllib.request.Request(f"{front.url}/v1/chat/completions", body)) as answer:
            answers.append(answer.status)

    client = threading.Thread(target=ask)

    def let_go() -> None:
        """Once the proxy is seen to wait."""
        until(lambda: found.servers()["a"].state.startswith("DRAIN"), "draining")
        held.set()

    client.start()
    until(lambda: found.servers()["a"].sessions, "the open request")
    found.enable("b")
    releases = threading.Thread(target=let_go)
    releases.start()
    assert found.drain("a", timeout_s=60)
    releases.join()
    client.join()
    assert answers == [200]
    assert found.servers()["a"].state == "MAINT"


def test_a_request_that_does_not_end_is_given_up_after_the_grace(
    front: HaProxy, both: tuple[OpenAiDouble, OpenAiDouble]
) -> None:
    found = proxy(front)
    found.enable("a")
    held = both[0].behaviour.held = threading.Event()
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    request = urllib.request.Request(f"{front.url}/v1/chat/completions", body)
    client = threading.Thread(target=lambda: urllib.request.urlopen(request).close(), daemon=True)
    client.start()
    until(lambda: found.servers()["a"].sessions, "the open request")
    assert not found.drain("a", timeout_s=0.5)
    held.set()
    client.join()


def test_wrong_names_are_told_before_anything_is_switched(front: HaProxy) -> None:
    with pytest.raises(FleetError, match="no backend 'other'"):
        proxy(front, "other").servers()
    with pytest.raises(FleetError, match="has no server 'c'"):
        proxy(front).check(["a", "c"])
    with pytest.raises(FleetError, match="the proxy says"):
        proxy(front).set("c", "ready")
