"""NVIDIA device nodes inside a running container, and whether it has those that its configuration lists.

A change of `devN` keys waits in the section for pending changes until the next start; raw keys stand in the file at
once and take effect at the next start as well. So the configuration does not tell what the container has now.
"""

from __future__ import annotations

from collections.abc import Mapping

from .facts import Container, DeviceNode, HostFacts
from .lxc_config import NVIDIA_PREFIX, upcoming_paths
from .world import World

#: What stands inside the running container at /dev/nvidia*, by path.
Inside = Mapping[str, DeviceNode]
#: Lists them, by one command.
LISTING = ("sh", "-c", "stat -c '%n|%F|%t|%T' /dev/nvidia* 2>/dev/null; true")


def look_inside(container: World) -> dict[str, DeviceNode] | None:
    """What stands at /dev/nvidia* in the running container; None when it cannot be asked."""
    result = container.run(LISTING, 30)
    if not result.ok:
        return None
    found = {}
    for line in result.out.splitlines():
        path, kind, major, minor = line.strip().split("|")
        is_device = kind.startswith("character")
        name = "char" if is_device else "file" if kind.startswith("regular") else "other"
        found[path] = DeviceNode(path, name, int(major or "0", 16), int(minor or "0", 16))
    return found


def inside_differs(nodes: Mapping[str, tuple[int, int]], inside: Inside) -> str:
    """Why a running container does not have exactly these nodes (path -> major, minor); empty when it has."""
    for path, numbers in nodes.items():
        node = inside.get(path)
        if node is None:
            return f"{path} is not inside yet"
        if (node.kind, node.major, node.minor) != ("char", *numbers):
            return f"{path} inside is not the device {numbers[0]}:{numbers[1]}"
    extra = [node.path for node in inside.values() if node.kind == "char" and node.path not in nodes]
    return f"{extra[0]} is still inside" if extra else ""


def awaits_restart(host: HostFacts, container: Container, inside: Inside | None) -> str:
    """Why a running container has other NVIDIA nodes than after its next start; empty when it has the same.

    Args:
        inside: as `look_inside` found it; None, when the container could not be asked, tells nothing.
    """
    numbers = {node.path: (node.major, node.minor) for node in host.nodes if node.kind == "char"}
    listed = sorted(path for path in upcoming_paths(container) if path.startswith(NVIDIA_PREFIX))
    return "" if inside is None else inside_differs({p: numbers[p] for p in listed if p in numbers}, inside)
