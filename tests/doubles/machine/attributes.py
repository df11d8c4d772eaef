"""The kernel behind `/sys/bus/pci`: attributes that act when they are written to.

`bind`, `unbind`, `new_id`, `remove_id` and `drivers_probe` are pipes whose other end is process 1; what is written
to them is given to `TreeWorld.poke`, which knows what the kernel does then. Unlike in sysfs, a write returns before it
has had its effect and its errors do not reach the writer: code that reads the world back, as all of ours must, cannot
tell.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tests.doubles.host_tree import TreeWorld

ACTING = ("drivers_probe", "drivers/*/bind", "drivers/*/unbind", "drivers/*/new_id", "drivers/*/remove_id")


class Attributes:
    """Pipes in place of the acting attributes of a tree."""

    def __init__(self, world: TreeWorld) -> None:
        self.world = world
        self._path_of: dict[int, str] = {}

    def open(self) -> list[int]:
        """Descriptors to wait for; new drivers bring new ones."""
        known = set(self._path_of.values())
        for pattern in ACTING:
            for path in self.world.glob(f"/sys/bus/pci/{pattern}"):
                if path not in known:
                    self._path_of[self._pipe(path)] = path
        return list(self._path_of)

    def _pipe(self, path: str) -> int:
        real = self.world.path(path)
        if not stat.S_ISFIFO(os.lstat(real).st_mode):
            Path(real).unlink()
            os.mkfifo(real, 0o200)
        # Opened for both ways, so the pipe never reports an end and a writer never finds nobody listening.
        return os.open(real, os.O_RDWR | os.O_NONBLOCK)

    def settle(self) -> None:
        """Let `driver_override` read as the kernel would say it after what was written there."""
        for path in self.world.glob("/sys/bus/pci/devices/*/driver_override"):
            text = self.world.read(path)
            if text and text != "(null)\n" and (text == "\n" or not text.endswith("\n")):
                self.world.poke(path, text)

    def written(self, descriptor: int) -> None:
        """Let the kernel act on what was written."""
        text = os.read(descriptor, 4096).decode()
        path = self._path_of[descriptor]
        for word in text.split("\n"):
            if word.strip():
                self.world.poke(path, word)
