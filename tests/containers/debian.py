"""A root file system of Debian from the distribution's own packages: no hub is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path("/etc/apt/sources.list.d/debian.sources")


def why_not() -> str:
    """Why no image can be bootstrapped here; empty when one can."""
    if os.geteuid() != 0:
        return "an image is bootstrapped by root only"
    for program in ("docker", "mmdebstrap"):
        if shutil.which(program) is None:
            return f"{program} is not installed (make container-packages)"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker Engine answers"
    return ""


def bootstrap(packages: str, archive: Path) -> None:
    """Write a tar archive of a Debian with these packages (names, by commas)."""
    # The machine's own sources where it is a Debian, with their mirror; else the distribution's main archive.
    sources = [str(SOURCES)] if SOURCES.is_file() else []
    trimmed = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale")]
    words = ["mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", *trimmed]
    subprocess.run([*words, f"--include={packages}", "bookworm", str(archive), *sources], check=True, timeout=600)
