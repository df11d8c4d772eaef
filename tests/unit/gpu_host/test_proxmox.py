"""Who holds a card, from Proxmox VE's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_host.facts import PciFunction
from gpu_host.proxmox import (
    container,
    hostpci,
    mappings,
    node_name,
    quorate,
    read_claims,
    read_containers,
    read_reservations,
    sections,
    vm_claims,
)
from tests.doubles.host_tree import HostTree, kpro5

FUNCTIONS = tuple(
    PciFunction(f"0000:{bus}:00.{number}", "030000" if number == 0 else "040300", "10de", "2230")
    for bus in ("41", "42", "81", "82")
    for number in (0, 1)
)
MAPPING = """\
gpus
\tdescription two cards: for the workstations
\tmap id=10de:2230,iommugroup=13,node=kpro5,path=0000:41:00.0,subsystem-id=10de:1459
\tmap id=10de:2230,iommugroup=14,node=kpro5,path=0000:42:00.0;0000:42:00.1,subsystem-id=10de:1459
\tmap id=10de:2230,iommugroup=3,node=kpro6,path=0000:81:00.0
\tmdev 0

elsewhere
\tmap id=10de:2230,node=kpro6,path=0000:82:00
"""


def claims(text: str, **more: object) -> list[tuple[str, str, tuple[str, ...]]]:
    found = vm_claims(101, text, FUNCTIONS, mappings(MAPPING, "kpro5"), **more)  # type: ignore[arg-type]
    return [(claim.key, claim.section, claim.addresses) for claim in found]


# -- hostpci -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        ("0000:41:00.0", ("0000:41:00.0",)),
        ("41:00.0,pcie=1", ("0000:41:00.0",)),
        ("0000:41:00,pcie=1,x-vga=1", ("0000:41:00.0", "0000:41:00.1")),
        ("41:00", ("0000:41:00.0", "0000:41:00.1")),
        ("host=0000:41:00.0", ("0000:41:00.0",)),
        ("host=41:00,pcie=1,rombar=0,romfile=vbios.rom", ("0000:41:00.0", "0000:41:00.1")),
        ("pcie=1,host=41:00.0", ("0000:41:00.0",)),
        ("41:00.0;42:00.0,pcie=1", ("0000:41:00.0", "0000:42:00.0")),
        ("0000:41:00;0000:42:00.1", ("0000:41:00.0", "0000:41:00.1", "0000:42:00.1")),
        ("0000:41:00.0,mdev=nvidia-63", ("0000:41:00.0",)),
        ("0000:41:00.0,driver=keep", ("0000:41:00.0",)),
        ("41:00.0,legacy-igd=1", ("0000:41:00.0",)),
        ("mapping=gpus,pcie=1", ("0000:41:00.0", "0000:42:00.0", "0000:42:00.1")),
        ("pcie=1,mapping=gpus", ("0000:41:00.0", "0000:42:00.0", "0000:42:00.1")),
        ("mapping=elsewhere", ()),
        ("mapping=never-defined", ()),
        ("0000:C1:00.0", ()),
        ("something new", ()),
    ],
)
def test_every_form_of_hostpci_is_understood(value: str, addresses: tuple[str, ...]) -> None:
    assert claims(f"hostpci0: {value}\n") == [("hostpci0", "main", addresses)]


def test_a_mapping_is_named_in_the_claim() -> None:
    (claim,) = vm_claims(101, "hostpci3: mapping=gpus\n", FUNCTIONS, mappings(MAPPING, "kpro5"))
    assert (claim.mapping, claim.key, claim.value) == ("gpus", "hostpci3", "mapping=gpus")
    assert hostpci("41:00.0", {})[1] is None


def test_sixteen_devices_are_sixteen_claims() -> None:
    text = "".join(f"hostpci{n}: 41:00.0\n" for n in range(16))
    assert [key for key, _, _ in claims(text)] == [f"hostpci{n}" for n in range(16)]


def test_a_card_in_the_arguments_of_qemu_is_held_too() -> None:
    second = "-device vfio-pci,id=x,sysfsdev=/sys/bus/pci/devices/0000:42:00.0"
    text = f"args: -cpu host -device vfio-pci,host=41:00.0 {second}\n"
    assert claims(text) == [("args", "main", ("0000:41:00.0", "0000:42:00.0"))]
    assert claims("args: -device virtio-rng-pci\n") == []


@pytest.mark.parametrize("text", ["", "#hostpci0: 41:00.0\n", "net0: virtio=AA:BB:CC:00:41:00\n", "name: hostpci0\n"])
def test_what_names_no_device_is_no_claim(text: str) -> None:
    assert claims(text) == []


# -- sections ----------------------------------------------------------------------------------------------------------

VM = """\
#the workstation [of somebody]
boot: order=scsi0
hostpci0: 0000:41:00
onboot: 1

