"""NVIDIA's `.run` installer: its arguments, and how to tell what it did.

Its exit status is 1 for every failure and for every abort, and silent mode answers its questions with defaults, some
of which abort. So nothing here believes the status: the log is read for the reason, the files for the result.
Options: `sh NVIDIA-Linux-x86_64-<version>.run --advanced-options`; archive header options: makeself.
"""

from __future__ import annotations

import re

from .apply import Undo
from .steps import ApplyError, Refusal, Step
from .world import World

LOG = "/var/log/nvidia-installer.log"
UNINSTALLER = "/usr/bin/nvidia-uninstall"
#: Building DKMS modules takes minutes, on a slow machine many.
TIMEOUT_S = 3600

#: The installer unpacks itself here, because /tmp may be small or memory.
FOLDER = "/var/tmp"
#: Free space that it needs: unpacked, and its libraries installed beside that; and what DKMS builds on a host.
LIBRARIES_MB = 1500
MODULES_MB = 300

#: What the installer says before it gives up -> what to do about it.
ABORTS: tuple[tuple[str, str], ...] = (
    (r"Nouveau kernel driver is currently in use", "reboot so that the nouveau blacklist takes effect"),
    (r"appears to (already )?be loaded|already loaded in your kernel", "stop what uses the GPUs, or reboot, first"),
    (r"alternate (method|driver) ?(of installation|installation)?|another NVIDIA.*install", "purge NVIDIA's packages"),
    (r"Unable to find the kernel source tree|kernel headers", "install the headers of the running kernel"),
    (r"cc[^\n]*(not found|does not exist)|Unable to find.*compiler", "install gcc and make"),
    (r"Key was rejected|Required key not available|signed", "enrol the signing key, or switch Secure Boot off"),
    (r"No space left on device|insufficient.*space", "free space in /var/tmp and /usr"),
    (r"Failed to run.*dkms|dkms build|Bad return status", "read make.log below /var/lib/dkms/nvidia"),
    (r"X server", "stop the X server"),
)


def name_of(version: str) -> str:
    return f"NVIDIA-Linux-x86_64-{version}.run"


def host_arguments(path: str, kind: str, beside_running: bool) -> list[str]:
    """Installation with kernel modules through DKMS; the module is loaded later, when the cards are free.

    Args:
        kind: `open` or `proprietary` kernel modules, said explicitly.
        beside_running: another version is loaded and stays until the reboot.
    """
    argv = ["sh", path, "-s", "--dkms", "-M", kind, "--skip-module-load", "--no-rebuild-initramfs"]
    argv += ["--no-install-compat32-libs", "--no-x-check", f"--tmpdir={FOLDER}", f"--log-file-name={LOG}"]
    return [*argv, "--allow-installation-with-running-driver"] if beside_running else argv


def container_arguments(path: str) -> list[str]:
    """Libraries and tools only. `-z`: the nouveau check looks at the host's kernel and stays on without modules."""
    argv = ["sh", path, "-s", "--no-kernel-modules", "--no-dkms", "-z", "--no-install-compat32-libs", "--no-drm"]
    argv += ["--no-peermem", "--no-systemd", "--no-x-check", "--no-rebuild-initramfs"]
    return [*argv, f"--tmpdir={FOLDER}", f"--log-file-name={LOG}"]


def free_mb(world: World, *folders: str) -> int:
    """Free space, MiB, of the file system with the least of it among those of /usr, `FOLDER` and these folders."""
    lines = world.run(["df", "-Pm", "/usr", FOLDER, *folders]).out.splitlines()[1:]
    return min((int(line.split()[3]) for line in lines if len(line.split()) >= 6), default=0)


def space_refusals(free: int, needed: int, fix: str) -> list[Refusal]:
    """There is room for it; a full disk would leave an installation half-way."""
    if free >= needed:
        return []
    return [Refusal("no-space", f"{free} MB are free, the installer needs {needed}", f"/usr, {FOLDER}", fix)]


def sha256_of(world: World, path: str) -> str | None:
    """Checksum of a file of that machine, None where there is none."""
    result = world.run(["sha256sum", path], 300)
    return result.out.split()[0].lstrip("\\") if result.ok and result.out else None


def refusals(path: str, wanted: str, there: str | None) -> list[Refusal]:
    """The installer is the very file that was meant, or it is not run."""
    if there is None:
        return [
            Refusal(
                "no-runfile",
                "the installer is not on this host",
                path or "nvidia_driver_runfile",
                "either put it into the controller's nvidia_driver_cache, or set nvidia_driver_url so that the host "
                "fetches it",
            )
        ]
    if there != wanted.lower():
        return [
            Refusal(
                "runfile-checksum",
                f"the installer has sha256 {there}, not {wanted or 'any that was named'}",
                path,
                "either remove the file so that it is fetched again, or correct nvidia_driver_sha256 from NVIDIA's "
                ".sha256sum beside the download",
            )
        ]
    return []


def reason(world: World, lines: int = 15) -> str:
    """Why the installer gave up: advice where the log has a known abort, and the end of the log in any case."""
    log = world.read(LOG)
    if not log:
        return f"{LOG} was not written"
    advice = next((fix for pattern, fix in ABORTS if re.search(pattern, log, re.IGNORECASE)), "")
    tail = "\n".join(log.strip().splitlines()[-lines:])
    return f"{f'{advice}; ' if advice else ''}the end of {LOG}:\n{tail}"


def uninstall(step: Step, world: World) -> Undo | None:
    """`uninstall`: the `.run` installation whose uninstaller is the target is gone."""
    result = world.run([step.target, "-s"], TIMEOUT_S)
    if world.exists(step.target):
        raise ApplyError(f"the uninstaller ended with {result.rc} and is still there: {reason(world)}")
    return None
