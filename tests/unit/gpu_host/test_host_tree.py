"""The double behaves as the kernel and Proxmox VE do where planners depend on it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gpu_host.steps import ApplyError
from tests.doubles.host.commands import classify
from tests.doubles.host_tree import HostTree, TreeWorld, kpro5

PCI = "/sys/bus/pci"
A, B = "0000:41:00.0", "0000:42:00.0"


def driver(world: TreeWorld, address: str) -> str | None:
    link = world.link(f"{PCI}/devices/{address}/driver")
    return link.rsplit("/", 1)[-1] if link else None


@pytest.fixture
def world(tmp_path: Path) -> TreeWorld:
    return kpro5(tmp_path, driver="580.126.09").world


def test_a_card_goes_from_vfio_to_the_host_by_address(world: TreeWorld) -> None:
    world.poke(f"{PCI}/devices/{A}/driver/unbind", A)
    assert driver(world, A) is None
    assert world.exists("/dev/vfio/13")  # the audio function is still there
    world.poke(f"{PCI}/drivers/vfio-pci/unbind", "0000:41:00.1")
    assert not world.exists("/dev/vfio/13")
    world.poke(f"{PCI}/devices/{A}/driver_override", "nvidia")
    world.must(["modprobe", "nvidia"])
    assert driver(world, A) == "nvidia"
    assert "Device Minor: \t 0" in (world.read(f"/proc/driver/nvidia/gpus/{A}/information") or "")
    assert world.read(f"{PCI}/devices/{B}/driver_override") == "(null)\n"
    assert driver(world, B) == "vfio-pci"


def test_the_driver_without_a_card_does_not_stay(world: TreeWorld) -> None:
    result = world.run(["modprobe", "nvidia"])
    assert not result.ok
    assert "No such device" in result.err
    assert not world.exists("/proc/driver/nvidia/version")


def test_minors_are_given_first_free(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu(A, driver=None).add_gpu(B, driver=None, group=14)
    tree.driver("580.126.09", loaded=True)
    world = tree.world
    world.poke(f"{PCI}/drivers/nvidia/unbind", A)
    assert world.kernel.minors() == {B: 1}
    world.poke(f"{PCI}/drivers_probe", A)
    assert world.kernel.minors() == {A: 0, B: 1}


def test_errors_of_the_driver_core(world: TreeWorld) -> None:
    with pytest.raises(OSError) as busy:
        world.poke(f"{PCI}/drivers/vfio-pci/bind", A)
    assert busy.value.errno == errno.EBUSY
    with pytest.raises(OSError) as nobody:
        world.poke(f"{PCI}/drivers_probe", "0000:99:00.0")
    assert nobody.value.errno == errno.ENODEV
    with pytest.raises(FileNotFoundError):
        world.poke(f"{PCI}/devices/0000:99:00.0/driver_override", "vfio-pci")


def test_new_id_takes_every_unbound_function_with_that_id(world: TreeWorld) -> None:
    world.poke(f"{PCI}/drivers/vfio-pci/remove_id", "10de 1aef")
    for address in ("0000:41:00.1", "0000:82:00.1"):
        world.poke(f"{PCI}/drivers/vfio-pci/unbind", address)
    world.poke(f"{PCI}/drivers/vfio-pci/new_id", "10de 1aef")
    assert driver(world, "0000:41:00.1") == driver(world, "0000:82:00.1") == "vfio-pci"


def test_unbinding_what_is_in_use_never_returns(world: TreeWorld) -> None:
    with pytest.raises(ApplyError, match="did not return within 3 s"):
        world.poke_within(f"{PCI}/devices/0000:81:00.0/driver/unbind", "0000:81:00.0", 3)
    assert driver(world, "0000:81:00.0") == "vfio-pci"


def test_a_probe_that_fails_leaves_no_driver(world: TreeWorld) -> None:
    world.kernel.failing.add((A, "vfio-pci"))
    world.poke(f"{PCI}/drivers/vfio-pci/unbind", A)
    world.poke(f"{PCI}/drivers_probe", A)
    assert driver(world, A) is None


def test_a_boot_follows_the_boot_files(world: TreeWorld) -> None:
    world.kernel.reboot()
    assert {driver(world, a) for a in (A, B, "0000:81:00.0", "0000:82:00.1")} == {"vfio-pci"}
    world.write("/etc/modprobe.d/vfio.conf", "options vfio-pci ids=10de:2204\n")
    world.write("/etc/modprobe.d/blacklist-gpu.conf", "blacklist nouveau\n")
    world.kernel.reboot()
    assert (driver(world, A), driver(world, "0000:81:00.0")) == ("nvidia", "vfio-pci")
    assert world.glob("/dev/nvidia*") == []


def test_a_container_with_a_missing_node_does_not_start(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_container(129, "dev0: /dev/nvidia0,mode=0666\n")
    result = tree.world.run(["pct", "start", "129"])
    assert (result.ok, "Could not get mode or device ID of /dev/nvidia0" in result.err) == (False, True)
    tree.node("/dev/nvidia0", 195, 0).world.must(["pct", "start", "129"])
    inside = tree.world.must(["pct", "exec", "129", "--", "stat", "-c", "%F|%t|%T", "/dev/nvidia0"]).out
    assert inside == "character special file|c3|0\n"


def test_changes_of_a_running_container_wait_for_its_restart(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).node("/dev/nvidia0", 195, 0).add_container(129, "arch: amd64\n", running=True)
    tree.world.must(["pct", "set", "129", "-dev0", "/dev/nvidia0"])
    assert tree.world.read("/etc/pve/lxc/129.conf") == "arch: amd64\n\n[pve:pending]\ndev0: /dev/nvidia0\n"
    tree.world.must(["pct", "reboot", "129"])
    assert tree.world.read("/etc/pve/lxc/129.conf") == "arch: amd64\ndev0: /dev/nvidia0\n"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("pct config 129", "reader"),
        ("pct exec 129 -- stat -c %F /dev/nvidia0", "reader"),
        ("pct exec 129 -- rm -f /dev/nvidia0", "mutator"),
        ("pct set 129 -dev0 /dev/nvidia0", "mutator"),
        ("dkms status", "reader"),
        ("dkms install nvidia/580.126.09", "mutator"),
        ("modprobe nvidia", "mutator"),
        ("modprobe -n nvidia", "reader"),
        ("env A=1 dpkg-query -W", "reader"),
        ("sha256sum /var/cache/drafthouse/installer.run", "reader"),
        ("apt-mark showhold", "reader"),
        ("pct exec 129 -- apt-mark showhold", "reader"),
        ("apt-mark hold nvidia-driver", "mutator"),
        ("proxmox-boot-tool kernel list", "reader"),
        ("proxmox-boot-tool kernel pin 6.17.2-1-pve", "mutator"),
        ("a-program-nobody-knows", "mutator"),
    ],
)
def test_readers_are_told_from_mutators(command: str, kind: str) -> None:
    assert classify(command.split(" ")) == kind


@pytest.mark.parametrize(
    ("script", "kind"),
    [("stat -c '%n|%F|%t|%T' /dev/nvidia* 2>/dev/null; true", "reader"), ("ls /dev; rm -f /dev/nvidia0", "mutator")],
)
def test_a_shell_is_what_its_commands_are(script: str, kind: str) -> None:
    assert classify(["sh", "-c", script]) == kind
