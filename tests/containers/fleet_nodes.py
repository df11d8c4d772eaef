"""Nodes with systemd, sshd and an engine of their own, as containers of this machine's engine."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafthouse.fleet.inventory import Node
from tests.containers.debian import bootstrap, why_not
from tests.patience import until

PACKAGES = (
    "systemd,systemd-sysv,dbus,python3,ca-certificates,iproute2,iptables,procps,"
    "openssh-server,docker.io,docker-registry,busybox-static"
)
PREFIX = f"drafthouse-fleet-{os.getpid()}"
# As much as an engine without CAP_SYS_RESOURCE can give; an engine inside needs its own /var/lib/docker.
RUN = (
    *("docker", "run", "--detach", "--stop-signal", "SIGRTMIN+3", "--cap-add", "ALL", "--cap-drop", "SYS_RESOURCE"),
    *("--security-opt", "seccomp=unconfined", "--cgroupns", "private", "--tmpfs", "/run", "--tmpfs", "/run/lock"),
    *("--volume", "/var/lib/docker"),
)
APPLETS = ("cat", "echo", "env", "grep", "id", "pwd", "sh", "sleep", "touch", "true")


@dataclass(frozen=True)
class Machine:
    """A node: its container, and how it is reached."""

    container: str
    node: Node
    known_hosts: Path

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command on it, around sshd."""
        done = subprocess.run(
            ["docker", "exec", self.container, *words], capture_output=True, text=True, check=False, timeout=60
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def put(self, path: str, text: str) -> None:
        """Write a file on it."""
        words = ["docker", "exec", "--interactive", self.container, "sh", "-c", 'cat >"$1"', "sh", path]
        subprocess.run(words, input=text, text=True, check=True, timeout=60)


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    """Two nodes."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("machines")
    image = f"{PREFIX}:node"
    bootstrap(PACKAGES, folder / "node.tar")
    _docker("import", "--change", 'CMD ["/sbin/init"]', str(folder / "node.tar"), image)
    (folder / "node.tar").unlink()
    key = folder / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    names = (f"{PREFIX}-1", f"{PREFIX}-2")
    try:
        for name in names:
            subprocess.run([*RUN, "--name", name, "--hostname", name, image], check=True, capture_output=True)
        yield _machine(names[0], key), _machine(names[1], key)
    finally:
        _docker("rm", "--force", "--volumes", *names)
        _docker("rmi", "--force", image)


@pytest.fixture(scope="session")
def work_image(machines: tuple[Machine, Machine]) -> Iterator[str]:
    """Id of an image on this machine's engine only: a shell, a user with a name, an entry point of its own."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        busybox = subprocess.run(
            ["docker", "exec", machines[0].container, "cat", "/bin/busybox"], capture_output=True, check=True
        ).stdout
        for name, content in {
            "bin/busybox": busybox,
            "etc/passwd": b"root:x:0:0::/:/bin/sh\nworker:x:1234:1234::/:/bin/sh\n",
            "bin/entry": b'#!/bin/sh\necho "entered: $1"\nexec "$@"\n',
        }.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            tar.addfile(info, io.BytesIO(content))
        for applet in APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    name = f"{PREFIX}:work"
    changes = ["--change", "USER worker", "--change", 'ENTRYPOINT ["/bin/entry"]', "--change", "ENV PATH=/bin"]
    subprocess.run(["docker", "import", *changes, "-", name], input=archive.getvalue(), check=True, capture_output=True)
    yield _docker("image", "inspect", "--format", "{{.Id}}", name).strip()
    _docker("rmi", "--force", name)


def _machine(name: str, key: Path) -> Machine:
    machine = Machine(name, Node(name, "unknown"), key.with_name(f"{name}.known_hosts"))
    active = ("sh", "-c", "systemctl -q is-active ssh docker && echo up || systemctl --failed")
    until(lambda: "up" in machine.run(*active).split(), f"sshd and the engine of {name}", 300, every=0.3)
    # Each its own key: the package made one when the image was made. sshd reads it when it starts.
    machine.run("sh", "-c", "rm /etc/ssh/ssh_host_* && ssh-keygen -q -A && mkdir -p -m 700 /root/.ssh")
    machine.run("systemctl", "restart", "ssh")
    machine.put("/root/.ssh/authorized_keys", key.with_suffix(".pub").read_text())
    # The engine outside gives them for reading only, and the one inside makes groups for its containers.
    groups = [line.split()[1] for line in machine.run("cat", "/proc/mounts").splitlines() if " cgroup" in line]
    for group in groups:
        machine.run("mount", "-o", "remount,bind,rw", group)
    address = _docker("inspect", "--format", "{{.NetworkSettings.IPAddress}}", name).strip()
    host_key = machine.run("cat", "/etc/ssh/ssh_host_ed25519_key.pub").split()
    machine.known_hosts.write_text(f"{address} {host_key[0]} {host_key[1]}\n")
    return Machine(name, Node(name, address, key_file=key, kind="container"), machine.known_hosts)


def _docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
