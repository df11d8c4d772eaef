"""PCI addresses as people, Proxmox and nvidia-smi write them, and the PCI functions that sysfs shows."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .facts import PciFunction
from .world import World

DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})(?:\.(?P<function>[0-7]))?"
)


def normalise(address: str) -> str:
    """`41:00.0`, `0000:41:00.0`, `00000000:41:00.0` (nvidia-smi) -> `0000:41:00.0`; without a function `0000:41:00`.

    Raises:
        ValueError: this is no PCI address.
    """
    match = _ADDRESS.fullmatch(address.strip().lower())
    if match is None:
        raise ValueError(f"{address!r} is no PCI address")
    slot = f"{int(match['domain'] or '0', 16):04x}:{match['bus']}:{match['device']}"
    return f"{slot}.{match['function']}" if match["function"] else slot


def functions_of(address: str, functions: Iterable[PciFunction]) -> tuple[str, ...]:
    """Addresses here that an address means: itself, or every function of the slot when it names none.

    An address of a device that is not here gives nothing; text that is no address gives nothing either, because a
    configuration may hold what this version does not know.
    """
    try:
        wanted = normalise(address)
    except ValueError:
        return ()
    whole_slot = "." not in wanted
    return tuple(f.address for f in functions if (f.slot if whole_slot else f.address) == wanted)


def read_functions(world: World) -> tuple[PciFunction, ...]:
    """Every function below /sys/bus/pci/devices, by address.

    See Documentation/ABI/testing/sysfs-bus-pci of the kernel for the attributes.
    """
    return tuple(_function(world, address) for address in world.names(DEVICES))


def _function(world: World, address: str) -> PciFunction:
    folder = f"{DEVICES}/{address}"

    def value(name: str) -> str:
        return (world.read(f"{folder}/{name}") or "").strip()

    def digits(name: str) -> str:
        return value(name)[2:].lower()

    subsystem = f"{digits('subsystem_vendor')}:{digits('subsystem_device')}"
    group = linked_name(world, f"{folder}/iommu_group")
    return PciFunction(
        address=address,
        class_code=digits("class"),
        vendor=digits("vendor"),
        device=digits("device"),
        subsystem="" if subsystem in (":", "0000:0000") else subsystem,
        driver=linked_name(world, f"{folder}/driver"),
        override=override_of(world, address),
        group=int(group) if group and group.isdigit() else None,
        boot_vga=value("boot_vga") == "1",
    )


def override_of(world: World, address: str) -> str | None:
    """`driver_override` of a function; the kernel writes `(null)` where nothing is set."""
    text = (world.read(f"{DEVICES}/{address}/driver_override") or "").strip()
    return None if text in ("", "(null)") else text


def linked_name(world: World, path: str) -> str | None:
    """Last part of what a symbolic link points to; None where there is no link."""
    target = world.link(path)
    return target.rstrip("/").rsplit("/", 1)[-1] if target else None
