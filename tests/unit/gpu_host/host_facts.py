"""The example host as a snapshot written by hand: kpro5 with two RTX A6000 and two RTX 3090, and ways to change it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_host.binding import BindingDesired, GpuWant
from gpu_host.facts import Container, ContainerEntry, DeviceNode, HostFacts, NvidiaGpu, PciFunction, VmClaim

A6000, RTX3090, AUDIO = "2230", "2204", "1aef"
HOST_CARDS = ("0000:41:00.0", "0000:42:00.0")
VM_CARDS = ("0000:81:00.0", "0000:82:00.0")
KERNEL = "6.17.2-1-pve"
MAJORS = {"mem": 1, "nvidia": 195, "nvidia-uvm": 511}


def card(address: str, device: str, group: int, driver: str | None = "vfio-pci") -> tuple[PciFunction, ...]:
    """The two functions of a card."""
    gpu = PciFunction(address, "030000", "10de", device, driver=driver, group=group)
    audio_driver = "vfio-pci" if driver == "vfio-pci" else "snd_hda_intel"
    audio = PciFunction(f"{address[:-1]}1", "040300", "10de", AUDIO, driver=audio_driver, group=group)
    return gpu, audio


def kpro5(**changes: Any) -> HostFacts:
    """As found: all cards on vfio-pci by ids=, two VMs, container 129 without a card."""
    facts = HostFacts(
        hostname="kpro5",
        kernel=KERNEL,
        kernels=(KERNEL,),
        pve="9.1.1",
        pve_container="6.0.18",
        quorate=True,
        init="systemd",
        iommu=True,
        functions=(
            *card(HOST_CARDS[0], A6000, 13),
            *card(HOST_CARDS[1], A6000, 14),
            *card(VM_CARDS[0], RTX3090, 15),
            *card(VM_CARDS[1], RTX3090, 16),
        ),
        claims=tuple(claim(vmid, address) for vmid, address in zip((101, 102), VM_CARDS, strict=True)),
        containers=(container(129),),
        module_versions={KERNEL: "580.126.09"},
        majors={"mem": 1},
        settings={"/etc/modprobe.d/vfio.conf": "options vfio-pci ids=10de:2230,10de:2204,10de:1aef disable_vga=1\n"},
    )
    return replace(facts, **changes)


def kpro5_bound(**changes: Any) -> HostFacts:
    """After the role vfio_binding: the A6000 on nvidia with minors and nodes, nothing hides any more."""
    functions = (
        *card(HOST_CARDS[0], A6000, 13, "nvidia"),
        *card(HOST_CARDS[1], A6000, 14, "nvidia"),
        *card(VM_CARDS[0], RTX3090, 15),
        *card(VM_CARDS[1], RTX3090, 16),
    )
    gpus = tuple(NvidiaGpu(address, minor, "NVIDIA RTX A6000") for minor, address in enumerate(HOST_CARDS))
    facts = kpro5(functions=functions, gpus=gpus, majors=dict(MAJORS), nodes=nodes(2), driver_version="580.126.09")
    return replace(facts, **changes)


def nodes(cards: int, uvm: int = 511) -> tuple[DeviceNode, ...]:
    return (
        *(DeviceNode(f"/dev/nvidia{minor}", "char", 195, minor) for minor in range(cards)),
        DeviceNode("/dev/nvidiactl", "char", 195, 255),
        DeviceNode("/dev/nvidia-uvm", "char", uvm, 0),
        DeviceNode("/dev/nvidia-uvm-tools", "char", uvm, 1),
    )


def claim(vmid: int, address: str, **changes: Any) -> VmClaim:
    made = VmClaim(
        vmid,
        "hostpci0",
        "main",
        f"{address[5:]},pcie=1",
        (address, f"{address[:-1]}1"),
        file=f"/etc/pve/qemu-server/{vmid}.conf",
    )
    return replace(made, **changes)


def container(vmid: int, *lines: str, running: bool = False, **changes: Any) -> Container:
    """With device lines as `key: value`, those after a `[section]` line in that section."""
    section, entries = "main", []
    for line in lines:
        if line.startswith("["):
            section = "pending" if "pve:pending" in line else f"snapshot {line.strip('[]')}"
            continue
        key, value = line.split(": ", 1)
        path = value.split(",")[0].split()[0] if key.startswith("dev") or key == "lxc.mount.entry" else ""
        entries.append(ContainerEntry(key, value, path.removeprefix("path="), section))
    made = Container(vmid, running, entries=tuple(entries), file=f"/etc/pve/lxc/{vmid}.conf")
    return replace(made, **changes)


def wants(owners: dict[str, str] | None = None) -> BindingDesired:
    """The example inventory; `owners` changes single cards."""
    owner = {**dict.fromkeys(HOST_CARDS, "host"), **dict.fromkeys(VM_CARDS, "vm"), **(owners or {})}
    device = {**dict.fromkeys(HOST_CARDS, A6000), **dict.fromkeys(VM_CARDS, RTX3090)}
    return BindingDesired(tuple(GpuWant(a, owner[a], f"10de:{device[a]}") for a in owner))


def rules(plan: Any) -> set[str]:
    return {refusal.rule for refusal in plan.refusals}
