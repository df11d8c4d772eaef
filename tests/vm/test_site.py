"""`site.yml` and the way back on a machine with real PCI functions, IOMMU groups, DKMS, udev, systemd and LXC.

The kernel module and the installer of the driver are doubles, and so are the commands of Proxmox VE.
"""

from __future__ import annotations

import pytest

from .look import Container, drivers, fingerprint
from .machine import Machine
from .playbook import HOSTS_CARDS, VMID, VMS_CARDS, Playbooks, Run

#: A run of a playbook takes minutes in an emulated machine, and more beside other work.
pytestmark = pytest.mark.timeout(2400)

#: What a container of two cards is given.
DEVICES = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
NVIDIA_MAJOR = 195
MODESET_MINOR = 254


def _function(card: str, number: int) -> str:
    return f"{card[:-1]}{number}"


def _on_vfio(machine: Machine, cards: tuple[str, ...]) -> dict[str, str]:
    """The functions of the cards that are not on vfio-pci; empty is what is hoped for."""
    slots = tuple(card[:-1] for card in cards)
    return {f: driver for f, driver in drivers(machine).items() if f.startswith(slots) and driver != "vfio-pci"}


@pytest.fixture(scope="module")
def first(machine: Machine, playbooks: Playbooks) -> Run:
    """The first run, from the clean machine; what it leaves behind is saved as `provisioned`."""
    machine.load("clean")
    run = playbooks.site()
    assert run.status == 0, run.output[-6000:]
    machine.save("provisioned")
    return run


@pytest.fixture
def provisioned(machine: Machine, first: Run) -> Container:
    """The machine after the first run, with its container."""
    machine.load("provisioned")
    return Container(machine, VMID)


class TestRefusal:
    def test_a_card_that_a_virtual_machine_holds_is_left_alone(self, machine: Machine, playbooks: Playbooks) -> None:
        machine.load("clean")
        wanted = HOSTS_CARDS[1]
        machine.ssh(
            f"sed -i 's/^hostpci0: .*/hostpci0: {wanted.removeprefix('0000:')},pcie=1/' /etc/pve/qemu-server/101.conf"
        )
        machine.ssh("qm start 101")
        before = fingerprint(machine)

        run = playbooks.site()

        assert run.status != 0
        assert "101" in run.output
        assert wanted in run.output
        assert run.count("changed") == 0
        assert fingerprint(machine) == before
        assert machine.out("qm status 101") == "status: running"
        assert not _on_vfio(machine, (*HOSTS_CARDS, *VMS_CARDS))


class TestFirstRun:
    def test_two_of_four_cards_go_to_the_host(self, first: Run, provisioned: Container) -> None:
        assert first.count("changed") > 0
        bound = drivers(provisioned.machine)
        assert {card: bound[card] for card in HOSTS_CARDS} == dict.fromkeys(HOSTS_CARDS, "nvidia")
        assert "vfio-pci" not in {bound[_function(card, 1)] for card in HOSTS_CARDS}
        assert not _on_vfio(provisioned.machine, VMS_CARDS)

    def test_the_module_was_built_by_dkms_for_the_running_kernel(
        self, playbooks: Playbooks, provisioned: Container
    ) -> None:
        machine = provisioned.machine
        assert f"nvidia/{playbooks.version}, {machine.out('uname -r')}" in machine.out("dkms status")
        assert machine.out("modinfo -F version nvidia") == playbooks.version
        assert f" {playbooks.version} " in machine.out("cat /proc/driver/nvidia/version")

    def test_the_virtual_machines_can_still_start_with_their_cards(self, provisioned: Container) -> None:
        machine = provisioned.machine
        machine.ssh("qm start 101 && qm start 102")
        assert machine.out("qm list").count("running") == len(VMS_CARDS)

    def test_the_container_opens_its_devices_and_no_others(self, provisioned: Container) -> None:
        machine = provisioned.machine
        assert provisioned.opens(*DEVICES) == dict.fromkeys(DEVICES, "char")

        vfio = machine.out("stat -c '%t %T' /dev/vfio/vfio /dev/vfio/[0-9]* | head -n 2").split()
        numbers = [(NVIDIA_MAJOR, 2), (NVIDIA_MAJOR, 3), (NVIDIA_MAJOR, MODESET_MINOR)]
        numbers += [(int(vfio[0], 16), int(vfio[1], 16)), (int(vfio[2], 16), int(vfio[3], 16))]
        nodes = [provisioned.make_node(f"/tmp/{major}:{minor}", major, minor) for major, minor in numbers]
        assert provisioned.opens(*nodes) == dict.fromkeys(nodes, "EPERM")

    def test_the_libraries_in_the_container_are_the_modules(self, playbooks: Playbooks, provisioned: Container) -> None:
        library = provisioned.out("readlink", "-f", "/usr/lib/x86_64-linux-gnu/libcuda.so.1")
        assert library.endswith(f"/libcuda.so.{playbooks.version}")
        assert provisioned.out("python3", "-c", "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))") == "0"
        assert len(provisioned.out("nvidia-smi", "-L").splitlines()) == len(HOSTS_CARDS)
        assert "nvidia" not in provisioned.out("dkms", "status")

    def test_foreign_lines_of_the_container_stay(self, provisioned: Container) -> None:
        config = provisioned.machine.out(f"pct config {VMID}")
        assert "lxc.init.cmd: /usr/libexec/container-init" in config
        assert "onboot: 1" in config


class TestSecondRun:
    def test_nothing_changes(self, playbooks: Playbooks, provisioned: Container) -> None:
        before = fingerprint(provisioned.machine)
        run = playbooks.site()
        assert run.status == 0, run.output[-6000:]
        assert run.count("changed") == 0, run.output[-6000:]
        assert fingerprint(provisioned.machine) == before


class TestReset:
    def test_cards_configuration_and_driver_go_back(self, playbooks: Playbooks, provisioned: Container) -> None:
        machine = provisioned.machine
        run = playbooks.run("playbooks/reset.yml")
        assert run.status == 0, run.output[-6000:]
        assert not _on_vfio(machine, (*HOSTS_CARDS, *VMS_CARDS))
        assert machine.out("dkms status") == ""
        assert machine.ssh("lsmod | grep -q '^nvidia'", check=False).returncode == 1
        assert machine.ssh("ls /usr/lib/x86_64-linux-gnu/libcuda*", check=False).returncode != 0
        assert "dev" not in [line[:3] for line in machine.out(f"pct config {VMID}").splitlines()]
        assert "ids=10de:2204,8086:293e" in machine.out("cat /etc/modprobe.d/vfio.conf")
        assert machine.out("ls /etc/udev/rules.d /etc/modprobe.d | grep -c drafthouse || true") == "0"


class TestReboot:
    """Last, because it leaves the process that the snapshots belong to."""

    def test_cards_nodes_and_container_come_back(self, machine: Machine, provisioned: Container) -> None:
        initrd = machine.fetch(f"/boot/initrd.img-{machine.out('uname -r')}", machine.folder / "initrd")
        machine.power_off()
        machine.start(initrd)
        machine.ssh("systemctl is-system-running --wait", check=False)

        bound = drivers(machine)
        assert {card: bound[card] for card in HOSTS_CARDS} == dict.fromkeys(HOSTS_CARDS, "nvidia")
        assert not _on_vfio(machine, VMS_CARDS)
        assert machine.out("systemctl is-active drafthouse-nvidia-nodes pve-guests") == "active\nactive"
        assert machine.out(f"pct status {VMID}") == "status: running"
        assert provisioned.opens(*DEVICES) == dict.fromkeys(DEVICES, "char")
