"""What Proxmox VE's own files say: who names which device, who runs, and whether the cluster takes writes.

Files instead of `qm` and `pct`, which take about a second each because they load all of Proxmox VE's Perl: these are
the files that those programs read themselves (PVE::QemuServer::Helpers, PVE::LXC, PVE::QemuServer::PCI).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .facts import Container, ContainerEntry, PciFunction, VmClaim
from .pci import functions_of
from .world import World

VM_CONFIGS = "/etc/pve/qemu-server"
CONTAINER_CONFIGS = "/etc/pve/lxc"
MAPPING = "/etc/pve/mapping/pci.cfg"
MEMBERS = "/etc/pve/.members"
RESERVATIONS = "/run/qemu-server/pci-id-reservations"

_SECTION = re.compile(r"^\[(?P<name>.+)\]\s*$")
_LINE = re.compile(r"^\s*(?P<key>[^\s:=#]+)\s*[:=]\s*(?P<value>.*?)\s*$")
_HOSTPCI = re.compile(r"hostpci\d+")
_DEV = re.compile(r"dev\d+")
#: QEMU arguments that a configuration hands through as they are.
_ARGUMENT = re.compile(r"vfio-pci[^\s]*?,(?:host=|sysfsdev=/sys/bus/pci/devices/)(?P<address>[0-9a-fA-F:.]+)")
#: LXC keys that are about devices; cgroup v1 keys have no effect but tell of an old assignment.
_RAW_KEYS = ("lxc.cgroup2.devices.allow", "lxc.cgroup.devices.allow", "lxc.mount.entry")


@dataclass
class Section:
    """One section of a guest's configuration: keys and values in file order."""

    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def get(self, key: str) -> str:
        """The last value of a key, empty when it is absent."""
        return next((value for name, value in reversed(self.lines) if name == key), "")


def sections(text: str) -> list[Section]:
    """A guest's configuration: `main`, `pending`, `snapshot NAME` in file order.

    Comments hold the description. `[special:…]` sections are Proxmox VE's own notes, no state that could come back.
    """
    found = [Section("main")]
    for line in text.splitlines():
        header = _SECTION.match(line)
        if header:
            found.append(Section(_section_name(header["name"])))
            continue
        match = None if line.startswith("#") else _LINE.match(line)
        if match:
            found[-1].lines.append((match["key"], match["value"]))
    return [section for section in found if section.name]


def _section_name(header: str) -> str:
    if header.lower() in ("pending", "pve:pending"):
        return "pending"
    return "" if header.lower().startswith(("special:", "pve:")) else f"snapshot {header}"


# -- mappings ----------------------------------------------------------------------------------------------------------


