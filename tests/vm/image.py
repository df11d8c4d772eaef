"""The image: built once a run, or kept in a folder that the environment names."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from .machine import Image
from .requirements import Debian

#: A folder in which the image stays, for work on the tests; it is used again as it is when it is there.
KEEP_VARIABLE = "DRAFTHOUSE_VM_IMAGE"
DOUBLES = Path(__file__).parents[1] / "doubles" / "vm"
_SCRIPT = Path(__file__).with_name("build-image.sh")
LIMIT_S = 900


class ImageError(Exception):
    """The image could not be built; the message ends with what the build said."""


def kept() -> Path | None:
    """The folder that the environment names, None without it."""
    named = os.environ.get(KEEP_VARIABLE)
    return Path(named) if named else None


def build(folder: Path, debian: Debian, version: str) -> tuple[Image, float]:
    """Build the image, unless the folder holds one; returns it and the seconds that it took.

    Args:
        version: of the NVIDIA driver's double, whose libraries are compiled along.

    Raises:
        ImageError: the build failed or took longer than `LIMIT_S`.
    """
    image = Image(folder)
    if (folder / "root.ext4").exists():
        return image, 0.0
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(image.key)], check=True)
    # A namespace of its own: whatever happens to the build, none of its mounts stays behind.
    argv = ["unshare", "--mount", "--propagation", "private", "bash", str(_SCRIPT), str(folder), str(DOUBLES)]
    argv += [debian.suite, str(debian.sources), f"{image.key}.pub", version]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        raise ImageError(f"not built within {LIMIT_S} s") from late
    if done.returncode:
        raise ImageError("\n".join((done.stdout + done.stderr).splitlines()[-25:]))
    return image, time.monotonic() - begun
