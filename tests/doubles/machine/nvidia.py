"""The double of NVIDIA's installer and of what it puts on a machine: libraries that load, programs that answer.

The `.run` file itself is a shell script that calls the stand-in `nvidia-installer`, which ends up here. It takes the
flags of the real one that roles use and, like it, ends with 1 for everything it does not like.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from gpu_host.world import Result
from tests.doubles.machine.elf import library
from tests.doubles.machine.layers import STANDIN

DRIVER = "580.126.09"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
HOST_PROGRAMS = ("nvidia-modprobe", "nvidia-persistenced", "nvidia-smi", "nvidia-uninstall")
CONTAINER_PROGRAMS = ("nvidia-smi", "nvidia-uninstall")
KNOWN_FLAGS = frozenset(
    [
        "-s",
        "--silent",
        "--dkms",
        "--no-dkms",
        "-M",
        "-z",
        "--skip-module-load",
        "--no-rebuild-initramfs",
        "--no-install-compat32-libs",
        "--no-x-check",
        "--allow-installation-with-running-driver",
        "--no-kernel-modules",
        "--no-drm",
        "--no-peermem",
        "--no-systemd",
    ]
)


def runfile(version: str) -> str:
    """Text of the double of `NVIDIA-Linux-x86_64-<version>.run`."""
    return f'#!/bin/sh\n# Test double of the NVIDIA installer {version}.\nexec nvidia-installer {version} "$@"\n'


def unknown_flags(arguments: list[str]) -> list[str]:
    """Flags that the real installer would not take, for the log of the double to complain about."""
    found, skip = [], False
    for word in arguments:
        if skip:
            skip = False
        elif word == "-M":
            skip = True
        elif (
            word.startswith("-") and word not in KNOWN_FLAGS and not word.startswith(("--tmpdir=", "--log-file-name="))
        ):
            found.append(word)
    return found


def lay_userspace(root: Path, version: str, programs: tuple[str, ...]) -> None:
    """Libraries of a version and the programs that come with them; the loader's cache is not brought up to date."""
    folder = root / LIBRARIES
    folder.mkdir(parents=True, exist_ok=True)
    (root / "usr/bin").mkdir(exist_ok=True)
    (folder / f"libcuda.so.{version}").write_bytes(library("libcuda.so.1", {"cuInit": 0}))
    for name in ("libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm"):
        (folder / f"{name}.so.{version}").write_bytes(library(f"{name}.so.1"))
    for name in programs:
        (root / "usr/bin" / name).symlink_to(STANDIN)


def put_userspace(root: Path, version: str, programs: tuple[str, ...]) -> None:
    """What the installer leaves of a version, in place of any other."""
    remove_userspace(root)
    lay_userspace(root, version, programs)
    (root / "var/log/nvidia-installer.log").write_text(f"nvidia-installer: {version} is installed\n", encoding="utf-8")
    ldconfig(root)


def remove_userspace(root: Path) -> None:
    """Everything of `put_userspace`, of whatever version."""
    folder = root / LIBRARIES
    for pattern in ("libcuda.so*", "libnvidia-*.so*"):
        for path in folder.glob(pattern):
            path.unlink()
    for name in HOST_PROGRAMS:
        (root / "usr/bin" / name).unlink(missing_ok=True)
    ldconfig(root)


def ldconfig(root: Path) -> None:
    subprocess.run(["chroot", str(root), "/sbin/ldconfig"], check=True, capture_output=True)


def refuse(root: Path, log: str) -> Result:
    """End as the real installer does: a reason in its log, 1 as status."""
    (root / "var/log/nvidia-installer.log").write_text(f"ERROR: {log}\n", encoding="utf-8")
    return Result(1, "", "ERROR: Installation has failed. Please see the file '/var/log/nvidia-installer.log'.\n")