def mappings(text: str, node: str) -> dict[str, tuple[str, ...]]:
    """`/etc/pve/mapping/pci.cfg`: name -> addresses on this node; other nodes' entries are about other machines.

    Source: PVE::Mapping::PCI. A `path` may name several functions, joined by `;`.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.strip() and not line[0].isspace() and not line.startswith("#"):
            name = line.strip().rstrip(":").rpartition(":")[2].strip()
            found[name] = []
        elif name and line.split()[:1] == ["map"]:
            options = _options(line.strip()[3:].strip())
            if options.get("node") == node:
                found[name] += [path for path in options.get("path", "").split(";") if path]
    return {name: tuple(paths) for name, paths in found.items()}


def _options(value: str, default_key: str = "") -> dict[str, str]:
    """A property string: `a,pcie=1` with the default key `host` -> {"host": "a", "pcie": "1"}."""
    options: dict[str, str] = {}
    for part in value.split(","):
        key, equals, text = part.strip().partition("=")
        options[key if equals else default_key] = text if equals else key
    return options


# -- virtual machines --------------------------------------------------------------------------------------------------


def hostpci(value: str, known: Mapping[str, Sequence[str]]) -> tuple[tuple[str, ...], str | None]:
    """A `hostpciN` value -> addresses as written, and the name of the mapping that it goes through.

    Forms: `41:00.0`, `host=0000:41:00`, `0000:41:00.0;0000:42:00.0` (functions of one entry, or alternatives), and
    `mapping=NAME`; options follow. Source: PVE::QemuServer::PCI.
    """
    options = _options(value, "host")
    if "mapping" in options:
        return tuple(known.get(options["mapping"], ())), options["mapping"]
    return tuple(part.strip() for part in options.get("host", "").split(";") if part.strip()), None


def vm_claims(
    vmid: int,
    text: str,
    functions: Sequence[PciFunction],
    known: Mapping[str, Sequence[str]],
    running: bool = False,
    file: str = "",
) -> tuple[VmClaim, ...]:
    """Devices that one virtual machine names, in its main section, its pending changes and its snapshots.

    An entry that resolves to nothing here stays in the list without addresses: a missing card is worth knowing.
    """
    parts = sections(text)
    onboot = parts[0].get("onboot") == "1"
    claims = []
    for section in parts:
        for key, value, addresses, mapping in _named(section, known):
            present = [found for address in addresses for found in functions_of(address, functions)]
            claims.append(
                VmClaim(
                    vmid=vmid,
                    key=key,
                    section=section.name,
                    value=value,
                    addresses=tuple(dict.fromkeys(present)),
                    mapping=mapping,
                    running=running,
                    onboot=onboot,
                    file=file,
                )
            )
    return tuple(claims)


def _named(
    section: Section, known: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, tuple[str, ...], str | None]]:
    for key, value in section.lines:
        if _HOSTPCI.fullmatch(key):
            addresses, mapping = hostpci(value, known)
            yield key, value, addresses, mapping
        elif key == "args":
            addresses = tuple(match["address"] for match in _ARGUMENT.finditer(value))
            if addresses:
                yield key, value, addresses, None


def read_claims(world: World, node: str, functions: Sequence[PciFunction]) -> tuple[VmClaim, ...]:
    """Devices named by the virtual machines of this node."""
    known = mappings(world.read(MAPPING) or "", node)
    claims: list[VmClaim] = []
    for vmid, path, text in _guests(world, VM_CONFIGS):
        claims += vm_claims(vmid, text, functions, known, vm_runs(world, vmid), path)
    return tuple(claims)


def _guests(world: World, folder: str) -> Iterator[tuple[int, str, str]]:
    numbers = [int(name[:-5]) for name in world.names(folder) if re.fullmatch(r"\d+\.conf", name)]
    for vmid in sorted(numbers):
        path = f"{folder}/{vmid}.conf"
        yield vmid, path, world.read(path) or ""


def vm_runs(world: World, vmid: int) -> bool:
    """The process of /run/qemu-server/<vmid>.pid lives; a number given to somebody else counts as running."""
    pid = (world.read(f"/run/qemu-server/{vmid}.pid") or "").strip()
    return pid.isdigit() and world.exists(f"/proc/{pid}")


def read_reservations(world: World, functions: Sequence[PciFunction], now: float | None = None) -> dict[str, int]:
    """Function -> number of the VM that runs or starts with it.

    Lines are `ADDRESS VMID pid:N`, kept until that process ends, or `ADDRESS VMID time:EXPIRY` while it starts.

    Args:
        now: seconds since the epoch; this host's clock, which also wrote the expiry, when None.
    """
    moment = time.time() if now is None else now
    found: dict[str, int] = {}
    for line in (world.read(RESERVATIONS) or "").splitlines():
        match = re.match(r"(\S+)\s+(\d+)(?:\s+(pid|time):(\d+))?", line.strip())
        if match is None:
            continue
        kind, number = match[3], match[4]
        over = (kind == "pid" and not world.exists(f"/proc/{number}")) or (kind == "time" and int(number) < moment)
        if not over:
            found.update(dict.fromkeys(functions_of(match[1], functions), int(match[2])))
    return found


# -- containers --------------------------------------------------------------------------------------------------------


def container(vmid: int, text: str, running: bool, file: str = "") -> Container:
    """One container with its device lines; pending deletions are entries with the key `delete`."""
    parts = sections(text)
    main = parts[0]
    return Container(
        vmid=vmid,
        running=running,
        unprivileged=main.get("unprivileged") == "1",
        onboot=main.get("onboot") == "1",
        entries=tuple(entry for section in parts for entry in _device_lines(section)),
        file=file,
        lock=main.get("lock"),
    )


def _device_lines(section: Section) -> Iterable[ContainerEntry]:
    for key, value in section.lines:
        if _DEV.fullmatch(key):
            yield ContainerEntry(key, value, _options(value, "path").get("path", ""), section.name)
        elif key in _RAW_KEYS:
            source = value.split()[0] if key == "lxc.mount.entry" and value else ""
            yield ContainerEntry(key, value, source if source.startswith("/dev/") else "", section.name)
        elif key == "delete" and section.name == "pending":
            yield ContainerEntry(key, value, "", section.name)


def read_containers(world: World) -> tuple[Container, ...]:
    """The containers of this node; one runs when its command socket is there, as PVE::LXC looks it up."""
    sockets = set(re.findall(r"@/var/lib/lxc/(\d+)/command$", world.read("/proc/net/unix") or "", re.MULTILINE))
    return tuple(
        container(vmid, text, str(vmid) in sockets, path) for vmid, path, text in _guests(world, CONTAINER_CONFIGS)
    )


# -- cluster -----------------------------------------------------------------------------------------------------------


def quorate(world: World) -> bool:
    """The cluster file system is mounted and takes writes; a node without a cluster is its own quorum."""
    try:
        members = json.loads(world.read(MEMBERS) or "")
    except ValueError:
        return False
    if not isinstance(members, dict):
        return False
    cluster = members.get("cluster")
    return cluster is None or bool(cluster.get("quorate"))


def node_name(world: World) -> str:
    """The name that Proxmox VE and the kernel give this machine, without a domain."""
    name = world.read("/proc/sys/kernel/hostname") or world.read("/etc/hostname") or ""
    return name.strip().split(".", 1)[0]
