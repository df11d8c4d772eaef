"""What the virtual machine tier needs of this machine, and the plain reason where it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Overrides: an apt sources file of a Debian release, and that release's code name.
SOURCES_VARIABLE, SUITE_VARIABLE = "DRAFTHOUSE_VM_SOURCES", "DRAFTHOUSE_VM_SUITE"
#: Program -> Debian package that has it.
PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mke2fs": "e2fsprogs",
    "ssh": "openssh-client",
    "unshare": "util-linux",
}


@dataclass(frozen=True)
class Debian:
    """A release of Debian and where its packages come from.

    Attributes:
        suite: code name, such as `bookworm`.
        sources: apt sources file, one-line or deb822.
    """

    suite: str
    sources: Path


@cache
def debian() -> Debian | None:
    """The release to build from: the one named by the environment, else this machine's own."""
    named = os.environ.get(SOURCES_VARIABLE)
    if named:
        return Debian(os.environ.get(SUITE_VARIABLE, "bookworm"), Path(named))
    lines = Path("/etc/os-release").read_text().splitlines() if Path("/etc/os-release").exists() else []
    release = dict(line.split("=", 1) for line in lines if "=" in line)
    if release.get("ID", "").strip('"') != "debian":
        return None
    for file in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if file.exists():
            return Debian(release["VERSION_CODENAME"].strip('"'), file)
    return None


@cache
def missing() -> str:
    """Why the tier cannot run here; empty when it can."""
    if os.geteuid() != 0:
        return "building a root file system needs root"
    absent = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if absent:
        return f"not installed: {', '.join(absent)} (`make vm-packages`)"
    if debian() is None:
        return f"this is no Debian: name an apt sources file of a Debian release in {SOURCES_VARIABLE}"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "this machine allows no mount namespaces"
    return ""
