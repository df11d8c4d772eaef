"""Reading a host into `HostFacts`: files first, and at most one `dpkg-query`, one `dkms` and a `modinfo` a kernel.

Nothing here changes anything, every command is bounded, and what a machine does not have (no /etc/pve in a rented
container, no systemd, no /lib/modules) is simply empty.
"""

from __future__ import annotations

import re

from . import nvidia, proxmox
from .facts import CONTAINERS, HostFacts
from .pci import read_functions
from .users import read_users
from .world import World

SETTINGS = (
    "/etc/modprobe.d/*.conf",
    "/etc/modules",
    "/etc/modules-load.d/*.conf",
    "/etc/udev/rules.d/*.rules",
    "/etc/default/grub",
    "/etc/default/grub.d/*.cfg",
    "/etc/kernel/cmdline",
    "/etc/initramfs-tools/modules",
    "/etc/driverctl.d/*",
)
PACKAGES = (
    *("*nvidia*", "libcuda*", "pve-manager", "pve-container", "docker-ce", "docker.io"),
    *("proxmox-headers-*", "proxmox-default-headers", "pve-headers*", "linux-headers-*"),
)
_HEADERS = re.compile(r"(proxmox|pve|linux)-(default-)?headers")
_OWN_PACKAGE = re.compile(r"^pve-(manager|container)$|^docker")
_MODULES = re.compile(r"nvidia|nouveau$|vfio")
_EFI_GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
_EFI_SHIM = "605dab50-e046-4300-abb6-3dd810dd8b23"
#: DMI vendor -> name, for machines that are virtual ones.
_VENDORS = {"QEMU": "kvm", "VMware": "vmware", "Xen": "xen", "innotek": "oracle", "Microsoft": "microsoft"}
_UNIT_FOLDERS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def gather(world: World, builds: bool = True) -> HostFacts:
    """The snapshot of the machine that `world` is.

    Args:
        builds: ask DKMS, which takes longer than all the rest; without it `HostFacts.dkms` is empty.
    """
    installed = _packages(world)
    functions = read_functions(world)
    kernels = _kernels(world)
    majors = nvidia.character_majors(world.read("/proc/devices") or "")
    gpus = nvidia.read_gpus(world)
    version, kind = nvidia.loaded_version(world.read(f"{nvidia.PROC}/version") or "")
    virtualization = _virtualization(world)
    node = proxmox.node_name(world)
    on_proxmox = "pve-manager" in installed
    asked = world.run(["dkms", "status"], 60) if builds and world.names("/var/lib/dkms") else None
    return HostFacts(
        hostname=node,
        kernel=(world.read("/proc/sys/kernel/osrelease") or "").strip(),
        kernels=kernels,
        headers=tuple(kernel for kernel in kernels if _has_headers(world, kernel)),
        header_packages=tuple(sorted(name for name in installed if _HEADERS.match(name))),
        pinned_kernel=(world.read("/etc/kernel/proxmox-boot-pin") or "").strip(),
        pve=installed.get("pve-manager", ""),
        pve_container=installed.get("pve-container", ""),
        quorate=proxmox.quorate(world) if on_proxmox else None,
        secure_boot=None if virtualization in CONTAINERS else _secure_boot(world),
        init=(world.read("/proc/1/comm") or "").strip(),
        virtualization=virtualization,
        engine=_engine(world, installed),
        toolkit=_upstream(
            installed.get("nvidia-container-toolkit-base") or installed.get("nvidia-container-toolkit", "")
        ),
        cmdline=(world.read("/proc/cmdline") or "").strip(),
        iommu=bool(world.names("/sys/kernel/iommu_groups")),
        functions=functions,
        claims=proxmox.read_claims(world, node, functions) if on_proxmox else (),
        reserved=proxmox.read_reservations(world, functions) if on_proxmox else {},
        containers=proxmox.read_containers(world) if on_proxmox else (),
        driver_version=version,
        driver_kind=kind,
        module_versions=nvidia.read_module_versions(world, kernels),
        dkms=nvidia.dkms_builds(asked.out) if asked else (),
        gpus=gpus,
        majors=majors,
        nodes=nvidia.read_nodes(world),
        firmware=nvidia.read_firmware(world),
        settings=_settings(world),
        users=read_users(world, functions, gpus, majors),
        packages={n: v for n, v in installed.items() if not _HEADERS.match(n) and not _OWN_PACKAGE.match(n)},
        modules=_modules(world),
        persistenced=any(world.exists(f"{folder}/nvidia-persistenced.service") for folder in _UNIT_FOLDERS),
    )


