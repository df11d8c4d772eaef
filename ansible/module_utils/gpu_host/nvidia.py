"""What the NVIDIA driver tells: in /proc while it is loaded, on disk and to DKMS whether it is or not.

Sources: README of the driver, chapter "/proc interface"; nvidia-modprobe and libnvidia-container for device nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .facts import DeviceNode, DkmsBuild, NvidiaGpu
from .pci import normalise
from .world import World

PROC = "/proc/driver/nvidia"
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")
_DKMS = re.compile(
    r"^(?P<module>[^/,\s]+)[/,]\s*(?P<version>[^,:\s]+)(?:,\s*(?P<kernel>[^,:\s]+),\s*[^,:\s]+)?:\s*(?P<state>\w+)"
)


def loaded_version(text: str) -> tuple[str, str]:
    """`/proc/driver/nvidia/version` -> version and kind, `open` or `proprietary`; empty texts for an empty one."""
    line = next((line for line in text.splitlines() if line.startswith("NVRM version:")), "")
    match = _VERSION.search(line)
    if match is None:
        return "", ""
    return match[1], "open" if "Open Kernel Module" in line else "proprietary"


def information(address: str, text: str) -> NvidiaGpu:
    """`/proc/driver/nvidia/gpus/<address>/information`; without `Device Minor` the card is not initialised."""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    minor, uuid = fields.get("Device Minor", ""), fields.get("GPU UUID", "")
    return NvidiaGpu(
        address=address,
        minor=int(minor) if minor.isdigit() else None,
        model=fields.get("Model", ""),
        uuid="" if "?" in uuid else uuid,
    )


def read_gpus(world: World) -> tuple[NvidiaGpu, ...]:
    """The cards that the loaded driver has, by address."""
    return tuple(
        information(normalise(name), world.read(f"{PROC}/gpus/{name}/information") or "")
        for name in world.names(f"{PROC}/gpus")
    )


def character_majors(text: str) -> dict[str, int]:
    """`/proc/devices` -> name to major of character devices; 195 is `nvidia`, before driver 550 `nvidia-frontend`."""
    characters = text.partition("Block devices:")[0]
    return {name: int(number) for number, name in re.findall(r"^\s*(\d+)\s+(\S+)", characters, re.MULTILINE)}


def nvidia_major(majors: Mapping[str, int]) -> int:
    """Major of the cards' nodes; 195 is NVIDIA's for good, so it is known before the driver is loaded."""
    return majors.get("nvidia", majors.get("nvidia-frontend", 195))


def read_nodes(world: World) -> tuple[DeviceNode, ...]:
    """What stands at /dev/nvidia*, folders left out."""
    found = ((path, world.device(path)) for path in world.glob("/dev/nvidia*"))
    return tuple(DeviceNode(path, *device) for path, device in found if device and device[0] != "dir")


def dkms_builds(text: str) -> tuple[DkmsBuild, ...]:
    """Lines of `dkms status`: `nvidia/580.126.09, 6.17.2-1-pve, x86_64: installed`, or `nvidia, 580…, …` before 3.0."""
    matches = (_DKMS.match(line.strip()) for line in text.splitlines())
    return tuple(DkmsBuild(m["module"], m["version"], m["kernel"] or "", m["state"]) for m in matches if m)


def read_module_versions(world: World, kernels: Iterable[str]) -> dict[str, str]:
    """Kernel release -> version of its nvidia module on disk, kernels without one left out."""
    found = {}
    for kernel in kernels:
        result = world.run(["modinfo", "-k", kernel, "-F", "version", "nvidia"], 20)
        version = result.out.strip() if result.ok else ""
        if version:
            found[kernel] = version
    return found


def read_firmware(world: World) -> tuple[str, ...]:
    """Versions below /lib/firmware/nvidia; the other names there are chips of nouveau."""
    return tuple(name for name in world.names("/lib/firmware/nvidia") if _VERSION.fullmatch(name))
