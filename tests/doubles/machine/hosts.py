"""The machines that can be brought up, by name: their files and packages, and the container of the Proxmox host."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.doubles.host_tree import A6000, HostTree, kpro5
from tests.doubles.machine import layers, nvidia
from tests.doubles.machine.boot import CONTAINER_ROOT
from tests.doubles.machine.elf import library
from tests.doubles.machine.nvidia import DRIVER
from tests.doubles.machine.packages import Package, lay_out

_NODE = re.compile(r"c (\d+):(\d+)\n")
_EXPORTER = """#!/usr/bin/python3 -IS
import http.server
class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"node_memory_MemTotal_bytes 1.0\\n")
http.server.HTTPServer(("127.0.0.1", 9100), Metrics).serve_forever()
"""
_DOCKER = """#!/usr/bin/python3 -IS
import json, os, sys
log = "json-file"
if os.path.exists("/etc/docker/daemon.json"):
    log = json.load(open("/etc/docker/daemon.json")).get("log-driver", log)
print(json.dumps({"ServerVersion": "26.1.5", "LoggingDriver": log}))
"""
_DOCKERD = """#!/usr/bin/python3 -IS
import json, sys
words = sys.argv[1:]
if "--version" in words:
    print("Docker version 26.1.5+dfsg1, build a72d7cd")
elif "--validate" in words:
    json.load(open(words[words.index("--config-file") + 1]))
"""


def _unit(program: str, kind: str = "simple") -> str:
    return f"[Service]\nType={kind}\nExecStart={program}\n\n[Install]\nWantedBy=multi-user.target\n"


#: What apt can install on every machine.
ARCHIVE = (
    *(Package(name, "1.0-1") for name in ("dkms", "gcc", "make", "libc6-dev", "pkg-config", "curl", "ca-certificates")),
    Package("python3-debian", "1.0.1"),
    # What an archive has when the version in use is no longer its newest.
    Package("libnvidia-compute-580", "580.173.02-1"),
    Package(
        "ffmpeg",
        "7:7.1.2-0+deb13u1",
        {"/usr/bin/ffmpeg": "#!/bin/sh\n", f"/{nvidia.LIBRARIES}/libavcodec.so.61.19.101": library("libavcodec.so.61")},
        after="ldconfig",
    ),
    Package(
        "docker.io",
        "26.1.5+dfsg1-9+b9",
        {
            "/usr/bin/docker": _DOCKER,
            "/usr/sbin/dockerd": _DOCKERD,
            "/usr/lib/systemd/system/docker.service": _unit("/usr/sbin/dockerd"),
        },
    ),
    Package(
        "prometheus-node-exporter",
        "1.9.0-1",
        {
            "/usr/bin/prometheus-node-exporter": _EXPORTER,
            "/usr/lib/systemd/system/prometheus-node-exporter.service": _unit("/usr/bin/prometheus-node-exporter"),
        },
    ),
    Package(
        "logrotate", "3.22.0-1", {"/usr/sbin/logrotate": '#!/bin/sh\nfor file; do :; done\nexec test -r "$file"\n'}
    ),
)


@dataclass(frozen=True)
class Host:
    """A machine to bring up.

    Attributes:
        hostname: what the kernel calls it.
        lay: writes its files below a folder.
        container: writes the files of its container 129, None where it has none.
    """

    hostname: str
    lay: Callable[[Path], HostTree]
    container: Callable[[Path], None] | None = None


def _finish(own: Path, tree: HostTree) -> HostTree:
    """What every machine gets on top of its tree: real device nodes, real packages, nothing of this computer's own."""
    for path in (*(own / "dev").rglob("*"), *(own / CONTAINER_ROOT / "dev").rglob("*")):
        match = _NODE.fullmatch(path.read_text(encoding="utf-8")) if path.is_file() else None
        if match:
            path.unlink()
            layers.make_node(path, int(match[1]), int(match[2]))
    installed = tuple(Package(name, version, installed=True) for name, version in tree.packages.items())
    lay_out(own, (*installed, *ARCHIVE))
    layers.hide_files(own)
    return tree


def _proxmox(own: Path) -> HostTree:
    """The example host as it is found, container 129 running without a GPU."""
    tree = kpro5(own)
    tree.world.must(["pct", "start", "129"])
    # The installer asks for memory: the machine says how much it has.
    tree.file("/proc/meminfo", "MemTotal:       536870912 kB\nMemFree:        500000000 kB\n")
    return tree


