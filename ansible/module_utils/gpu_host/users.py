"""Processes that have a card open: unbinding it would wait for them inside the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .facts import HostFacts, NvidiaGpu, PciFunction
from .nvidia import nvidia_major
from .world import World

#: The persistence daemon holds every card open, and is ours to stop.
PERSISTENCED = "nvidia-persistenced"
#: A removed node stays open under its old name.
_DELETED = " (deleted)"
_CARD = re.compile(r"/dev/nvidia(\d+)(?: \(deleted\))?$", re.MULTILINE)
#: /proc/<pid>/comm is cut at this length.
_COMM_LENGTH = 15


def read_users(
    world: World, functions: Sequence[PciFunction], gpus: Iterable[NvidiaGpu], majors: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """PCI function -> `pid name` of the processes that have its NVIDIA node or its VFIO group or device open.

    Processes in containers are seen from the host, and their nodes are told by number: a bind mount may have given a
    node another name inside. A mapping without an open descriptor is told by name, which is all that /proc shows.
    """
    by_minor = {gpu.minor: gpu.address for gpu in gpus if gpu.minor is not None}
    by_path = dict(_vfio_paths(world, functions))
    if not by_minor and not by_path:
        return {}
    major = nvidia_major(majors)
    found: dict[str, list[str]] = {}
    for pid in sorted(int(name) for name in world.names("/proc") if name.isdigit()):
        held: set[str] = set()
        for descriptor in world.names(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{descriptor}"
            # The name first: it costs no look at the device, and only what is below /dev can be one.
            _, below_dev, name = (world.link(path) or "").rpartition("/dev/")
            if not below_dev or name.startswith(("pts/", "null", "urandom")):
                continue
            held.update(by_path.get(f"/dev/{name.partition(_DELETED)[0]}", ()))
            device = world.device(path, follow=True)
            if device and device[:2] == ("char", major) and device[2] in by_minor:
                held.add(by_minor[device[2]])
        mapped = _CARD.findall(world.read(f"/proc/{pid}/maps") or "") if by_minor else []
        held.update(by_minor[int(minor)] for minor in mapped if int(minor) in by_minor)
        for address in held:
            found.setdefault(address, []).append(f"{pid} {_name(world, pid)}")
    return {address: tuple(found[address]) for address in sorted(found)}


def is_persistenced(user: str) -> bool:
    """Whether `pid name` is the persistence daemon."""
    return user.endswith(f" {PERSISTENCED}")


def others_on(facts: HostFacts, address: str) -> tuple[str, ...]:
    """`pid name` of the processes that hold this function open, the persistence daemon left out."""
    return tuple(user for user in facts.users.get(address, ()) if not is_persistenced(user))


def gpu_users(facts: HostFacts) -> dict[str, tuple[str, ...]]:
    """`others_on` of every card of the NVIDIA driver that somebody holds open."""
    found = {gpu.address: others_on(facts, gpu.address) for gpu in facts.gpus}
    return {address: users for address, users in found.items() if users}


def _vfio_paths(world: World, functions: Sequence[PciFunction]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """/dev/vfio/<group> for the whole group, and /dev/vfio/devices/<name> for one function (iommufd)."""
    on_vfio = [f for f in functions if f.driver and f.driver.replace("-", "_").endswith("vfio_pci")]
    for group in sorted({f.group for f in on_vfio if f.group is not None}):
        yield f"/dev/vfio/{group}", tuple(f.address for f in on_vfio if f.group == group)
    for function in on_vfio:
        for name in world.names(f"/sys/bus/pci/devices/{function.address}/vfio-dev"):
            yield f"/dev/vfio/devices/{name}", (function.address,)


def _name(world: World, pid: int) -> str:
    comm = (world.read(f"/proc/{pid}/comm") or "?").strip()
    if len(comm) < _COMM_LENGTH:
        return comm
    program = (world.read(f"/proc/{pid}/cmdline") or "").split("\0", 1)[0].rsplit("/", 1)[-1]
    return program if program.startswith(comm) else comm