def _packages(world: World) -> dict[str, str]:
    """Installed packages among `PACKAGES` -> version; empty where there is no dpkg."""
    form = "${db:Status-Abbrev}|${Package}|${Version}\\n"
    # It ends with 1 when a pattern matches nothing, and prints the others all the same.
    lines = world.run(["dpkg-query", "-W", "-f", form, *PACKAGES], 30).out.splitlines()
    rows = [line.split("|") for line in lines if line.count("|") == 2]
    return {name: version for state, name, version in sorted(rows) if state[1:2] == "i"}


def _kernels(world: World) -> tuple[str, ...]:
    """Releases below /lib/modules that are a kernel, and not only what DKMS left of a removed one."""
    folder = "/lib/modules"
    return tuple(name for name in world.names(folder) if world.exists(f"{folder}/{name}/modules.builtin"))


def _has_headers(world: World, kernel: str) -> bool:
    target = world.link(f"/lib/modules/{kernel}/build")
    if target is None:
        return world.exists(f"/lib/modules/{kernel}/build")
    return world.exists(target if target.startswith("/") else f"/lib/modules/{kernel}/{target}")


def _secure_boot(world: World) -> bool | None:
    """EFI variables as the kernel judges them (efi_get_secureboot_mode): on, not in setup, not switched off in shim."""
    if not world.exists("/sys/firmware/efi"):
        return False
    enabled = _efi_flag(world, f"SecureBoot-{_EFI_GLOBAL}")
    if enabled is None:
        return False if world.names("/sys/firmware/efi/efivars") else None
    return (
        enabled
        and not _efi_flag(world, f"SetupMode-{_EFI_GLOBAL}")
        and not _efi_flag(world, f"MokSBStateRT-{_EFI_SHIM}")
    )


def _efi_flag(world: World, name: str) -> bool | None:
    """A variable of one byte, after four bytes of attributes."""
    text = world.read(f"/sys/firmware/efi/efivars/{name}")
    return None if not text else text[-1] == "\x01"


def _virtualization(world: World) -> str:
    """In the words of systemd-detect-virt, by its sources, because a rented container has no systemd to ask."""
    told = (world.read("/run/systemd/container") or "").strip()
    environment = (world.read("/proc/1/environ") or "").split("\0")
    told = told or next((v.partition("=")[2] for v in environment if v.startswith("container=")), "")
    if told:
        return told if told in CONTAINERS else "container"
    if world.exists("/.dockerenv"):
        return "docker"
    if world.exists("/run/.containerenv"):
        return "podman"
    roots = [line.split() for line in (world.read("/proc/mounts") or "").splitlines() if " / " in line]
    # A live system has an overlay as its root too, but it has kernel threads.
    kernel_threads = (world.read("/proc/2/comm") or "").strip() == "kthreadd"
    if roots and roots[-1][0] == "overlay" and not kernel_threads:
        return "container"
    vendor = world.read("/sys/class/dmi/id/sys_vendor") or ""
    return next((name for text, name in _VENDORS.items() if vendor.startswith(text)), "none")


def _engine(world: World, installed: dict[str, str]) -> str:
    package = installed.get("docker-ce") or installed.get("docker.io")
    if package:
        return _upstream(package)
    if not any(world.exists(f"{folder}/docker") for folder in ("/usr/bin", "/usr/local/bin", "/bin")):
        return ""
    match = re.search(r"^Docker version ([0-9.]+)", world.run(["docker", "--version"], 20).out)
    return match[1] if match else ""


def _upstream(version: str) -> str:
    """`5:28.1.1-1~debian.13~trixie` -> `28.1.1`."""
    return re.sub(r"^\d+:", "", version).partition("-")[0].partition("+")[0]


def _settings(world: World) -> dict[str, str]:
    paths = [path for pattern in SETTINGS for path in world.glob(pattern)]
    texts = {path: world.read(path) for path in sorted(paths)}
    return {path: text for path, text in texts.items() if text is not None}


def _modules(world: World) -> tuple[str, ...]:
    names = (line.split(" ", 1)[0] for line in (world.read("/proc/modules") or "").splitlines())
    return tuple(sorted(name for name in names if _MODULES.match(name)))
