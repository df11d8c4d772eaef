"""The files of a GPU host below a folder: sysfs with its symbolic links, /proc, /etc/pve, modules, packages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from tests.doubles.host.kernel import TreeWorld

A6000 = "2230"
RTX3090 = "2204"
MODELS = {A6000: "NVIDIA RTX A6000", RTX3090: "NVIDIA GeForce RTX 3090"}
KERNEL = "6.17.2-1-pve"
PCI = "/sys/bus/pci"
EFI_GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"


class HostTree:
    """Builds a host below `root`; every method may be called again to change what it said before.

    Args:
        root: folder, made when it is absent.
        hostname: name of the node.
        proxmox: /etc/pve and the packages of Proxmox VE 9.1 are there.
    """

    def __init__(self, root: Path, hostname: str = "kpro5", proxmox: bool = True) -> None:
        self.root = root
        self.hostname = hostname
        self.packages: dict[str, str] = {}
        for folder in ("dev", "run", "tmp", f"{PCI}/devices", f"{PCI}/drivers", "sys/kernel/iommu_groups", "proc/1/fd"):
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        self.file(f"{PCI}/drivers_probe", "")
        self.file("/etc/hostname", f"{hostname}\n")
        self.file("/proc/sys/kernel/hostname", f"{hostname}\n")
        self.file("/proc/1/comm", "systemd\n")
        self.file("/proc/mounts", "/dev/mapper/pve-root / ext4 rw,relatime 0 0\n")
        self.file("/proc/modules", "")
        self.file("/proc/net/unix", "Num       RefCount Protocol Flags    Type St Inode Path\n")
        self.file("/etc/os-release", 'ID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n')
        self.cmdline("root=/dev/mapper/pve-root ro quiet")
        self.majors({})
        self.package("libc6", "2.41-12")
        self.kernel(KERNEL)
        if proxmox:
            self._proxmox()

    @cached_property
    def world(self) -> TreeWorld:
        """The world on this tree; always the same one, so that its record of commands is whole."""
        return TreeWorld(self.root)

    # -- files -----------------------------------------------------------------------------------------------------

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def file(self, path: str, text: str) -> HostTree:
        self.path(path).parent.mkdir(parents=True, exist_ok=True)
        self.path(path).write_text(text, encoding="utf-8")
        return self

    def symlink(self, path: str, target: str, absolute: bool = False) -> HostTree:
        """A link whose target is given from the root of the host and written relative, as sysfs does."""
        place = self.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target if absolute else os.path.relpath(self.path(target), place.parent))
        return self

    def node(self, path: str, major: int, minor: int) -> HostTree:
        """A character device."""
        self.world.make_node(path, major, minor)
        return self

    def snapshot(self) -> dict[str, str]:
        """Path -> content of everything below the root, to compare two states."""
        found = {}
        for folder, folders, files in os.walk(self.root):
            for name in (*folders, *files):
                path = Path(folder) / name
                if path.is_symlink():
                    found[f"/{path.relative_to(self.root)}"] = f"-> {path.readlink()}"
                elif path.is_file():
                    found[f"/{path.relative_to(self.root)}"] = path.read_text(encoding="utf-8", errors="replace")
        return found

    # -- the machine -----------------------------------------------------------------------------------------------

    def cmdline(self, text: str) -> HostTree:
        return self.file("/proc/cmdline", f"BOOT_IMAGE=/boot/vmlinuz-{KERNEL} {text}\n")

    def kernel(self, release: str, headers: bool = True, running: bool = True) -> HostTree:
        """An installed kernel; with `running` it is the one that runs."""
        modules = f"/lib/modules/{release}"
        self.path(f"{modules}/kernel").mkdir(parents=True, exist_ok=True)
        self.file(f"{modules}/modules.builtin", "")
        self.file(f"/boot/vmlinuz-{release}", "")
        if running:
            self.file("/proc/sys/kernel/osrelease", f"{release}\n")
        if headers:
            self.file(f"/usr/src/linux-headers-{release}/Makefile", "# headers\n")
            self.symlink(f"{modules}/build", f"/usr/src/linux-headers-{release}", absolute=True)
            self.package(
                f"{'proxmox' if release.endswith('-pve') else 'linux'}-headers-{release}", release.split("-")[0]
            )
        return self

    def secure_boot(self, on: bool) -> HostTree:
        """EFI firmware with Secure Boot on or off; without a call the machine has a legacy BIOS."""
        variables = "/sys/firmware/efi/efivars"
        self.file(f"{variables}/SetupMode-{EFI_GLOBAL}", "\x06\0\0\0\0")
        return self.file(f"{variables}/SecureBoot-{EFI_GLOBAL}", "\x06\0\0\0" + ("\1" if on else "\0"))

    def majors(self, extra: dict[str, int]) -> HostTree:
        """/proc/devices with these character devices beside the usual ones."""
        lines = [f"{number:3d} {name}\n" for name, number in {"mem": 1, "pts": 136, **extra}.items()]
        return self.file("/proc/devices", f"Character devices:\n{''.join(lines)}\nBlock devices:\n  8 sd\n259 blkext\n")

    def package(self, name: str, version: str | None) -> HostTree:
        """An installed Debian package; None takes it away."""
        if version is None:
            self.packages.pop(name, None)
        else:
            self.packages[name] = version
        stanzas = [
            f"Package: {name}\nStatus: install ok installed\nArchitecture: amd64\nVersion: {version}\n"
            for name, version in sorted(self.packages.items())
        ]
        return self.file("/var/lib/dpkg/status", "\n".join(stanzas))

    def process(self, pid: int, name: str, opens: Iterable[str] = (), maps: Iterable[str] = ()) -> HostTree:
        """A process that has device nodes open, or mapped without an open descriptor."""
        self.file(f"/proc/{pid}/comm", f"{name}\n")
        mapped = [f"7f0000000000-7f0000001000 rw-s 00000000 00:05 99 {path}\n" for path in maps]
        self.file(f"/proc/{pid}/maps", "".join(mapped))
        self.path(f"/proc/{pid}/fd").mkdir(exist_ok=True)
        for number, path in enumerate(opens, 3):
            self.symlink(f"/proc/{pid}/fd/{number}", path)
        return self

    # -- PCI -------------------------------------------------------------------------------------------------------

    def add_function(
        self,
        address: str,
        class_code: str,
        vendor: str,
        device: str,
        driver: str | None = None,
        group: int | None = None,
        subsystem: str = "",
        boot_vga: bool | None = None,
    ) -> HostTree:
        """One PCI function, bound to `driver`, with the attributes that sysfs gives it."""
        bus = address.split(":")[1]
        real = f"/sys/devices/pci{address[:4]}:{bus}/{address}"
        values = {
            "class": f"0x{class_code}",
            "vendor": f"0x{vendor}",
            "device": f"0x{device}",
            "driver_override": "(null)",
        }
        if subsystem:
            values["subsystem_vendor"], values["subsystem_device"] = (f"0x{part}" for part in subsystem.split(":"))
        if boot_vga is not None:
            values["boot_vga"] = str(int(boot_vga))
        for name, value in values.items():
            self.file(f"{real}/{name}", f"{value}\n")
        self.symlink(f"{PCI}/devices/{address}", real)
        if group is not None:
            self.symlink(f"{real}/iommu_group", f"/sys/kernel/iommu_groups/{group}")
            self.symlink(f"/sys/kernel/iommu_groups/{group}/devices/{address}", real)
        if driver:
            self.world.kernel.add_driver(driver)
            self.world.kernel.attach(address, driver)
        return self

    def add_gpu(
        self,
        address: str,
        device: str = A6000,
        driver: str | None = "vfio-pci",
        group: int | None = 13,
        audio: bool = True,
    ) -> HostTree:
        """A card as NVIDIA sells it: the GPU and, with `audio`, an HDMI audio function of the same group.

        Its audio function, `10de:1aef` for every GA102, goes to vfio-pci with the GPU and to snd_hda_intel otherwise.
        """
        self.add_function(address, "030000", "10de", device, driver, group, "10de:1459", boot_vga=False)
        if audio:
            other = {"vfio-pci": "vfio-pci", None: None}.get(driver, "snd_hda_intel")
            self.add_function(f"{address[:-1]}1", "040300", "10de", "1aef", other, group, "10de:1459")
        return self

    def driver(
        self,
        version: str,
        kind: str = "open",
        kernels: Iterable[str] = (KERNEL,),
        loaded: bool = False,
        uvm_major: int = 509,
    ) -> HostTree:
        """The NVIDIA driver on disk, built by DKMS for `kernels`; with `loaded` it is in the running kernel.

        Args:
            uvm_major: what nvidia-uvm gets when it is loaded.
        """
        for kernel in kernels:
            for module in ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm"):
                self.file(f"/lib/modules/{kernel}/updates/dkms/{module}.ko", f"version={version}\nkind={kind}\n")
            self.symlink(
                f"/var/lib/dkms/nvidia/kernel-{kernel}-x86_64", f"/var/lib/dkms/nvidia/{version}/{kernel}/x86_64"
            )
            self.path(f"/var/lib/dkms/nvidia/{version}/{kernel}/x86_64/module").mkdir(parents=True, exist_ok=True)
        self.path(f"/usr/src/nvidia-{version}").mkdir(parents=True, exist_ok=True)
        self.symlink(f"/var/lib/dkms/nvidia/{version}/source", f"/usr/src/nvidia-{version}", absolute=True)
        self.file(f"/lib/firmware/nvidia/{version}/gsp_ga10x.bin", "")
        self.world.kernel.uvm_major = uvm_major
        if loaded:
            self.world.kernel.load("nvidia")
            self.world.kernel.load("nvidia-uvm")
        return self

    # -- Proxmox VE ------------------------------------------------------------------------------------------------

    def _proxmox(self) -> None:
        self.package("pve-manager", "9.1.1").package("pve-container", "6.0.18").package("qemu-server", "9.1.0")
        for name in ("qemu-server", "lxc"):
            self.path(f"/etc/pve/nodes/{self.hostname}/{name}").mkdir(parents=True, exist_ok=True)
            self.symlink(f"/etc/pve/{name}", f"/etc/pve/nodes/{self.hostname}/{name}")
        self.symlink("/etc/pve/local", f"/etc/pve/nodes/{self.hostname}")
        self.quorum(True)

    def quorum(self, held: bool) -> HostTree:
        """A cluster of two nodes, with or without quorum."""
        cluster = f'{{"name": "fleet", "version": 2, "nodes": 2, "quorate": {int(held)}}}'
        return self.file(
            "/etc/pve/.members", f'{{"nodename": "{self.hostname}", "version": 4, "cluster": {cluster}}}\n'
        )

    def add_vm(self, vmid: int, text: str, running: bool = False, node: str | None = None) -> HostTree:
        """A virtual machine of this node, or of another `node`; a running one reserves what its hostpci lines name."""
        self.file(f"/etc/pve/nodes/{node or self.hostname}/qemu-server/{vmid}.conf", text)
        if running:
            pid = 100000 + vmid
            self.file(f"/run/qemu-server/{vmid}.pid", f"{pid}\n")
            held = self._functions_named(re.split(r"^\[", text, flags=re.MULTILINE)[0])
            groups = {self.world.kernel.group(address) for address in held}
            self.process(pid, "kvm", [f"/dev/vfio/{group}" for group in sorted(groups)])
            for address in held:
                self.reserve(address, vmid, f"pid:{pid}")
        return self

    def _functions_named(self, section: str) -> list[str]:
        found = re.findall(r"^hostpci\d+: (?:host=)?([0-9a-f:]+[0-9a-f](?:\.\d)?)", section, re.MULTILINE)
        prefixes = tuple(name if name.count(":") == 2 else f"0000:{name}" for name in found)
        return [name for name in self.world.kernel.addresses() if prefixes and name.startswith(prefixes)]

    def reserve(self, address: str, vmid: int, holder: str) -> HostTree:
        """A line of Proxmox VE's reservations: `holder` is `pid:N` of a running VM, `time:EXPIRY` of a starting one."""
        path = "/run/qemu-server/pci-id-reservations"
        return self.file(path, f"{self.world.read(path) or ''}{address} {vmid} {holder}\n")

    def mapping(self, text: str) -> HostTree:
        return self.file("/etc/pve/mapping/pci.cfg", text)

    def add_container(self, vmid: int, text: str, running: bool = False) -> HostTree:
        self.file(f"/etc/pve/nodes/{self.hostname}/lxc/{vmid}.conf", text)
        (self.path(f"/var/lib/lxc/{vmid}/rootfs/dev")).mkdir(parents=True, exist_ok=True)
        if running:
            self.world.must(["pct", "start", str(vmid)])
        return self