[PENDING]
hostpci1: 0000:42:00.0
delete: hostpci0

[before-upgrade]
hostpci0: 0000:81:00.0
parent: earlier

[special:cloudinit]
hostpci0: 0000:82:00.0
"""


def test_pending_and_snapshots_hold_a_card_as_well() -> None:
    assert claims(VM) == [
        ("hostpci0", "main", ("0000:41:00.0", "0000:41:00.1")),
        ("hostpci1", "pending", ("0000:42:00.0",)),
        ("hostpci0", "snapshot before-upgrade", ("0000:81:00.0",)),
    ]


def test_onboot_and_running_go_with_every_claim_of_the_machine() -> None:
    found = vm_claims(101, VM, FUNCTIONS, {}, running=True, file="/etc/pve/qemu-server/101.conf")
    assert {(c.onboot, c.running, c.file) for c in found} == {(True, True, "/etc/pve/qemu-server/101.conf")}
    assert not vm_claims(101, VM.replace("onboot: 1", "onboot: 0"), FUNCTIONS, {})[0].onboot


def test_a_description_does_not_open_a_section() -> None:
    assert [section.name for section in sections(VM)] == ["main", "pending", "snapshot before-upgrade"]


# -- mappings ----------------------------------------------------------------------------------------------------------


def test_a_mapping_is_what_it_is_on_this_node() -> None:
    assert mappings(MAPPING, "kpro5") == {"gpus": ("0000:41:00.0", "0000:42:00.0", "0000:42:00.1"), "elsewhere": ()}
    assert mappings(MAPPING, "kpro6") == {"gpus": ("0000:81:00.0",), "elsewhere": ("0000:82:00",)}
    assert mappings("", "kpro5") == {}


# -- a whole node ------------------------------------------------------------------------------------------------------


def test_the_claims_of_a_node_are_those_of_its_own_machines(tmp_path: Path) -> None:
    tree = kpro5(tmp_path)
    found = read_claims(tree.world, "kpro5", FUNCTIONS)
    assert [(c.vmid, c.addresses, c.running, c.onboot, c.mapping) for c in found] == [
        (101, ("0000:81:00.0", "0000:81:00.1"), True, True, None),
        (102, ("0000:82:00.0", "0000:82:00.1"), False, False, "second-3090"),
    ]


def test_a_pid_file_without_a_process_is_a_machine_that_is_off(tmp_path: Path) -> None:
    tree = kpro5(tmp_path)
    tree.file("/run/qemu-server/102.pid", "424242\n").file("/run/qemu-server/101.pid", "not a number\n")
    assert not any(claim.running for claim in read_claims(tree.world, "kpro5", FUNCTIONS))


def test_reservations_count_while_their_holder_lives(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).process(77, "kvm")
    tree.reserve("0000:41:00.0", 101, "pid:77").reserve("0000:42:00.0", 102, "pid:78")
    tree.reserve("0000:81:00.0", 103, "time:1000").reserve("0000:82:00.0", 104, "time:2000")
    tree.reserve("5d7f1c2e-0000-4000-8000-000000000001", 105, "pid:77")
    assert read_reservations(tree.world, FUNCTIONS, now=1500.0) == {"0000:41:00.0": 101, "0000:82:00.0": 104}


def test_a_reservation_of_a_slot_reserves_its_functions(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).file("/run/qemu-server/pci-id-reservations", "0000:41:00 101\nrubbish\n\n")
    assert read_reservations(tree.world, FUNCTIONS) == {"0000:41:00.0": 101, "0000:41:00.1": 101}


# -- containers --------------------------------------------------------------------------------------------------------

CT = """\
arch: amd64
dev0: /dev/nvidia0,mode=0666
dev1: path=/dev/nvidiactl,gid=104
lock: migrate
onboot: 1
unprivileged: 1
lxc.cgroup2.devices.allow: c 195:0 rwm
lxc.cgroup.devices.allow: c 195:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry: /srv/models srv/models none bind
lxc.apparmor.profile: unconfined

