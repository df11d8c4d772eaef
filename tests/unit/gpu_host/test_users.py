"""Who has a card open, found in /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_host.nvidia import character_majors, read_gpus
from gpu_host.pci import read_functions
from gpu_host.users import read_users
from tests.doubles.host_tree import HostTree, TreeWorld, kpro5

A, B = "0000:41:00.0", "0000:42:00.0"


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    """Two cards on the host's driver, minors 0 and 1, with their nodes."""
    made = (
        HostTree(tmp_path).add_gpu(A, driver=None).add_gpu(B, driver=None, group=14).driver("580.126.09", loaded=True)
    )
    return made.node("/dev/nvidia0", 195, 0).node("/dev/nvidia1", 195, 1).node("/dev/nvidiactl", 195, 255)


def users(world: TreeWorld) -> dict[str, tuple[str, ...]]:
    majors = character_majors(world.read("/proc/devices") or "")
    return read_users(world, read_functions(world), read_gpus(world), majors)


def test_nobody_has_a_card_open(tree: HostTree) -> None:
    assert users(tree.process(50, "bash", ["/dev/null"]).world) == {}


def test_an_open_node_is_the_card_of_its_minor(tree: HostTree) -> None:
    tree.process(900, "python3", ["/dev/nvidiactl", "/dev/nvidia1"]).process(
        1000, "sglang", ["/dev/nvidia0", "/dev/nvidia1"]
    )
    assert users(tree.world) == {A: ("1000 sglang",), B: ("900 python3", "1000 sglang")}


def test_a_container_may_call_the_node_by_another_name(tree: HostTree) -> None:
    """A bind mount shows the second card as /dev/nvidia0 inside: the numbers of what is open tell the truth."""
    tree.node("/dev/shown-as/nvidia0", 195, 1)
    assert users(tree.process(900, "python3", ["/dev/shown-as/nvidia0"]).world) == {B: ("900 python3",)}


def test_a_mapping_alone_holds_a_card(tree: HostTree) -> None:
    assert users(tree.process(900, "python3", maps=["/dev/nvidia0", "/usr/lib/libc.so.6"]).world) == {
        A: ("900 python3",)
    }


def test_a_mapping_of_a_removed_node_holds_its_card(tree: HostTree) -> None:
    assert users(tree.process(900, "python3", maps=["/dev/nvidia1 (deleted)"]).world) == {B: ("900 python3",)}


def test_minor_ten_is_not_minor_one(tree: HostTree) -> None:
    assert users(tree.process(900, "python3", maps=["/dev/nvidia10"]).world) == {}


def test_a_name_that_the_kernel_cut_is_completed_from_the_command_line(tree: HostTree) -> None:
    tree.world.must(["systemctl", "start", "nvidia-persistenced"])
    assert users(tree.world) == {A: ("4242 nvidia-persistenced",), B: ("4242 nvidia-persistenced",)}


def test_a_virtual_machine_has_its_group_open(tmp_path: Path) -> None:
    assert users(kpro5(tmp_path).world) == {"0000:81:00.0": ("100101 kvm",), "0000:81:00.1": ("100101 kvm",)}


def test_the_newer_door_to_vfio_is_one_function(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu(A).node("/dev/vfio/devices/vfio3", 510, 3)
    tree.file(f"/sys/bus/pci/devices/{A}/vfio-dev/vfio3/dev", "510:3\n")
    assert users(tree.process(900, "kvm", ["/dev/vfio/devices/vfio3"]).world) == {A: ("900 kvm",)}


def test_without_a_driven_card_nothing_is_searched(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu(A, driver=None).process(900, "python3", ["/dev/null"])
    assert users(tree.world) == {}
