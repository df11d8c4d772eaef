"""Pid 1 of the namespaces around a fleet: `keeper.py CONTROL_FD OWNER_PIDFD`. Standard library only.

It reads one JSON object a line from the control socket, does what it says and answers with one. It ends when the socket
is closed or when its owner (the test process) ends, and the kernel then ends all that it has started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

NODES, SHOWN = Path("/mnt/nodes"), Path("/mnt/shown")
DISKS = {"/root": ("root", "0700"), "/srv": ("srv", "0755"), "/var/tmp": ("var-tmp", "1777")}
BOOT = Path(__file__).with_name("boot.sh")

running: dict[str, subprocess.Popen[bytes]] = {}


def call(*argv: str, input: str | None = None) -> None:
    done = subprocess.run(argv, input=input, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def ip(*lines: str) -> None:
    call("ip", "-batch", "-", input="\n".join(lines) + "\n")


def prepare(shown: list[str]) -> None:
    """The switch, and the folders that nodes see in spite of their own /root and /tmp."""
    call("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/mnt")
    for number, folder in enumerate(shown):
        (SHOWN / str(number)).mkdir(parents=True)
        call("mount", "--rbind", folder, str(SHOWN / str(number)))
    NODES.mkdir()
    call("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/run")
    ip("link set lo up", "link add switch type bridge", "link set switch up")
    ip("link set uplink master switch", "link set uplink up")


def cable(name: str, address: str) -> None:
    """One address: a network namespace, whose cable ends at the switch under the same name."""
    call("ip", "netns", "add", name)
    ip(f"link add {name} type veth peer name eth0 netns {name}", f"link set {name} master switch up")
    gateway = address.rsplit(".", 1)[0] + ".1"
    lines = [
        "link set lo up",
        f"addr add {address}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {gateway}",
    ]
    call("ip", "-netns", name, "-batch", "-", input="\n".join(lines) + "\n")


def disks(name: str, files: dict[str, str], sizes: dict[str, str]) -> None:
    home = NODES / name
    for path, (folder, mode) in DISKS.items():
        (home / folder).mkdir(parents=True)
        call("mount", "-t", "tmpfs", "-o", f"mode={mode},size={sizes[path]}", "tmpfs", str(home / folder))
    write(name, files)


def write(name: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        file = NODES / name / path
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        file.write_text(text)


def boot(name: str, network: str, sizes: dict[str, str], shown: list[str]) -> None:
    end(name)
    arguments = [name, sizes["/tmp"], sizes["/run"], sizes["/dev/shm"], *shown]
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (NODES / name / "log").open("ab") as log:
        running[name] = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{network}", *unshare, "sh", str(BOOT), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        )


def first(name: str) -> int | None:
    """The node's pid 1, as numbered here."""
    outer = running[name].pid
    children = Path(f"/proc/{outer}/task/{outer}/children")
    found = children.read_text().split() if children.exists() else []
    return int(found[0]) if found else None


def end(name: str) -> None:
    """Kill the node's pid 1: the kernel kills the rest before `unshare` can collect it."""
    if name not in running:
        return
    pid = first(name)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    else:
        running[name].kill()
    running.pop(name).wait()


def renew(name: str) -> None:
    """Let the node's sshd read its host key again; it runs itself anew under the same pid."""
    pid = first(name)
    if pid is not None:
        os.kill(pid, signal.SIGHUP)


def link(name: str, state: str) -> None:
    ip(f"link set {name} {state}")


def namespace(name: str) -> int | None:
    """Number of the node's pid namespace; None when it is dead."""
    pid = first(name) if name in running else None
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino if pid is not None else None


ACTIONS = {action.__name__: action for action in (prepare, cable, disks, write, boot, end, renew, link, namespace)}


def answer(line: str) -> dict[str, Any]:
    request = json.loads(line)
    try:
        return {"value": ACTIONS[request.pop("do")](**request)}
    except (OSError, RuntimeError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    control, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    with control.makefile("rw") as stream:
        while True:
            readable, _, _ = select.select([control, owner], [], [])
            if owner in readable:
                return
            line = stream.readline()
            if not line:
                return
            stream.write(json.dumps(answer(line)) + "\n")
            stream.flush()


if __name__ == "__main__":
    main()
