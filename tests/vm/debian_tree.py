"""A Debian userspace below a folder, with the distribution's non-free component: real apt, dpkg and ldconfig."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpu_host.world import Result, World

from .requirements import Debian

LIMIT_S = 600


class NonFreeError(Exception):
    """The component cannot be had from this machine's sources."""


class TreeWorld(World):
    """Files below a root, and commands in it."""

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, stdin: str | None = None) -> Result:
        return super().run(["chroot", self.root, *argv], timeout_s, stdin)


def with_non_free(sources: str) -> str:
    """An apt sources file with `contrib` and `non-free` beside every `main`."""
    return re.sub(r"\bmain\b", "main contrib non-free", sources)


def build(folder: Path, debian: Debian) -> TreeWorld:
    """Install a minimal Debian into an empty folder, with the lists of all components.

    Raises:
        NonFreeError: apt cannot fetch the lists of `non-free`.
    """
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", "--dpkgopt=force-unsafe-io"]
    argv += [debian.suite, str(folder), str(debian.sources)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    # Names resolve in there as they do here.
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", folder / "etc" / name)
    for file in (folder / "etc/apt/sources.list", *(folder / "etc/apt/sources.list.d").iterdir()):
        file.unlink(missing_ok=True)
    sources = folder / f"etc/apt/sources.list.d/all{debian.sources.suffix}"
    sources.write_text(with_non_free(debian.sources.read_text()))
    world = TreeWorld(str(folder))
    lists = world.run(["apt-get", "update", "-o", "APT::Update::Error-Mode=any"], LIMIT_S)
    if not lists.ok:
        raise NonFreeError(lists.tail(3))
    return world
