"""What happens to a known_hosts file; the node is an ssh server of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from paramiko.hostkeys import HostKeys

from drafthouse.fleet.errors import HostKeyError, UnreachableError
from drafthouse.fleet.node import Node
from drafthouse.fleet.trust import scan, trust


class Server:
    """Shows its host keys to whoever asks, and lets nobody in."""

    def __init__(self) -> None:
        self.keys: list[paramiko.PKey] = [paramiko.ECDSAKey.generate()]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.node = Node("node1", "127.0.0.1", port=self.port)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            for key in self.keys:
                transport.add_server_key(key)
            transport.start_server(event=threading.Event(), server=paramiko.ServerInterface())

    def line(self, name: str | None = None, key: paramiko.PKey | None = None) -> str:
        key = key or self.keys[0]
        return f"{name or f'[127.0.0.1]:{self.port}'} {key.get_name()} {key.get_base64()}\n"


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.listener.close()


def test_a_scan_shows_the_key_and_trusts_nothing(server: Server) -> None:
    key = scan(server.node)
    assert (key.type, key.fingerprint) == ("ecdsa-sha2-nistp256", server.keys[0].fingerprint)
    with pytest.raises(UnreachableError, match="shows no host key"):
        scan(Node("closed", "127.0.0.1", port=1))


def test_a_new_node_is_written_below_what_is_there(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "new folder/known_hosts"
    trust(server.node, file)
    assert file.read_text() == server.line()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("# comment\nother ssh-ed25519 AAAA")
    file.chmod(0o644)
    trust(server.node, file, server.keys[0].fingerprint)
    assert file.read_text() == "# comment\nother ssh-ed25519 AAAA\n" + server.line()
    assert file.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in file.parent.iterdir()] == ["known_hosts"]


def test_another_fingerprint_is_refused_and_nothing_written(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    with pytest.raises(HostKeyError, match=r"it shows the host key SHA256:\S+ and not SHA256:else; trust nothing"):
        trust(server.node, file, "SHA256:else")
    assert not file.exists()
    trust(server.node, file, server.keys[0].fingerprint.removeprefix("SHA256:") + "\n")
    assert file.exists()


@pytest.mark.parametrize("hashed", [False, True])
def test_another_key_takes_the_place_only_when_asked(server: Server, tmp_path: Path, hashed: bool) -> None:
    file, name = tmp_path / "known_hosts", server.node.known_as
    old = paramiko.ECDSAKey.generate()
    before = server.line(HostKeys.hash_host(name) if hashed else f"alias,{name}", old) + server.line("127.0.0.1", old)
    file.write_text(before)
    with pytest.raises(
        HostKeyError, match=r"knows it by another host key, SHA256:\S+; it shows SHA256:\S+; .*--replace"
    ):
        trust(server.node, file)
    with pytest.raises(HostKeyError, match="and not SHA256:else"):
        trust(server.node, file, "SHA256:else", replace=True)
    assert file.read_text() == before
    trust(server.node, file, replace=True)
    alias = "" if hashed else server.line("alias", old)
    assert file.read_text() == alias + server.line("127.0.0.1", old) + server.line()


def test_a_key_that_is_trusted_is_left_as_it_is(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    # It also has a key of a kind that is preferred to the one that is known.
    server.keys.append(paramiko.RSAKey.generate(2048))
    known = server.line(HostKeys.hash_host(server.node.known_as), server.keys[1])
    file.write_text(known)
    assert trust(server.node, file).type == "ssh-rsa"
    assert file.read_text() == known


def test_a_file_that_cannot_be_used_is_told(server: Server, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(HostKeyError, match="folder: cannot be read"):
        trust(server.node, tmp_path / "folder")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(HostKeyError, match="binary: cannot be read"):
        trust(server.node, tmp_path / "binary")
    (tmp_path / "file").touch()
    with pytest.raises(HostKeyError, match=r"cannot be (read|written)"):
        trust(server.node, tmp_path / "file/known_hosts")
