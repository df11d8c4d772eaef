"""One node of a `Fleet`, and what can happen to it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko

from tests.doubles.nodes.keys import new_key
from tests.patience import until

if TYPE_CHECKING:
    from tests.doubles.nodes.fleet import Fleet


class Node:
    """A node by its name, address and port. `host_key` is its public key as one line of text."""

    def __init__(self, fleet: Fleet, name: str, address: str, port: int, network: str) -> None:
        self.name, self.address, self.port, self.host_key = name, address, port, ""
        self._fleet, self._network = fleet, network

    def kill(self) -> None:
        """Kill every process of the node at once."""
        self._fleet.ask("end", name=self.name)

    def cut(self) -> None:
        """Take the network away: nothing arrives any more and nobody is told."""
        self._fleet.ask("link", name=self._network, state="down")

    def join(self) -> None:
        """Give the network back."""
        self._fleet.ask("link", name=self._network, state="up")

    def restart(self) -> None:
        """Kill every process and start the node's sshd anew; returns when that answers."""
        self.start()
        self.await_sshd()

    def start(self) -> None:
        """As `restart`, without waiting."""
        self._fleet.ask("boot", name=self.name, network=self._network, sizes=self._fleet.sizes, shown=self._fleet.shown)

    def rekey(self) -> None:
        """Give the node another host key, as a rebuild does. The written known_hosts keeps the old one."""
        private, self.host_key = new_key()
        self._fleet.ask("write", name=self.name, files={"etc-ssh/ssh_host_ed25519_key": private})
        self._fleet.ask("renew", name=self.name)
        until(lambda: self._presented_key() == self.host_key, f"the new key of {self.name}")

    def pids(self) -> dict[int, str]:
        """Command lines of the node's processes by their pid in the test process' view; its pid 1 is the first."""
        wanted = self._fleet.ask("namespace", name=self.name)
        if wanted is None:
            return {}
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if (entry / "ns/pid").stat().st_ino == wanted:
                    words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                    found[int(entry.name)] = b" ".join(words).decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
        return dict(sorted(found.items()))

    def execute(self, argv: Sequence[str], timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a command on the node, around sshd and network. The node must be alive."""
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        return subprocess.run(
            ["nsenter", f"--target={self.first()}", *namespaces, "--wd=/", *argv],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={"PATH": os.environ["PATH"], "HOME": "/root"},
        )

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file on the node, with the folders above it."""
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)

    def path(self, path: str) -> Path:
        """`path` of the node as this process can open it (absolute links lead astray). The node must be alive."""
        return Path(f"/proc/{self.first()}/root") / path.lstrip("/")

    def first(self) -> int:
        """The node's pid 1 in the test process' view.

        Raises:
            RuntimeError: the node is dead.
        """
        for pid in self.pids():
            return pid
        raise RuntimeError(f"{self.name} is dead")

    def resize(self, path: str, size: str) -> None:
        """Change the size of a file system of the node (`4m`): smaller than its content is refused by the kernel."""
        done = self.execute(["mount", "-o", f"remount,size={size}", path])
        if done.returncode:
            raise RuntimeError(done.stderr)

    def log(self) -> str:
        """What the node's sshd has said since the fleet was made."""
        return self._fleet.log(self.name)

    def _presented_key(self) -> str | None:
        """The host key that whoever answers at the node's address proves to have; None when nobody does."""
        try:
            with socket.create_connection((self.address, self.port), timeout=5) as connection:
                transport = paramiko.Transport(connection)
                try:
                    transport.start_client(timeout=5)
                    key = transport.get_remote_server_key()
                    return f"{key.get_name()} {key.get_base64()}"
                finally:
                    transport.close()
        except (OSError, EOFError, paramiko.SSHException):
            return None

    def await_sshd(self) -> None:
        """Wait until the node greets as an ssh server."""

        def greets() -> bool:
            with socket.create_connection((self.address, self.port), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"

        try:
            until(greets, f"sshd of {self.name} at {self.address}:{self.port}")
        except AssertionError as error:
            raise RuntimeError(f"{error}; it said: {self.log()[-2000:]}") from error
