"""One snapshot of a GPU host, as data: what every planner reads and nothing else.

`as_dict` gives JSON types, so a snapshot can be kept, sent and replayed in a test.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: Names that `HostFacts.virtualization` has for containers: their kernel is somebody else's.
CONTAINERS = ("lxc", "docker", "podman", "container")


@dataclass(frozen=True)
class PciFunction:
    """One function of a PCI device (`/sys/bus/pci/devices/<address>`).

    Attributes:
        address: full form, lower case: `0000:41:00.0`.
        class_code: six hex digits without prefix: `030000` (VGA), `030200` (3D), `040300` (audio), `0604xx` (bridge).
        vendor, device: four hex digits each: `10de`, `2230`.
        subsystem: `vvvv:dddd`, empty when the function has none.
        driver: bound driver, None when unbound.
        override: `driver_override`, None when cleared.
        group: IOMMU group, None without an IOMMU.
    """

    address: str
    class_code: str
    vendor: str
    device: str
    subsystem: str = ""
    driver: str | None = None
    override: str | None = None
    group: int | None = None
    boot_vga: bool = False

    @property
    def slot(self) -> str:
        """`0000:41:00` of `0000:41:00.0`."""
        return self.address.rsplit(".", 1)[0]

    @property
    def is_display(self) -> bool:
        return self.class_code.startswith("03")

    @property
    def is_gpu(self) -> bool:
        """An NVIDIA display function; the audio and USB functions of the card are not."""
        return self.vendor == "10de" and self.is_display

    @property
    def is_bridge(self) -> bool:
        """Host and PCI bridges: vfio ignores them when it judges whether a group is viable."""
        return self.class_code.startswith("06")


@dataclass(frozen=True)
class VmClaim:
    """A virtual machine's configuration that names a PCI device (`hostpciN`), resolved to functions present here.

    Attributes:
        vmid: number of the VM.
        key: `hostpci0`.
        section: `main`, `pending` or `snapshot NAME`; a rollback brings a snapshot's claim back.
        value: the text of the entry.
        addresses: PCI functions of this host that the entry can take, all alternatives included.
        mapping: name of the cluster mapping it goes through, None for an address.
        running: the VM runs now.
        onboot: the VM starts with the host.
        file: configuration file that it stands in.
    """

    vmid: int
    key: str
    section: str
    value: str
    addresses: tuple[str, ...]
    mapping: str | None = None
    running: bool = False
    onboot: bool = False
    file: str = ""


@dataclass(frozen=True)
class ContainerEntry:
    """One line of a container's configuration that concerns a device.

    Attributes:
        key: `dev0`, `lxc.cgroup2.devices.allow` or `lxc.mount.entry`.
        value: text after the colon.
        path: host device that the line is about (`/dev/nvidia0`), empty for cgroup lines.
        section: `main`, `pending` or `snapshot NAME`.
    """

    key: str
    value: str
    path: str = ""
    section: str = "main"


@dataclass(frozen=True)
class Container:
    """A container of this host (`/etc/pve/lxc/<vmid>.conf`), with its device lines in file order."""

    vmid: int
    running: bool
    unprivileged: bool = False
    onboot: bool = False
    entries: tuple[ContainerEntry, ...] = ()
    file: str = ""
    lock: str = ""


@dataclass(frozen=True)
class NvidiaGpu:
    """`/proc/driver/nvidia/gpus/<address>/information`; `minor` is None while the card is not initialised."""

    address: str
    minor: int | None
    model: str = ""
    uuid: str = ""


@dataclass(frozen=True)
class DeviceNode:
    """What stands at a path below /dev; `kind` is `char` for a device and `file` for the trap of a bind mount."""

    path: str
    kind: str
    major: int = 0
    minor: int = 0


@dataclass(frozen=True)
class DkmsBuild:
    """One line of `dkms status`: state is `added`, `built` or `installed`."""

    module: str
    version: str
    kernel: str
    state: str


@dataclass(frozen=True)
class HostFacts:
    """The snapshot.

    Attributes:
        hostname: the node's name, by which `/etc/pve/mapping/pci.cfg` is filtered.
        kernel: running release, `6.17.2-1-pve`.
        kernels: releases installed below /lib/modules.
        headers: kernel releases whose headers are installed (/lib/modules/<release>/build resolves).
        header_packages: installed packages `proxmox-headers-*`, `pve-headers*`, `linux-headers-*`.
        pinned_kernel: what `proxmox-boot-tool kernel pin` holds, empty when nothing is pinned.
        pve: version of pve-manager, empty when this is no Proxmox VE host.
        pve_container: version of pve-container, empty when absent.
        quorate: the cluster file system takes writes; None when this is no Proxmox VE host.
        secure_boot: None when it cannot be told.
        init: `systemd`, `openrc`, `none`, …: the name of process 1.
        virtualization: `none`, `kvm`, `lxc`, `docker`, …: what this machine itself runs in.
        engine: version of the Docker Engine, empty when absent.
        toolkit: version of the NVIDIA container toolkit, empty when absent.
        cmdline: kernel command line.
        iommu: the kernel runs with an IOMMU (there are IOMMU groups).
        functions: all PCI functions.
        claims: devices named by virtual machines.
        reserved: PCI function -> vmid of a starting or running VM (`/run/qemu-server/pci-id-reservations`).
        containers: containers of this host.
        driver_version: `/proc/driver/nvidia/version`; empty when no module is loaded.
        driver_kind: `open` or `proprietary`, empty when no module is loaded.
        module_versions: kernel release -> version of the nvidia module on disk.
        dkms: `dkms status`.
        gpus: cards that the loaded NVIDIA driver drives.
        majors: name -> major of character devices (`/proc/devices`).
        nodes: what stands at /dev/nvidia*.
        firmware: versions below /lib/firmware/nvidia.
        settings: path -> text of files where an assignment of devices can hide: modprobe.d, modules-load.d, udev
            rules, /etc/default/grub, /etc/kernel/cmdline, /etc/initramfs-tools/modules, driverctl.
        users: PCI function -> processes that hold its device open, as `pid name`.
        packages: installed NVIDIA packages -> version.
        modules: loaded kernel modules among nvidia*, nouveau, vfio*.
        persistenced: systemd has a unit of NVIDIA's persistence daemon.
    """

    hostname: str = ""
    kernel: str = ""
    kernels: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    header_packages: tuple[str, ...] = ()
    pinned_kernel: str = ""
    pve: str = ""
    pve_container: str = ""
    quorate: bool | None = None
    secure_boot: bool | None = None
    init: str = ""
    virtualization: str = "none"
    engine: str = ""
    toolkit: str = ""
    cmdline: str = ""
    iommu: bool = False
    functions: tuple[PciFunction, ...] = ()
    claims: tuple[VmClaim, ...] = ()
    reserved: dict[str, int] = field(default_factory=dict)
    containers: tuple[Container, ...] = ()
    driver_version: str = ""
    driver_kind: str = ""
    module_versions: dict[str, str] = field(default_factory=dict)
    dkms: tuple[DkmsBuild, ...] = ()
    gpus: tuple[NvidiaGpu, ...] = ()
    majors: dict[str, int] = field(default_factory=dict)
    nodes: tuple[DeviceNode, ...] = ()
    firmware: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    users: dict[str, tuple[str, ...]] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    persistenced: bool = False

    @property
    def rented(self) -> bool:
        """A node inside somebody's container: the driver is its host's, nothing can be installed below it."""
        return self.virtualization in ("docker", "podman", "container") or (
            self.init != "systemd" and bool(self.driver_version)
        )

    def function(self, address: str) -> PciFunction | None:
        return next((f for f in self.functions if f.address == address), None)

    def slot_functions(self, slot: str) -> tuple[PciFunction, ...]:
        """All functions of a card, `0000:41:00` -> .0, .1, …"""
        return tuple(f for f in self.functions if f.slot == slot)

    def group_functions(self, group: int | None) -> tuple[PciFunction, ...]:
        return () if group is None else tuple(f for f in self.functions if f.group == group)

    def claims_on(self, address: str) -> tuple[VmClaim, ...]:
        return tuple(c for c in self.claims if address in c.addresses)

    def container(self, vmid: int) -> Container | None:
        return next((c for c in self.containers if c.vmid == vmid), None)

    def gpu(self, address: str) -> NvidiaGpu | None:
        return next((g for g in self.gpus if g.address == address), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON types; `from_dict` is its inverse."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HostFacts:
        """Facts as a module returned them; keys that this version does not know are left out."""
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        records = {
            "functions": PciFunction,
            "claims": VmClaim,
            "gpus": NvidiaGpu,
            "nodes": DeviceNode,
            "dkms": DkmsBuild,
        }
        for key, record in records.items():
            values[key] = tuple(record(**_tupled(item)) for item in values.get(key, ()))
        values["containers"] = tuple(
            Container(
                **{
                    **item,
                    "entries": tuple(ContainerEntry(**entry) for entry in item.get("entries", ())),
                }
            )
            for item in values.get("containers", ())
        )
        values["users"] = {key: tuple(value) for key, value in values.get("users", {}).items()}
        return cls(**_tupled(values))


def _tupled(item: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
