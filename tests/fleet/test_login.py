"""Logging in to a node that dies or hangs on the way: it is unreachable, and only who says no refuses our key."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.errors import AccessError, UnreachableError
from drafthouse.fleet.node import Node as FleetNode
from tests.doubles.nodes import Fleet, Node

End = Literal["closes", "hangs"]


class Dying:
    """A way to a node's sshd that lets its first `limit` bytes through, and then closes or passes nothing on."""

    def __init__(self, node: Node, limit: int, end: End) -> None:
        self.told, self._node, self._limit, self._end = 0, node, limit, end
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._open):
            one.close()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        sshd = socket.create_connection((self._node.address, self._node.port))
        self._open += [client, sshd]
        threading.Thread(target=self._upwards, args=(client, sshd), daemon=True).start()
        try:
            while data := sshd.recv(min(4096, self._limit - self.told)):
                client.sendall(data)
                self.told += len(data)
                if self.told >= self._limit:
                    if self._end == "closes":
                        client.shutdown(socket.SHUT_RDWR)
                    return
            client.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _upwards(self, client: socket.socket, sshd: socket.socket) -> None:
        try:
            while data := client.recv(4096):
                sshd.sendall(data)
        except OSError:
            return


@contextmanager
def dying(fleet: Fleet, node: Node, folder: Path, limit: int, end: End) -> Iterator[tuple[Dying, NodeConnection]]:
    way = Dying(node, limit, end)
    known_hosts = folder / f"known_hosts-{way.port}"
    known_hosts.write_text(f"[127.0.0.1]:{way.port} {node.host_key}\n", encoding="utf-8")
    described = FleetNode(name="dying", host="127.0.0.1", port=way.port, key_file=fleet.key)
    connection = NodeConnection(described, known_hosts)
    try:
        yield way, connection
    finally:
        connection.close()
        way.close()


@pytest.fixture
def login(fleet: Fleet, node: Node, tmp_path: Path) -> int:
    """How many bytes an sshd says until we are in."""
    with dying(fleet, node, tmp_path, 1 << 30, "closes") as (way, connection), connection:
        return way.told


def test_a_node_that_dies_at_any_place_of_the_login_is_unreachable(
    fleet: Fleet, node: Node, tmp_path: Path, login: int
) -> None:
    # Before its greeting, in the exchange of keys, and, in small steps, between that and the last word of the login.
    for place in [1, 20, 60, login // 2, *range(login - 160, login, 20), login - 1]:
        with dying(fleet, node, tmp_path, place, "closes") as (way, connection):
            with pytest.raises(UnreachableError, match=r"dying \(127\.0\.0\.1:\d+\): no ssh connection"):
                connection.run(["true"])
            assert way.told == place


@pytest.mark.slow
def test_a_node_that_hangs_at_any_place_of_the_login_is_unreachable(
    fleet: Fleet, node: Node, tmp_path: Path, login: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafthouse.fleet.pinned.CONNECT_S", 0.5)
    for place in [20, login // 2, *range(login - 160, login, 40), login - 1]:
        with (
            dying(fleet, node, tmp_path, place, "hangs") as (_, connection),
            pytest.raises(UnreachableError, match=r"dying \(127\.0\.0\.1:\d+\): no ssh connection"),
        ):
            connection.run(["true"])


def test_who_closes_at_once_is_unreachable(tmp_path: Path, fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closing = threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True)
        closing.start()
        node = FleetNode(name="closes", host="127.0.0.1", port=listener.getsockname()[1], key_file=fleet.key)
        with pytest.raises(UnreachableError, match="no ssh connection"):
            NodeConnection(node, tmp_path / "known_hosts").run(["true"])
        closing.join(120)


@pytest.fixture
def ours(fleet: Fleet, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeConnection:
    """A connection that looks for keys as ssh does: in an agent, of which there is none, and in ~/.ssh."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    described = FleetNode(name=node.name, host=node.address, port=node.port, key_file=None)
    return NodeConnection(described, fleet.inventory / "known_hosts")


@pytest.mark.parametrize("kinds", [["ed25519"], ["rsa", "ecdsa", "ed25519"]])
def test_an_sshd_that_says_no_to_every_key_refuses_them(ours: NodeConnection, tmp_path: Path, kinds: list[str]) -> None:
    for kind in kinds:
        file = tmp_path / ".ssh" / f"id_{kind}"
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", file], check=True)
    with pytest.raises(AccessError, match=r"the node refuses our key for root \(Authentication failed"):
        ours.run(["true"])


def test_without_any_key_that_is_what_is_told(ours: NodeConnection) -> None:
    with pytest.raises(AccessError, match="there is no key to log in with as root; add one to the ssh agent"):
        ours.run(["true"])


def test_a_key_that_an_sshd_takes_is_found(ours: NodeConnection, fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / ".ssh/id_ed25519").write_bytes(fleet.key.read_bytes())
    with ours as connection:
        assert connection.run(["echo", "in"]).stdout == "in\n"
