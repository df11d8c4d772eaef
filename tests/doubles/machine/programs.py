"""The programs of a machine double: those of its host tree, systemd, NVIDIA's, and commands inside its container.

What the kernel and Proxmox VE do is played by `tests.doubles.host`. apt, dpkg, ldconfig and the tools for users are the
real ones; stand-ins in front of those that change something only note that they were called.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_host.world import Result
from tests.doubles.host import containers
from tests.doubles.host.commands import PROGRAMS, classify
from tests.doubles.host.kernel import TreeWorld, uuid_of
from tests.doubles.machine import layers, nvidia
from tests.doubles.machine.systemd import READERS, Systemd

#: Real programs that change a machine: noted, then run.
REAL = {name: f"/usr/bin/{name}" for name in ("apt-get", "apt-mark", "dpkg", "chpasswd", "gpasswd", "passwd")} | {
    name: f"/usr/sbin/{name}" for name in ("groupadd", "groupdel", "groupmod", "useradd", "userdel", "usermod")
}
#: Stand-ins beside those of the host tree.
OWN = (
    "dmesg",
    "lsinitramfs",
    "mokutil",
    "mount",
    "nvidia-installer",
    "pvesh",
    "pveversion",
    "reboot",
    "shutdown",
    "sysctl",
    "systemctl",
    "systemd-detect-virt",
    "umount",
)
#: Programs of the host tree that are not stand-ins here: dpkg is real, nvidia-modprobe comes with the driver.
NAMES = tuple(sorted({*PROGRAMS, *OWN, *REAL} - {"dpkg-query", "nvidia-modprobe"}))
IN_CONTAINER = ("nvidia-installer", "systemctl", "systemd-detect-virt", *REAL)
HOST = "host"
_CLEAN = (
    "/usr/bin/env",
    "-i",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/root",
    "LC_ALL=C",
)


def kind(argv: Sequence[str]) -> str:
    """`reader` or `mutator`: could this call change the machine?"""
    name, words = argv[0].rsplit("/", 1)[-1], list(argv[1:])
    if name == "pct" and words[:1] == ["exec"]:
        return kind(words[words.index("--") + 1 :])
    if together := containers.asked_together(list(argv)):
        return "reader" if all(kind(question) == "reader" for question in together) else "mutator"
    verbs = [word for word in words if not word.startswith("-")]
    if name == "systemctl":
        return "reader" if not verbs or verbs[0] in READERS or "--version" in words else "mutator"
    if name in ("apt-get", "dpkg"):
        looks = {"-s", "--simulate", "--dry-run", "--just-print", "--print-architecture", "-l", "-L", "-S", "--version"}
        return "reader" if looks & set(words) else "mutator"
    if name == "apt-mark":
        return "reader" if verbs[:1] and verbs[0].startswith("show") else "mutator"
    if name in ("systemd-detect-virt", "lsinitramfs", "nvidia-smi", "pveversion", "sha256sum"):
        return "reader"
    if name == "python3":  # how the libraries are asked whether CUDA starts
        return "reader" if words[:1] == ["-c"] and words[1].endswith(".cuInit(0))") else "mutator"
    if name in ("mount", "sysctl") and not verbs:
        return "reader"
    return classify([name, *words])


class Programs:
    """Answers the stand-ins of a host and of the container on it.

    Args:
        world: the host's tree.
        places: `host` and vmid -> root of that machine as this process sees it.
        faults: name -> value, set by tests while the machine runs; see `_installer`.
    """

    def __init__(self, world: TreeWorld, places: dict[str, Path], faults: dict[str, Any]) -> None:
        self.world = world
        self.places = places
        self.faults = faults
        self.turn = threading.RLock()
        offline = (world.read("/proc/1/comm") or "").strip() != "systemd"
        self.systemd = {
            place: Systemd(
                root, partial(self.inside, place), partial(self._beside, place), partial(self._stopped, place), offline
            )
            for place, root in places.items()
        }

    def run(self, place: str, argv: list[str]) -> Result | str:
        """Outcome of a stand-in's call, or the path of the real program that takes over."""
        name = argv[0]
        if name in REAL:
            return REAL[name]
        if name == "systemctl":
            return self.systemd[place].run(argv)
        if name == "pct" and argv[1:2] == ["exec"]:
            return self._exec(argv)
        with self.turn:
            own = getattr(self, f"_{name.replace('-', '_')}", None)
            return own(place, argv) if own else self.world.answer(argv)

    def inside(self, place: str, argv: Sequence[str], timeout_s: float = 120.0) -> Result:
        """Run a program for real in a machine's root."""
        done = subprocess.run(
            self._command(place, argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def _beside(self, place: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command(place, argv), stdin=subprocess.DEVNULL)

    def _command(self, place: str, argv: Sequence[str]) -> list[str]:
        return ["chroot", str(self.places[place]), *_CLEAN, *argv]

    def _exec(self, argv: list[str]) -> Result:
        vmid = argv[2]
        if vmid not in self.places or not containers.runs(self.world, vmid):
            return Result(255, "", f"CT {vmid} is not running\n")
        return self.inside(vmid, argv[argv.index("--") + 1 :])

    def _pct(self, _place: str, argv: list[str]) -> Result:
        result = self.world.answer(argv)
        if argv[2:3] and argv[2] in self.places:
            layers.basic_nodes(self.places[argv[2]])  # the tree's container loses all of its nodes when it stops
        return result

    # -- NVIDIA ----------------------------------------------------------------------------------------------------

    def _nvidia_installer(self, place: str, argv: list[str]) -> Result:
        """Fault `installer`: a text; the installer aborts with it in its log."""
        version, arguments, root = argv[1], argv[2:], self.places[place]
        unknown = nvidia.unknown_flags(arguments)
        if unknown:
            return nvidia.refuse(root, f"Invalid commandline, please run with --help: {' '.join(unknown)}")
        if "installer" in self.faults:
            return nvidia.refuse(root, str(self.faults["installer"]))
        if "--no-kernel-modules" not in arguments:
            release = self.world.kernel.release
            if not self.world.exists(f"/lib/modules/{release}/build"):
                return nvidia.refuse(root, "Unable to find the kernel source tree for the currently running kernel.")
            Path(self.world.path(f"/usr/src/nvidia-{version}")).mkdir(parents=True, exist_ok=True)
            source = Path(self.world.path(f"/var/lib/dkms/nvidia/{version}/source"))
            source.parent.mkdir(parents=True, exist_ok=True)
            if not source.is_symlink():
                source.symlink_to(f"/usr/src/nvidia-{version}")
            built = self.world.answer(["dkms", "install", f"nvidia/{version}", "-k", release])
            if not built.ok:
                return nvidia.refuse(root, f"Failed to run `dkms`: {built.err}")
            self.world.write(f"/lib/firmware/nvidia/{version}/gsp_ga10x.bin", "")
        nvidia.put_userspace(root, version, nvidia.HOST_PROGRAMS if place == HOST else nvidia.CONTAINER_PROGRAMS)
        return Result(0, "", "")

    def _nvidia_uninstall(self, place: str, _argv: list[str]) -> Result:
        if place == HOST:
            for path in self.world.glob("/var/lib/dkms/nvidia/*/source"):
                version = path.split("/")[-2]
                self.world.answer(["dkms", "remove", f"nvidia/{version}", "--all"])
                for left in (f"/usr/src/nvidia-{version}", f"/lib/firmware/nvidia/{version}"):
                    subprocess.run(["rm", "-rf", self.world.path(left)], check=True)
        nvidia.remove_userspace(self.places[place])
        return Result(0, "", "")

    def _nvidia_smi(self, place: str, argv: list[str]) -> Result:
        """`-L`: the cards whose nodes stand where it is called; with libraries of another version NVML's own error."""
        loaded = re.search(r"\s(\d{3}\.\d+(?:\.\d+)?)\s", self.world.read("/proc/driver/nvidia/version") or "")
        libraries = [path.name for path in (self.places[place] / nvidia.LIBRARIES).glob("libnvidia-ml.so.*.*")]
        if loaded is None:
            return Result(9, "", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
        if libraries != [f"libnvidia-ml.so.{loaded[1]}"]:
            return Result(18, "Failed to initialize NVML: Driver/library version mismatch\n", "")
        lines = []
        for address, minor in sorted(self.world.kernel.minors().items()):
            if (self.places[place] / f"dev/nvidia{minor}").is_char_device():
                text = self.world.read(f"/proc/driver/nvidia/gpus/{address}/information") or ""
                model = re.search(r"Model:\s*(.*)", text)
                lines.append(f"GPU {len(lines)}: {model[1] if model else '?'} (UUID: {uuid_of(address)})\n")
        return Result(0, "".join(lines) or "No devices found.\n", "")

    def _nvidia_persistenced(self, _place: str, _argv: list[str]) -> Result:
        self.world.write("/proc/4242/comm", "nvidia-persiste\n")
        self.world.write("/proc/4242/cmdline", "/usr/bin/nvidia-persistenced\0--user\0nvidia-persistenced\0")
        descriptors = Path(self.world.path("/proc/4242/fd"))
        descriptors.mkdir(exist_ok=True)
        for number, minor in enumerate(sorted(self.world.kernel.minors().values()), 3):
            (descriptors / str(number)).unlink(missing_ok=True)
            (descriptors / str(number)).symlink_to(f"/dev/nvidia{minor}")
        return Result(0, "", "")

    def _stopped(self, place: str, unit: str) -> None:
        if place == HOST and unit == "nvidia-persistenced.service":
            subprocess.run(["rm", "-rf", self.world.path("/proc/4242")], check=True)

    # -- the rest --------------------------------------------------------------------------------------------------

    def _systemd_detect_virt(self, place: str, _argv: list[str]) -> Result:
        return Result(1, "none\n", "") if place == HOST else Result(0, "lxc\n", "")

    def _mokutil(self, _place: str, argv: list[str]) -> Result:
        if "--test-key" in argv:
            return Result(1, f"{argv[-1]} is not enrolled\n", "")
        return Result(0, "SecureBoot disabled\n", "")

    def _dmesg(self, _place: str, _argv: list[str]) -> Result:
        return Result(0, "", "")

    def _lsinitramfs(self, _place: str, _argv: list[str]) -> Result:
        found = [*self.world.glob("/etc/udev/rules.d/*"), *self.world.glob("/etc/modprobe.d/*")]
        return Result(0, "".join(f"{path[1:]}\n" for path in found), "")
