"""What is asked of a host's driver, and what its planner asks the host beside `HostFacts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import apt, runfile
from .kernels import table_of, unfit_headers_pattern
from .steps import Plan, Step
from .users import PERSISTENCED
from .world import World

PERSISTENCE_UNIT = f"{PERSISTENCED}.service"
MODPROBE = "/etc/modprobe.d/drafthouse-nvidia.conf"
HEADER_PREFERENCES = "/etc/apt/preferences.d/drafthouse-kernel-headers"
#: Which kernel was pinned here, so that only that pin is taken back.
PIN_MARKER = "/etc/drafthouse/pinned-kernel"
MOK_KEY = "/var/lib/dkms/mok.pub"
BUILD_TOOLS = ("dkms", "gcc", "make", "libc6-dev", "pkg-config")

MODPROBE_TEXT = "# The NVIDIA driver and nouveau exclude each other.\nblacklist nouveau\noptions nouveau modeset=0\n"


@dataclass(frozen=True)
class ManagedFile:
    """A file of the role, as a whole. `unit`: systemd has to read its units again after a change."""

    path: str
    text: str
    mode: int = 0o644
    unit: bool = False
    why: str = "owned by the role"


@dataclass(frozen=True)
class DriverDesired:
    """What the inventory asks for.

    Attributes:
        version: driver version, `580.126.09`.
        state: `present`, `absent`, or `verified`: look, install nothing (the driver belongs to somebody else).
        minimum: with `verified`, the oldest version that will do.
        source: `runfile` or `apt`.
        kind: kernel modules `open` or `proprietary`; with apt the packages decide.
        runfile, sha256: path of the installer on this host and its checksum.
        packages: with apt, instead of the distribution's own set.
        files: units and scripts that the role owns.
        units: units that start with the host.
        kernels: ranges on top of the table, see `kernels.table_of`.
        pin_kernel: a kernel may be pinned, so that the next boot is one that the driver builds on.
        reboot: the play may reboot this host.
    """

    version: str
    state: str = "present"
    minimum: str = ""
    source: str = "runfile"
    kind: str = "open"
    runfile: str = ""
    sha256: str = ""
    packages: tuple[str, ...] = ()
    files: tuple[ManagedFile, ...] = ()
    units: tuple[str, ...] = ()
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pin_kernel: bool = False
    reboot: bool = False


@dataclass(frozen=True)
class DriverState:
    """What this planner asks the host beside `HostFacts`.

    Attributes:
        distribution: `debian`, `ubuntu`, …
        runfile_sha256: checksum of the installer on this host, None where it is not there.
        uninstaller: a `.run` installation is on this host.
        free_mb: free space, MiB, where the installer and DKMS write; on the fullest of these file systems.
        mok_enrolled: the key that DKMS signs with is enrolled in the firmware.
        tools: installed build packages.
        packages: installed packages of the driver -> version.
        available: package -> versions that apt could install.
        held: packages on hold.
        texts: path -> text of the files that the role owns, None where absent.
        enabled, active: units.
        users: names in /etc/passwd.
    """

    distribution: str = ""
    runfile_sha256: str | None = None
    uninstaller: bool = False
    free_mb: int = 0
    mok_enrolled: bool = False
    tools: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    available: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    texts: Mapping[str, str | None] = field(default_factory=dict)
    enabled: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


@dataclass
class DriverPlan(Plan):
    """A plan that may end at a reboot.

    Attributes:
        reboot: why the host must boot before the rest can be planned; empty when it need not.
        wants_runfile: the steps read the installer, which has to be on the host by then.
    """

    reboot: str = ""
    wants_runfile: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "reboot": self.reboot, "wants_runfile": self.wants_runfile}


def gather_state(world: World, desired: DriverDesired) -> DriverState:
    """Read what the planner needs beside `HostFacts`, except the installer's checksum; changes nothing."""
    if desired.state == "verified":
        return DriverState()
    passwd = world.read("/etc/passwd") or ""
    distribution = apt.distribution(world)
    return DriverState(
        distribution=distribution,
        uninstaller=world.exists(runfile.UNINSTALLER),
        free_mb=runfile.free_mb(world, "/lib/modules", "/var/lib"),
        mok_enrolled="already enrolled" in world.run(["mokutil", "--test-key", MOK_KEY]).out,
        tools=tuple(apt.installed(world, *BUILD_TOOLS)),
        packages=apt.driver_packages(world),
        available=apt.available(world, wanted_packages(distribution, desired)) if desired.source == "apt" else {},
        held=apt.held(world),
        texts={path: world.read(path) for path in (*owned_files(desired), PIN_MARKER)},
        enabled=tuple(u for u in desired.units if world.run(["systemctl", "is-enabled", u]).out.strip() == "enabled"),
        active=tuple(u for u in desired.units if world.run(["systemctl", "is-active", u]).out.strip() == "active"),
        users=tuple(line.split(":", 1)[0] for line in passwd.splitlines()),
    )


def wanted_packages(distribution: str, desired: DriverDesired) -> tuple[str, ...]:
    """The packages of the driver where it comes from apt; empty for an unknown distribution."""
    return desired.packages or apt.host_packages(distribution, desired.version, desired.kind)


def owned_files(desired: DriverDesired) -> dict[str, ManagedFile]:
    """All files that the role owns on the host, by path."""
    known = table_of(desired.version, desired.kernels)
    pinned = desired.version if desired.source == "apt" else None
    headers = apt.header_preferences(unfit_headers_pattern(known)) if known else ""
    files = (
        ManagedFile(MODPROBE, MODPROBE_TEXT, why="nouveau would take the cards first"),
        ManagedFile(apt.PREFERENCES, apt.preferences(pinned), why="no other version of the driver has a candidate"),
        ManagedFile(apt.UNATTENDED, apt.unattended_blacklist(), why="unattended upgrades leave the driver alone"),
        ManagedFile(HEADER_PREFERENCES, headers, why="headers of unfit kernels have no candidate"),
    )
    return {file.path: file for file in (*files, *desired.files)}


def reload_step() -> Step:
    return Step("run", "systemd", "its units changed", {"argv": ["systemctl", "daemon-reload"]})
