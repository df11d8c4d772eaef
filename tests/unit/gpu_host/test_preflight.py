"""What preflight refuses, what it lets pass, and the table that it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_host.binding import GpuWant
from gpu_host.facts import HostFacts
from gpu_host.gather import gather
from gpu_host.preflight import COLUMNS, PreflightDesired, cards, judge, table
from gpu_host.steps import Plan
from tests.doubles.host_tree import RTX3090, HostTree, kpro5

WANTS = (
    GpuWant("0000:41:00.0", "host", "10de:2230", "RTX A6000"),
    GpuWant("0000:42:00.0", "host", "10de:2230", "RTX A6000"),
    GpuWant("0000:81:00.0", "vm", "10de:2204", "GeForce RTX 3090"),
    GpuWant("0000:82:00.0", "vm", "10de:2204", "GeForce RTX 3090"),
)
CARDS = ("0000:41:00.0", "0000:42:00.0")
DESIRED = PreflightDesired(
    "proxmox", WANTS, driver_version="580.126.09", driver_minimum="580.65.06", containers={129: CARDS}
)


def rules(found: Plan) -> list[str]:
    return [refusal.rule for refusal in found.refusals]


def only(found: Plan) -> str:
    """The one sentence of the one refusal."""
    (refusal,) = found.refusals
    sentence = refusal.sentence()
    assert "\n" not in sentence
    return sentence


ARGUMENTS: dict[str, Any] = {
    "kind": "proxmox",
    "gpus": [{"address": "41:00.0", "id": "10DE:2230", "model": "", "owner": "host"}],
    "addresses": [],
    "gpu_count": 0,
    "containers": {"129": ["00000000:41:00.0"]},
    "driver_version": "580.126.09",
    "driver_minimum": "",
    "kernels": {},
    "pin_kernel": False,
}


def test_arguments_of_the_module_are_brought_to_the_form_of_sysfs() -> None:
    desired = PreflightDesired.of(ARGUMENTS)
    assert desired.gpus == (GpuWant("0000:41:00.0", "host", "10de:2230"),)
    assert desired.containers == {129: ("0000:41:00.0",)}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"addresses": ["slot 1"]}, "addresses: 'slot 1' is no PCI address; write it as `lspci -D` does"),
        ({"addresses": ["0000:41:00"]}, "addresses: '0000:41:00' names no function; .* such as 0000:41:00.0"),
        ({"containers": {"ct129": []}}, "containers: 'ct129' is no number of a container"),
        ({"containers": {"129": ["x"]}}, "containers.129: 'x' is no PCI address"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PreflightDesired.of({**ARGUMENTS, **wrong})


# -- Proxmox hosts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return kpro5(tmp_path)


def test_the_example_host_may_be_provisioned(tree: HostTree) -> None:
    found = judge(gather(tree.world), DESIRED)
    assert (found.refusals, found.steps, found.notes) == ([], [], [])


def test_a_card_that_moved_is_named_with_its_new_address(tree: HostTree) -> None:
    wants = (replace(WANTS[0], address="0000:43:00.0"), *WANTS[1:])
    found = judge(gather(tree.world), replace(DESIRED, gpus=wants, containers={}))
    missing, undeclared = found.refusals
    assert (missing.rule, undeclared.rule) == ("no-such-card", "undeclared-card")
    assert "10de:2230 is at 0000:41:00.0" in missing.what
    assert undeclared.where == "0000:41:00.0"


def test_another_card_at_the_address_is_refused(tree: HostTree) -> None:
    wants = (replace(WANTS[0], id="10de:2684", model="RTX 4090"), *WANTS[1:])
    said = only(judge(gather(tree.world), replace(DESIRED, gpus=wants)))
    assert said.startswith("0000:41:00.0: 10de:2230 is at this address, not 10de:2684 (RTX 4090)")


def test_everything_that_is_wrong_is_told_at_once(tree: HostTree) -> None:
    tree.add_vm(103, "hostpci0: 41:00,pcie=1\n[clean]\nhostpci0: 0000:42:00.1\n")
    tree.quorum(False).kernel("7.0.1-1-pve", headers=False).secure_boot(True)
    found = judge(gather(tree.world), DESIRED)
    assert rules(found) == ["no-quorum", "held-by-vm", "held-by-vm", "kernel-unfit", "secure-boot"]


def test_without_an_iommu_no_card_can_go_to_a_virtual_machine(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu("0000:81:00.0", RTX3090, None, group=None)
    said = only(judge(gather(tree.world), replace(DESIRED, gpus=WANTS[2:3], containers={})))
    assert "the kernel runs without an IOMMU" in said
    assert "VT-d" in said


def test_a_host_whose_cards_all_belong_to_virtual_machines_needs_no_driver(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu("0000:81:00.0", RTX3090).kernel("7.0.1-1-pve").secure_boot(True)
    assert judge(gather(tree.world), replace(DESIRED, gpus=WANTS[2:3], containers={})).refusals == []


def test_an_enrolled_key_makes_secure_boot_fine(tree: HostTree) -> None:
    facts = gather(tree.secure_boot(True).world)
    assert rules(judge(facts, DESIRED)) == ["secure-boot"]
    assert judge(facts, replace(DESIRED, mok_enrolled=True)).refusals == []


def test_a_kernel_that_may_be_pinned_is_no_reason_to_stop(tree: HostTree) -> None:
    facts = gather(tree.kernel("7.0.1-1-pve", headers=False).world)
    said = only(judge(facts, DESIRED))
    assert "proxmox-boot-tool kernel pin 6.17.2-1-pve" in said
    assert "nvidia_driver_version" in said
    assert judge(facts, replace(DESIRED, pin_kernel=True)).refusals == []
    known = {"580.126.09": {"min": "6.8", "max": "7.0", "source": "built here"}}
    assert judge(facts, replace(DESIRED, kernels=known)).refusals == []


def test_a_container_that_is_not_here_or_locked(tree: HostTree) -> None:
    assert "there is no container of this number here (there are: 129)" in only(
        judge(gather(tree.world), replace(DESIRED, containers={130: CARDS}))
    )
    tree.add_container(129, "arch: amd64\nlock: backup\n")
    assert "the container is locked (backup)" in only(judge(gather(tree.world), DESIRED))


def test_a_machine_without_proxmox_is_no_proxmox_host(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, proxmox=False)
    assert only(judge(gather(tree.world), DESIRED)) == (
        "kpro5: this is no Proxmox VE host (no package pve-manager); correct ansible_host, or gpu_host_kind"
    )


def test_a_storage_host_is_asked_nothing(tmp_path: Path) -> None:
    facts = gather(HostTree(tmp_path, proxmox=False).world)
    assert judge(facts, PreflightDesired("storage")).refusals == []


# -- containers --------------------------------------------------------------------------------------------------------


def inside(tmp_path: Path, minors: tuple[int, ...] = (0, 1)) -> HostTree:
    """Container 129 as it sees itself: all cards of its host in /proc and /sys, its own nodes in /dev."""
    tree = HostTree(tmp_path, "ct129", proxmox=False).file("/run/systemd/container", "lxc\n")
    for bus in ("41", "42"):
        tree.add_gpu(f"0000:{bus}:00.0", driver=None, group=None)
    tree.driver("580.126.09", loaded=True).node("/dev/nvidiactl", 195, 255)
    tree.node("/dev/nvidia-uvm", 509, 0).node("/dev/nvidia-uvm-tools", 509, 1)
    for minor in minors:
        tree.node(f"/dev/nvidia{minor}", 195, minor)
    return tree


CONTAINER = PreflightDesired("container", addresses=CARDS, driver_version="580.126.09", driver_minimum="580.65.06")


def test_a_container_with_its_cards_is_fine(tmp_path: Path) -> None:
    found = judge(gather(inside(tmp_path).world), CONTAINER)
    assert (found.refusals, found.notes) == ([], [])


def test_a_container_without_one_of_its_cards(tmp_path: Path) -> None:
    said = only(judge(gather(inside(tmp_path, minors=(0,)).world), CONTAINER))
    assert said.startswith("0000:42:00.0: /dev/nvidia1 is not in this container; run site.yml")


def test_a_container_with_a_card_too_many_is_told(tmp_path: Path) -> None:
    found = judge(gather(inside(tmp_path).world), replace(CONTAINER, addresses=CARDS[:1]))
    assert found.refusals == []
    assert found.notes == [
        "0000:42:00.0 (NVIDIA RTX A6000) is in this container too, and lxc_gpu_addresses does not name it"
    ]


def test_a_container_whose_host_has_no_driver(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, "ct129", proxmox=False).file("/run/systemd/container", "lxc\n")
    assert rules(judge(gather(tree.world), CONTAINER)) == ["no-driver"]


def test_a_host_is_no_container(tree: HostTree) -> None:
    assert rules(judge(gather(tree.world), CONTAINER)) == ["not-a-container"]


# -- rented nodes ------------------------------------------------------------------------------------------------------


def rented(tmp_path: Path, version: str = "580.126.09", nodes: int = 4) -> HostFacts:
    tree = HostTree(tmp_path, "c4f1b2", proxmox=False).file("/.dockerenv", "").file("/proc/1/comm", "sshd\n")
    for number in range(8):
        tree.add_gpu(f"0000:{number + 1:02x}:00.0", driver=None, group=None)
    tree.driver(version, loaded=True)
    for minor in range(nodes):
        tree.node(f"/dev/nvidia{minor}", 195, minor)
    return gather(tree.world)


RENTED = PreflightDesired("rented", gpu_count=4, driver_version="580.126.09", driver_minimum="580.65.06")


def test_a_rented_node_is_only_looked_at(tmp_path: Path) -> None:
    assert judge(rented(tmp_path), RENTED).refusals == []


def test_a_rented_node_with_an_old_driver(tmp_path: Path) -> None:
    said = only(judge(rented(tmp_path, version="570.148.08"), RENTED))
    assert "the host's driver is 570.148.08, at least 580.65.06 is needed" in said


def test_a_rented_node_with_a_card_missing(tmp_path: Path) -> None:
    """Its /proc shows the eight cards of the host; what counts is what it can open."""
    assert "3 GPUs are here, 4 were rented" in only(judge(rented(tmp_path, nodes=3), RENTED))
    assert judge(rented(tmp_path / "again", nodes=3), replace(RENTED, gpu_count=0)).refusals == []


def test_a_rented_node_is_no_proxmox_host(tmp_path: Path) -> None:
    assert rules(judge(rented(tmp_path), DESIRED)) == ["not-proxmox"]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_of_the_example_host(tree: HostTree) -> None:
    rows = cards(gather(tree.world), DESIRED)
    assert [(row["address"], row["driver"], row["group"], row["owner"], row["holders"]) for row in rows] == [
        ("0000:41:00.0", "vfio-pci", "13", "host", "-"),
        ("0000:42:00.0", "vfio-pci", "14", "host", "-"),
        ("0000:81:00.0", "vfio-pci", "27", "vm", "VM 101 (hostpci0; running)"),
        ("0000:82:00.0", "vfio-pci", "28", "vm", "VM 102 (hostpci0)"),
    ]
    assert rows[0]["model"] == "RTX A6000"


def test_the_inventory_does_not_name_a_card_that_is_another_one(tree: HostTree) -> None:
    wants = (replace(WANTS[0], id="10de:2684", model="RTX 4090"), *WANTS[1:])
    rows = cards(gather(tree.world), replace(DESIRED, gpus=wants))
    assert (rows[0]["id"], rows[0]["model"], rows[1]["model"]) == ("10de:2230", "?", "RTX A6000")


def test_the_table_names_containers_processes_and_snapshots(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu(CARDS[0], driver=None, group=13).driver("580.126.09", loaded=True)
    tree.node("/dev/nvidia0", 195, 0).add_container(129, "dev0: /dev/nvidia0\n", running=True)
    tree.process(900, "python3", ["/dev/nvidia0"]).add_vm(103, "[clean]\nhostpci1: 41:00.1\n")
    (row,) = cards(gather(tree.world), PreflightDesired("proxmox"))
    assert row["holders"] == "VM 103 (hostpci1 in snapshot clean), CT 129 (running), process 900 python3"
    assert (row["model"], row["owner"]) == ("NVIDIA RTX A6000", "-")


def test_a_container_sees_only_its_own_cards_in_the_table(tmp_path: Path) -> None:
    rows = cards(gather(inside(tmp_path, minors=(1,)).world), CONTAINER)
    assert [row["address"] for row in rows] == ["0000:42:00.0"]


def test_columns_are_aligned(tree: HostTree) -> None:
    lines = table(cards(gather(tree.world), DESIRED))
    assert lines[0].split() == list(COLUMNS)
    starts: list[Any] = [lines[0].index(column) for column in COLUMNS]
    assert all(line[start - 1] == " " and line[start] != " " for line in lines for start in starts[1:])


def test_no_card_is_said_in_words() -> None:
    assert table([]) == ["no NVIDIA card is here"]
