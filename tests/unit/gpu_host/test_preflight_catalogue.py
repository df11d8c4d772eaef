"""The failures that are known from the field, by their row in the catalogue, as far as facts or preflight see them.

Rows 12, 16, 28 and 30 happen inside installers and containers and are tested with the roles that deal with them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_host.facts import HostFacts
from gpu_host.gather import gather
from gpu_host.preflight import PreflightDesired, cards, judge
from tests.doubles.host_tree import HostTree, kpro5
from tests.unit.gpu_host.test_preflight import CONTAINER, DESIRED, WANTS, inside, only, rules

A, B = "0000:41:00.0", "0000:42:00.0"


def on_kernel(tmp_path: Path, kernel: str, driver: str = "580.126.09") -> tuple[HostFacts, PreflightDesired]:
    tree = kpro5(tmp_path).kernel(kernel)
    return gather(tree.world), replace(DESIRED, driver_version=driver)


def driven(tmp_path: Path) -> HostTree:
    """Two cards on the host's driver, without nodes."""
    tree = HostTree(tmp_path).add_gpu(A, driver=None).add_gpu(B, driver=None, group=14)
    return tree.driver("580.126.09", loaded=True)


def test_row_01_driver_580_126_09_does_not_build_on_6_19(tmp_path: Path) -> None:
    found = judge(*on_kernel(tmp_path, "6.19.2-1-pve"))
    assert "kernel-unfit" in rules(found)
    assert "6.19.2-1-pve" in found.refusal_text()


def test_row_02_driver_580_126_18_on_7_0_has_two_ways_out(tmp_path: Path) -> None:
    said = judge(*on_kernel(tmp_path, "7.0.2-1-pve", "580.126.18")).refusal_text()
    assert "proxmox-boot-tool kernel pin 6.17.2-1-pve" in said
    assert "580.159.04" in said


@pytest.mark.parametrize(("kernel", "fits"), [("6.18.5-1-pve", True), ("7.0.9-1-pve", False)])
def test_row_03_the_range_has_an_upper_end(tmp_path: Path, kernel: str, fits: bool) -> None:
    assert (judge(*on_kernel(tmp_path, kernel, "580.119.02")).refusals == []) is fits


def test_row_04_packages_of_another_driver_are_seen(tmp_path: Path) -> None:
    tree = kpro5(tmp_path).package("nvidia-kernel-dkms", "550.163.01-2").package("libcuda1", "550.163.01-2")
    assert set(gather(tree.world).packages.values()) == {"550.163.01-2"}


def test_row_05_a_pinned_older_kernel_is_seen(tmp_path: Path) -> None:
    tree = kpro5(tmp_path).kernel("7.0.1-1-pve", headers=False, running=False)
    assert rules(judge(gather(tree.world), DESIRED)) == ["next-kernel-unfit"]
    tree.world.must(["proxmox-boot-tool", "kernel", "pin", "6.17.2-1-pve"])
    assert judge(gather(tree.world), DESIRED).refusals == []


def test_row_06_headers_of_an_unfit_kernel_and_a_build_that_did_not_end(tmp_path: Path) -> None:
    tree = kpro5(tmp_path, driver="580.126.09").kernel("7.0.1-1-pve", running=False)
    tree.path("/var/lib/dkms/nvidia/580.126.09/7.0.1-1-pve/x86_64").mkdir(parents=True)
    facts = gather(tree.world)
    assert "proxmox-headers-7.0.1-1-pve" in facts.header_packages
    assert {b.kernel: b.state for b in facts.dkms} == {"6.17.2-1-pve": "installed", "7.0.1-1-pve": "built"}


def test_row_07_uvm_is_not_loaded_when_the_container_runs(tmp_path: Path) -> None:
    tree = inside(tmp_path)
    tree.world.kernel.unload("nvidia-uvm")
    found = judge(gather(tree.world), CONTAINER)
    assert {refusal.what for refusal in found.refusals} == {"nvidia-uvm is not loaded on the host"}


def test_row_27_the_node_of_uvm_is_missing_after_boot(tmp_path: Path) -> None:
    tree = inside(tmp_path)
    tree.world.remove("/dev/nvidia-uvm")
    found = judge(gather(tree.world), CONTAINER)
    assert {refusal.what for refusal in found.refusals} == {"/dev/nvidia-uvm is not in this container"}


