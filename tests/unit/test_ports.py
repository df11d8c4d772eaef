"""The ports of test servers: what a flaky test would be the first to tell of."""

from __future__ import annotations

import socket
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests import ports


@pytest.fixture(autouse=True)
def own_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own counter goes on for the tests that run beside."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_they_lie_in_a_row_below_what_the_kernel_gives_out() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = ports.free_ports(5)
    assert ports.FIRST <= found[0] <= found[-1] < lowest
    assert list(found) == list(range(found[0], found[0] + 5))


def test_a_listener_is_passed_over_wherever_in_the_row_it_is() -> None:
    first = ports.free_port() + 1
    with socket.create_server(("127.0.0.1", first + 2)):
        assert ports.free_ports(3)[0] > first + 2


def test_the_last_is_followed_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    monkeypatch.setattr(ports, "FIRST", lowest - 4)
    given = [ports.free_port() for _ in range(8)]
    assert set(given) <= set(range(lowest - 4, lowest))
    assert len(set(given)) > 1


def test_processes_are_never_given_the_same() -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        given = [port for found in pool.map(ports.free_ports, [3] * 40) for port in found]
    assert len(set(given)) == 120
