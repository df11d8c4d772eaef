"""The two programs that find out whether nodes reach each other, run as they run on nodes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from drafthouse.fleet.probe.peers import CONNECT, LISTEN
from tests.ports import free_port


def connect(port: int, answer_s: float) -> dict[str, Any]:
    words = [sys.executable, "-c", CONNECT, "127.0.0.1", str(port), "5", str(answer_s)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def listening(port: int, first: str = "listening") -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", LISTEN, str(port), "token", "60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == f"{first}\n"
            yield listener
        finally:
            listener.kill()


def test_our_own_listener_may_be_slow() -> None:
    port = free_port()
    with listening(port) as listener:
        listener.send_signal(signal.SIGSTOP)  # as on a machine that has no turn for it
        begin = time.monotonic()
        threading.Timer(2.5, listener.send_signal, (signal.SIGCONT,)).start()
        assert connect(port, 30) == {"said": "token", "connected": True, "error": ""}
        assert time.monotonic() - begin > 2


def test_who_has_the_port_already_is_asked_nothing() -> None:
    with socket.create_server(("", free_port())) as silent:
        port = silent.getsockname()[1]
        with listening(port, "taken"):
            pass
        begin = time.monotonic()
        assert connect(port, 0) == {"said": "", "connected": True, "error": ""}
        assert time.monotonic() - begin < 25


@pytest.mark.parametrize("said", [b"", b"tok", b"220 somebody else"])
def test_somebody_else_who_answers_is_not_our_listener(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as caller:
                caller.sendall(said)

        threading.Thread(target=answer, daemon=True).start()
        assert connect(listener.getsockname()[1], 10) == {"said": said.decode(), "connected": True, "error": ""}


def test_nobody_there() -> None:
    assert connect(free_port(), 10) == {"said": "", "connected": False, "error": "Connection refused"}