def test_row_08_the_major_of_uvm_is_read_and_its_node_is_absent_until_made(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu(A, driver=None).driver("580.126.09", loaded=True, uvm_major=237)
    facts = gather(tree.world)
    assert (facts.majors["nvidia-uvm"], facts.nodes) == (237, ())
    tree.world.must(["nvidia-modprobe", "-u", "-c", "0"])
    assert [(n.path, n.major) for n in gather(tree.world).nodes] == [
        ("/dev/nvidia-uvm", 237),
        ("/dev/nvidia-uvm-tools", 237),
    ]


@pytest.mark.parametrize("row", ["row_09", "row_10", "row_11"])
def test_rows_09_to_11_a_recorded_major_of_uvm_is_stale(tmp_path: Path, row: str) -> None:
    tree = inside(tmp_path).node("/dev/nvidia-uvm", {"row_09": 510, "row_10": 511, "row_11": 243}[row], 0)
    found = judge(gather(tree.world), CONTAINER)
    assert rules(found) == ["card-not-here", "card-not-here"]
    assert "and its driver is at 509:0 now" in found.refusals[0].what


@pytest.mark.parametrize(
    ("row", "loaded", "on_disk"),
    [
        ("row_13", "570.148.06", "570.148.08"),
        ("row_14", "570.124.04", "570.124.06"),
        ("row_15", "580.173.02", "580.178"),
        ("row_17", "580.95.05", "580.126.09"),
    ],
)
def test_rows_13_to_17_a_point_release_apart_is_not_the_same(
    tmp_path: Path, row: str, loaded: str, on_disk: str
) -> None:
    tree = HostTree(tmp_path).add_gpu(A, driver=None).driver(loaded, loaded=True)
    facts = gather(tree.driver(on_disk).world)
    assert (facts.driver_version, facts.module_versions[facts.kernel]) == (loaded, on_disk)


def test_row_18_firmware_of_another_version(tmp_path: Path) -> None:
    tree = kpro5(tmp_path, driver="580.126.09")
    tree.world.remove("/lib/firmware/nvidia/580.126.09/gsp_ga10x.bin")
    tree.path("/lib/firmware/nvidia/580.126.09").rename(tree.path("/lib/firmware/nvidia/570.148.08"))
    assert gather(tree.world).firmware == ("570.148.08",)


def test_row_19_no_quorum_and_no_writes_below_etc_pve(tmp_path: Path) -> None:
    assert "pvecm expected 1" in only(judge(gather(kpro5(tmp_path).quorum(False).world), DESIRED))


def test_row_20_identical_cards_are_told_apart_by_address(tmp_path: Path) -> None:
    facts = gather(kpro5(tmp_path).world)
    owners = {row["address"]: row["owner"] for row in cards(facts, DESIRED) if row["id"] == "10de:2230"}
    assert owners == {A: "host", B: "host"}
    assert "ids=" in facts.settings["/etc/modprobe.d/vfio.conf"]
    other = replace(DESIRED, gpus=(WANTS[0], replace(WANTS[1], owner="vm"), *WANTS[2:]), containers={})
    assert judge(facts, other).refusals == []


def test_row_21_a_card_in_use_is_not_unbound(tmp_path: Path) -> None:
    tree = driven(tmp_path).node("/dev/nvidia0", 195, 0).process(900, "python3", ["/dev/nvidia0"])
    wants = (replace(WANTS[0], owner="vm"), WANTS[1])
    found = judge(gather(tree.world), replace(DESIRED, gpus=wants, containers={}))
    assert "in-use" in rules(found)
    assert "900 python3" in found.refusal_text()


def test_row_22_minor_and_address_are_two_things(tmp_path: Path) -> None:
    tree = driven(tmp_path)
    world = tree.world
    for address in (A, B):
        world.poke("/sys/bus/pci/drivers/nvidia/unbind", address)
    for address in (B, A):
        world.poke("/sys/bus/pci/drivers_probe", address)
    assert {gpu.address: gpu.minor for gpu in gather(world).gpus} == {A: 1, B: 0}


def test_row_23_a_card_without_device_minor_is_not_initialised(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, "ct129", proxmox=False).file("/run/systemd/container", "lxc\n")
    tree.add_gpu(A, driver=None)
    tree.world.kernel.silent_minors.add(A)
    facts = gather(tree.driver("580.126.09", loaded=True).world)
    assert [(gpu.address, gpu.minor) for gpu in facts.gpus] == [(A, None)]
    assert "does not drive this card" in only(judge(facts, replace(CONTAINER, addresses=(A,))))


def test_row_24_a_container_that_started_before_the_nodes(tmp_path: Path) -> None:
    found = judge(gather(inside(tmp_path, minors=()).world), CONTAINER)
    assert [refusal.what for refusal in found.refusals] == [
        "/dev/nvidia0 is not in this container",
        "/dev/nvidia1 is not in this container",
    ]


def test_row_25_a_file_in_the_place_of_a_device(tmp_path: Path) -> None:
    said = only(judge(gather(inside(tmp_path).file("/dev/nvidia1", "").world), CONTAINER))
    assert "a file stands at /dev/nvidia1 in the place of the device" in said


def test_row_26_secure_boot_stops_with_instructions(tmp_path: Path) -> None:
    said = only(judge(gather(kpro5(tmp_path).secure_boot(True).world), DESIRED))
    assert "mokutil --import" in said
    assert "Key was rejected by service" in said


def test_row_29_a_group_that_is_not_viable(tmp_path: Path) -> None:
    tree = kpro5(tmp_path).add_function("0000:83:00.0", "010700", "1000", "00ac", "mpt3sas", 28)
    said = only(judge(gather(tree.world), DESIRED))
    assert "IOMMU group 28 also holds 0000:83:00.0, a device on mpt3sas" in said


def test_row_29_bridges_do_not_spoil_a_group(tmp_path: Path) -> None:
    tree = kpro5(tmp_path).add_function("0000:80:05.1", "060400", "1022", "1483", "pcieport", 27)
    assert judge(gather(tree.world), DESIRED).refusals == []