[pve:pending]
dev2: /dev/nvidia-uvm
delete: dev0

[clean]
dev0: /dev/dri/renderD128
"""


def test_device_lines_of_a_container_in_all_forms_and_sections() -> None:
    found = container(129, CT, running=True, file="/etc/pve/lxc/129.conf")
    assert [(e.key, e.path, e.section) for e in found.entries] == [
        ("dev0", "/dev/nvidia0", "main"),
        ("dev1", "/dev/nvidiactl", "main"),
        ("lxc.cgroup2.devices.allow", "", "main"),
        ("lxc.cgroup.devices.allow", "", "main"),
        ("lxc.mount.entry", "/dev/nvidia0", "main"),
        ("lxc.mount.entry", "", "main"),
        ("dev2", "/dev/nvidia-uvm", "pending"),
        ("delete", "", "pending"),
        ("dev0", "/dev/dri/renderD128", "snapshot clean"),
    ]
    assert (found.unprivileged, found.onboot, found.lock, found.running) == (True, True, "migrate", True)
    assert found.entries[1].value == "path=/dev/nvidiactl,gid=104"


def test_a_plain_container_has_no_entries() -> None:
    found = container(130, "arch: amd64\nhostname: plain\n", running=False)
    assert (found.entries, found.unprivileged, found.onboot, found.lock) == ((), False, False, "")


def test_a_container_runs_when_its_command_socket_is_there(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.add_container(129, "arch: amd64\n", running=True).add_container(29, "arch: amd64\n")
    tree.file("/etc/pve/nodes/kpro5/lxc/129.conf.tmp", "arch: amd64\n")
    assert [(c.vmid, c.running, c.file) for c in read_containers(tree.world)] == [
        (29, False, "/etc/pve/lxc/29.conf"),
        (129, True, "/etc/pve/lxc/129.conf"),
    ]


# -- cluster -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "takes_writes"),
    [
        ('{"nodename": "kpro5", "version": 0}', True),
        ('{"nodename": "kpro5", "cluster": {"name": "fleet", "nodes": 3, "quorate": 1}}', True),
        ('{"nodename": "kpro5", "cluster": {"name": "fleet", "nodes": 3, "quorate": 0}}', False),
        ("", False),
        ("[]", False),
    ],
)
def test_quorum(tmp_path: Path, members: str, takes_writes: bool) -> None:
    assert quorate(HostTree(tmp_path).file("/etc/pve/.members", members).world) is takes_writes


def test_without_the_cluster_file_system_nothing_is_written(tmp_path: Path) -> None:
    assert not quorate(HostTree(tmp_path, proxmox=False).world)


def test_a_node_is_called_without_its_domain(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).file("/proc/sys/kernel/hostname", "kpro5.example.org\n")
    assert node_name(tree.world) == "kpro5"
