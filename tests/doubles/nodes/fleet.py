"""A fleet of nodes on this machine; see the package for what it offers."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.doubles.nodes.keys import new_key
from tests.doubles.nodes.node import Node
from tests.patience import until

REPOSITORY = Path(__file__).parents[3]
PRIVATE = ("/root", "/tmp", "/var/tmp", "/srv", "/run", "/dev/shm")
SIZES = {"/root": "256m", "/srv": "1g", "/var/tmp": "256m", "/tmp": "512m", "/run": "32m", "/dev/shm": "256m"}
SUBNETS = 64 * 256
"""10.64.0.0/24 to 10.127.255.0/24."""

SSHD = """\
Port {port}
ListenAddress 0.0.0.0
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
LogLevel VERBOSE
Subsystem sftp internal-sftp
"""


def missing() -> str | None:
    """What this machine lacks for nodes, in words; None when nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "root on Linux"
    for program, package in {
        "ip": "iproute2",
        "unshare": "util-linux",
        "nsenter": "util-linux",
        "/usr/sbin/sshd": "openssh-server",
    }.items():
        if shutil.which(program) is None:
            return f"{program} (package {package})"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "namespaces of its own (CAP_SYS_ADMIN)"


class Fleet:
    """`count` nodes named node1, node2, …; a context manager.

    Args:
        count: number of nodes.
        folder: where keys and the inventory are written.
        addresses: for every node the number of its address (from 1); default: each has its own.
        sizes: sizes of file systems (as mount's `size=`), beside `SIZES`.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        addresses: Sequence[int] | None = None,
        sizes: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.key, self.inventory = folder, folder / "id_ed25519", folder / "inventory"
        self.sizes = SIZES | dict(sizes or {})
        self.shown = _shown()
        self.nodes: list[Node] = []
        self._addresses = tuple(addresses or range(1, count + 1))
        self._lock = threading.Lock()
        if len(self._addresses) != count:
            raise ValueError(f"{count} nodes and {len(self._addresses)} addresses")

    def __getitem__(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._start_keeper()
        try:
            self._connect()
            self._add_nodes()
            self.write_inventory()
            for node in self.nodes:
                node.await_sshd()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all nodes; returns when they and their network are gone."""
        self._answers.close()
        self._control.close()
        self._keeper.wait(timeout=240)
        link = Path("/sys/class/net") / self._link
        until(lambda: not link.exists(), f"the end of {self._link}")  # the kernel does it in the background

    def ask(self, do: str, **arguments: Any) -> Any:
        """Let the keeper do something.

        Raises:
            RuntimeError: it could not; its words.
        """
        with self._lock:
            self._control.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            answer = json.loads(self._answers.readline() or '{"error": "the keeper has ended"}')
        if "error" in answer:
            raise RuntimeError(f"{do}: {answer['error']}")
        return answer["value"]

    def log(self, name: str) -> str:
        return (Path(f"/proc/{self._keeper_pid()}/root/mnt/nodes") / name / "log").read_text(errors="replace")

    def write_inventory(self, **variables: Any) -> Path:
        """Write the inventory's files; `variables` are those of all nodes. Jobs and profiles in it are left alone."""
        hosts = {
            node.name: {
                "ansible_host": node.address,
                "ansible_port": node.port,
                "ansible_ssh_private_key_file": str(self.key),
            }
            for node in self.nodes
        }
        for name in ("group_vars", "host_vars", "jobs", "profiles"):
            (self.inventory / name).mkdir(parents=True, exist_ok=True)
        _dump(self.inventory / "hosts.yml", {"all": {"children": {"rented": {"hosts": hosts}}}})
        _dump(self.inventory / "group_vars/all.yml", {"ansible_user": "root", **variables})
        _dump(self.inventory / "group_vars/rented.yml", {"gpu_host_kind": "rented"})
        lines = [f"{_known_as(node)} {node.host_key}\n" for node in self.nodes]
        (self.inventory / "known_hosts").write_text("".join(lines))
        return self.inventory

    def _start_keeper(self) -> None:
        self._control, theirs = socket.socketpair()
        self._answers = self._control.makefile()
        owner = os.pidfd_open(os.getpid())
        unshare = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        keeper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py"))]
        with theirs:
            self._keeper = subprocess.Popen(
                [*unshare, *keeper, str(theirs.fileno()), str(owner)],
                pass_fds=(theirs.fileno(), owner),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        os.close(owner)

    def _keeper_pid(self) -> int:
        outer = self._keeper.pid
        children = Path(f"/proc/{outer}/task/{outer}/children")
        return int(until(lambda: children.read_text().split(), "the keeper of the nodes")[0])

    def _connect(self) -> None:
        """A cable from this machine into the fleet, named by the subnet: no other fleet can take the same."""
        self.ask("namespace", name="")  # it runs, so its namespaces are there
        pid = self._keeper_pid()
        for _ in range(20):
            number = secrets.randbelow(SUBNETS)
            self._link, self._network = f"nodes{number}", f"10.{64 + number // 256}.{number % 256}"
            made = _ip(f"link add {self._link} type veth peer name uplink netns {pid}")
            if made is None:
                break
        else:
            raise RuntimeError(f"no network for the nodes: {made}")
        self.controller_address = f"{self._network}.1"
        failed = _ip(f"addr add {self.controller_address}/24 dev {self._link}", f"link set {self._link} up")
        if failed:
            raise RuntimeError(f"no network for the nodes: {failed}")
        self.ask("prepare", shown=self.shown)

    def _add_nodes(self) -> None:
        private, public = new_key()
        self.key.touch(mode=0o600)
        self.key.write_text(private)
        for place, number in enumerate(self._addresses, 1):
            before = self._addresses[: place - 1].count(number)
            address, network = f"{self._network}.{10 + number}", f"wire{number}"
            node = Node(self, f"node{place}", address, 22 if before == 0 else 2200 + before, network)
            if before == 0:
                self.ask("cable", name=network, address=address)
            host_private, node.host_key = new_key()
            files = {
                "etc-ssh/sshd_config": SSHD.format(port=node.port),
                "etc-ssh/ssh_host_ed25519_key": host_private,
                "root/.ssh/authorized_keys": public + "\n",
                # An account that /etc/shadow locks with '!' is refused without PAM.
                "shadow": "root:*:20000:0:99999:7:::\nsshd:!:20000::::::\n",
            }
            self.ask("disks", name=node.name, files=files, sizes=self.sizes)
            node.start()
            self.nodes.append(node)


def _shown() -> list[str]:
    """Folders that programs need and that a node's own /root, /tmp, … would hide."""
    wanted = {str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, REPOSITORY)} | {sys.prefix}
    return sorted(path for path in wanted if any(Path(path).is_relative_to(private) for private in PRIVATE))


def _known_as(node: Node) -> str:
    return node.address if node.port == 22 else f"[{node.address}]:{node.port}"


def _ip(*lines: str) -> str | None:
    """Run lines of ip(8); what it complains of, None when all is well."""
    text = "\n".join(lines) + "\n"
    done = subprocess.run(["ip", "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or "ip failed") if done.returncode else None


def _dump(file: Path, content: Any) -> None:
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