def _found(own: Path) -> HostTree:
    return _finish(own, _proxmox(own))


def _installed(own: Path) -> HostTree:
    """The driver is installed, the cards are where they were."""
    tree = _with_driver(own, _proxmox(own))
    return _finish(own, tree)


def _with_driver(own: Path, tree: HostTree) -> HostTree:
    tree.driver(DRIVER)
    nvidia.lay_userspace(own, DRIVER, nvidia.HOST_PROGRAMS)
    return tree


def _driven(own: Path) -> HostTree:
    """The driver has the two A6000, their nodes stand; the container knows nothing of them yet."""
    tree = _with_driver(own, _proxmox(own))
    for address in ("0000:41:00.0", "0000:41:00.1", "0000:42:00.0", "0000:42:00.1"):
        tree.world.kernel.detach(address)
        tree.file(
            f"/sys/bus/pci/devices/{address}/driver_override", "nvidia\n" if address.endswith("0") else "(null)\n"
        )
    tree.world.must(["modprobe", "nvidia"])
    tree.world.must(["nvidia-modprobe", "-c", "255", "-c", "0", "-c", "1"])
    tree.world.must(["nvidia-modprobe", "-u", "-c", "0"])
    return tree


def _driven_host(own: Path) -> HostTree:
    return _finish(own, _driven(own))


def _given(own: Path) -> HostTree:
    """The container has both A6000 and runs; its libraries are missing."""
    tree = _driven(own)
    tree.world.must(["pct", "stop", "129"])
    nodes = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    words = [word for i, name in enumerate(nodes) for word in (f"-dev{i}", f"/dev/{name},mode=0666")]
    tree.world.must(["pct", "set", "129", *words])
    tree.world.must(["pct", "start", "129"])
    return _finish(own, tree)


def _debian_container(own: Path) -> None:
    """What is the container's own: a Debian of its own packages. /proc and /sys are its host's."""
    (own / "etc").mkdir(exist_ok=True)
    (own / "etc/hostname").write_text("ct129\n", encoding="utf-8")
    (own / "etc/os-release").write_text('ID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n', encoding="utf-8")
    (own / "run/systemd").mkdir(parents=True, exist_ok=True)
    (own / "run/systemd/container").write_text("lxc\n", encoding="utf-8")
    lay_out(own, (Package("libc6", "2.41-12", installed=True), *ARCHIVE))
    layers.hide_files(own)


def _rented(own: Path) -> HostTree:
    """Somebody's container with four of their cards: no systemd, the driver and its libraries are theirs."""
    tree = HostTree(own, hostname="rented1", proxmox=False)
    tree.file("/proc/1/comm", "sh\n").file("/.dockerenv", "")
    tree.file("/proc/meminfo", "MemTotal:       268435456 kB\nMemFree:        200000000 kB\n")
    tree.driver(DRIVER)
    for number, bus in enumerate(("01", "02", "41", "42")):
        tree.add_gpu(f"0000:{bus}:00.0", A6000, None, group=None, audio=False)
        tree.node(f"/dev/nvidia{number}", 195, number)
    tree.world.kernel.load("nvidia")
    tree.world.kernel.load("nvidia-uvm")
    nvidia.lay_userspace(own, DRIVER, ("nvidia-smi",))
    tree.node("/dev/nvidiactl", 195, 255).node("/dev/nvidia-uvm", 509, 0).node("/dev/nvidia-uvm-tools", 509, 1)
    return _finish(own, tree)


def _storage(own: Path) -> HostTree:
    """A machine with disks and no GPU."""
    tree = HostTree(own, hostname="depot", proxmox=False)
    tree.file("/proc/meminfo", "MemTotal:       67108864 kB\nMemFree:        60000000 kB\n")
    return _finish(own, tree)


HOSTS = {
    "kpro5": Host("kpro5", _found, _debian_container),
    "kpro5-installed": Host("kpro5", _installed, _debian_container),
    "kpro5-driven": Host("kpro5", _driven_host, _debian_container),
    "kpro5-given": Host("kpro5", _given, _debian_container),
    "rented1": Host("rented1", _rented),
    "depot": Host("depot", _storage),
}
