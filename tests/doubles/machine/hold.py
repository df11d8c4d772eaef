"""Process 1 of a machine double: mounts it, plays its kernel and its programs, and takes it away by dying.

Started by `boot.up` in namespaces of its own (mount, process, network, host name, IPC): when it ends, however it ends,
the kernel kills what still runs inside and drops the mounts.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.doubles.machine import layers, nvidia, programs
from tests.doubles.machine.attributes import Attributes
from tests.doubles.machine.boot import CONTAINER_ROOT
from tests.doubles.machine.hosts import HOSTS, Host
from tests.doubles.machine.programs import HOST, Programs
from tests.doubles.machine.service import Service
from tests.doubles.machine.world import MachineWorld

VMID = "129"


def assemble(folder: Path, host: Host) -> Programs:
    """Lay the files of the machine and of its container, and mount both."""
    memory, root = folder / "memory", folder / "root"
    layers.mount_tmpfs(memory, "2g")
    places = {HOST: root}
    own = memory / "own"
    layers.hide(own)
    host.lay(own)
    layers.put_programs(own, programs.NAMES)
    layers.mount_overlay(memory, root)
    if host.container:
        places[VMID] = root / CONTAINER_ROOT
        inner = memory / VMID
        layers.hide(inner / "own")
        host.container(inner / "own")
        layers.put_programs(inner / "own", programs.IN_CONTAINER)
        given = own / CONTAINER_ROOT / "dev"
        shutil.copytree(given, inner / "own/dev", dirs_exist_ok=True, copy_function=_copy_node)
        layers.mount_overlay(inner, places[VMID])
        for shared in ("proc", "sys"):
            layers.bind(root / shared, places[VMID] / shared)
    return Programs(MachineWorld(root), places, faults={})


def _copy_node(source: str, target: str) -> None:
    status = Path(source).stat()
    layers.make_node(Path(target), os.major(status.st_rdev), os.minor(status.st_rdev))


def hold(folder: Path, host: Host, owner: int, seconds: float) -> None:
    """Bring the machine up below `folder` and serve it until its owner ends or `seconds` have passed.

    Args:
        owner: descriptor (pidfd) of the process that the machine belongs to.
    """
    answering = assemble(folder, host)
    socket.sethostname(host.hostname)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for root in answering.places.values():
        nvidia.ldconfig(root)
    attributes = Attributes(answering.world)
    attributes.open()
    listening = [_listen(folder, "control")]
    for place, root in answering.places.items():
        run = root / layers.RUN.lstrip("/")
        layers.mount_tmpfs(run, "1m")
        (run / "place").write_text(f"{place}\n", encoding="utf-8")
        listening.append(_listen(run, "commands"))
    memories = {
        "": folder / "memory",
        **{f"{VMID}:": folder / "memory" / VMID for place in answering.places if place == VMID},
    }
    service = Service(memories, answering)
    # The procfs of the outer process namespace is still mounted at /proc here: its number is what `enter` needs.
    pid = str(Path("/proc/self").readlink())
    temporary = folder / "pid.new"
    temporary.write_text(pid, encoding="utf-8")
    temporary.rename(folder / "pid")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ready, _, _ = select.select([owner, *listening, *attributes.open()], [], [], 1.0)
        if owner in ready:
            break
        if ready:  # whoever woke this waits for an answer, so nobody writes an attribute just now
            with answering.turn:
                attributes.settle()
        for source in ready:
            if isinstance(source, socket.socket):
                service.answer(source.accept()[0])
            else:
                with answering.turn:
                    attributes.written(source)


def _listen(folder: Path, name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    back = Path.cwd()
    os.chdir(folder)  # the address of a Unix socket has at most 107 bytes, a test's folder can have more
    listening.bind(name)
    os.chdir(back)
    listening.listen(16)
    return listening


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("host", choices=sorted(HOSTS))
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=900.0)
    arguments = parser.parse_args()
    # Whatever goes wrong in here must not take the memory of the computer that the tests run on.
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    hold(arguments.folder, HOSTS[arguments.host], arguments.owner, arguments.seconds)


if __name__ == "__main__":
    main()
