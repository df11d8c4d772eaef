"""A host tree that is mounted: its device nodes are real, so reading one is not reading a file."""

from __future__ import annotations

import stat
from pathlib import Path

from tests.doubles.host_tree import TreeWorld


class MachineWorld(TreeWorld):
    """`TreeWorld` on the root of a machine double."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, real_nodes=True)

    def read(self, path: str) -> str | None:
        """As `World.read`, but a device or a pipe has no text: /dev/zero never ends."""
        try:
            regular = stat.S_ISREG(Path(self.path(path)).stat().st_mode)
        except OSError:
            return None
        return super().read(path) if regular else None