def kpro5(root: Path, driver: str | None = None) -> HostTree:
    """The example host as it is found: four cards on vfio-pci by `ids=`, container 129 without any.

    VM 101 runs with the card at 81:00, VM 102 names the one at 82:00 through a mapping and is off.

    Args:
        driver: version of the NVIDIA driver that is installed (not loaded: it would find no card), None for none.
    """
    tree = HostTree(root)
    for bridge, bus in (("0000:40:01.1", "41"), ("0000:40:03.1", "42"), ("0000:80:01.1", "81"), ("0000:80:03.1", "82")):
        tree.add_function(bridge, "060400", "1022", "1483", "pcieport", {"41": 11, "42": 12, "81": 25, "82": 26}[bus])
    tree.add_function("0000:00:02.0", "010802", "144d", "a80a", "nvme", 2)
    tree.file("/etc/modprobe.d/vfio.conf", "options vfio-pci ids=10de:2230,10de:2204,10de:1aef disable_vga=1\n")
    tree.file("/etc/modprobe.d/pve-blacklist.conf", "# This file contains a list of modules\nblacklist nvidiafb\n")
    tree.file("/etc/modprobe.d/blacklist-gpu.conf", "blacklist nouveau\nblacklist nvidia\n")
    tree.file("/etc/modules", "# /etc/modules\nvfio\nvfio_iommu_type1\nvfio_pci\n")
    tree.file(
        "/etc/default/grub", 'GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=pt"\nGRUB_CMDLINE_LINUX=""\n'
    )
    tree.world.kernel.load("vfio-pci")
    for address, device, group in (
        ("0000:41:00.0", A6000, 13),
        ("0000:42:00.0", A6000, 14),
        ("0000:81:00.0", RTX3090, 27),
        ("0000:82:00.0", RTX3090, 28),
    ):
        tree.add_gpu(address, device, "vfio-pci", group)
    tree.add_vm(
        101, "boot: order=scsi0\nhostpci0: 0000:81:00,pcie=1,x-vga=1\nname: workstation1\nonboot: 1\n", running=True
    )
    tree.add_vm(102, "boot: order=scsi0\nhostpci0: mapping=second-3090,pcie=1\nname: workstation2\n")
    tree.mapping(
        "second-3090\n"
        "\tmap id=10de:2204,iommugroup=28,node=kpro5,path=0000:82:00,subsystem-id=10de:1459\n"
        "\tmap id=10de:2204,iommugroup=28,node=kpro6,path=0000:41:00,subsystem-id=10de:1459\n"
    )
    # A VM of another node: its addresses are those of that node and concern nobody here.
    tree.add_vm(201, "hostpci0: 0000:42:00.0\nname: elsewhere\n", node="kpro6")
    tree.add_container(
        129, "arch: amd64\ncores: 32\nhostname: ct129\nmemory: 262144\nonboot: 1\nostype: debian\nunprivileged: 0\n"
    )
    if driver:
        tree.driver(driver)
    return tree
