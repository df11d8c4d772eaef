"""Test double of a GPU host: a folder that looks like its root, and a `World` on it that behaves like its kernel."""

from __future__ import annotations

from tests.doubles.host.kernel import TreeWorld
from tests.doubles.host.tree import A6000, RTX3090, HostTree, kpro5

__all__ = ["A6000", "RTX3090", "HostTree", "TreeWorld", "kpro5"]
