"""What the NVIDIA driver tells of itself, its cards and its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_host.facts import DeviceNode, DkmsBuild, NvidiaGpu
from gpu_host.nvidia import (
    character_majors,
    dkms_builds,
    information,
    loaded_version,
    nvidia_major,
    read_firmware,
    read_gpus,
    read_module_versions,
    read_nodes,
)
from tests.doubles.host_tree import HostTree

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release Build  (dvs-builder@U22)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.148.08  Wed Jun 25 09:11:10 UTC 2025\nGCC version: 12.2\n"


@pytest.mark.parametrize(
    ("text", "version", "kind"),
    [
        (OPEN, "580.126.09", "open"),
        (CLOSED, "570.148.08", "proprietary"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.178  Release Build\n", "580.178", "open"),
        ("", "", ""),
        ("GCC version:  gcc version 123.45.67\n", "", ""),
    ],
)
def test_version_and_kind_of_the_loaded_module(text: str, version: str, kind: str) -> None:
    assert loaded_version(text) == (version, kind)


INFORMATION = """\
Model: \t\t NVIDIA RTX A6000
IRQ:   \t\t 120
GPU UUID: \t GPU-5d7f1c2e-0000-4000-8000-000000041000
Video BIOS: \t 94.02.5c.00.02
Bus Location: \t 0000:41:00.0
Device Minor: \t 1
GPU Excluded:\t No
"""


def test_a_card_tells_minor_model_and_uuid() -> None:
    expected = NvidiaGpu("0000:41:00.0", 1, "NVIDIA RTX A6000", "GPU-5d7f1c2e-0000-4000-8000-000000041000")
    assert information("0000:41:00.0", INFORMATION) == expected


def test_a_card_that_is_not_initialised_has_no_minor_and_no_uuid() -> None:
    text = "Model: \t Unknown\nGPU UUID: \t GPU-????????-????-????-????-????????????\n"
    assert information("0000:41:00.0", text) == NvidiaGpu("0000:41:00.0", None, "Unknown", "")


def test_minors_are_read_by_address_not_by_order(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).add_gpu("0000:41:00.0", driver=None).add_gpu("0000:42:00.0", driver=None, group=14)
    tree.driver("580.126.09", loaded=False)
    world = tree.world
    world.poke("/sys/bus/pci/devices/0000:42:00.0/driver_override", "nvidia")
    world.poke("/sys/bus/pci/devices/0000:41:00.0/driver_override", "vfio-pci")
    world.must(["modprobe", "nvidia"])
    world.poke("/sys/bus/pci/devices/0000:41:00.0/driver_override", "\n")
    world.poke("/sys/bus/pci/drivers_probe", "0000:41:00.0")
    assert {gpu.address: gpu.minor for gpu in read_gpus(world)} == {"0000:41:00.0": 1, "0000:42:00.0": 0}


@pytest.mark.parametrize("name", ["nvidia", "nvidia-frontend"])
def test_the_major_has_two_names(name: str) -> None:
    text = f"Character devices:\n  1 mem\n195 {name}\n509 nvidia-uvm\n\nBlock devices:\n  8 sd\n259 nvidia\n"
    majors = character_majors(text)
    assert majors == {"mem": 1, name: 195, "nvidia-uvm": 509}
    assert nvidia_major(majors) == 195


def test_a_block_device_is_no_character_device() -> None:
    assert "sd" not in character_majors("Character devices:\n  1 mem\n\nBlock devices:\n  8 sd\n")
    assert character_majors("") == {}


def test_a_file_in_the_place_of_a_node_is_told_from_a_device(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).node("/dev/nvidia0", 195, 0).file("/dev/nvidia1", "")
    tree.path("/dev/nvidia-caps").mkdir()
    assert read_nodes(tree.world) == (
        DeviceNode("/dev/nvidia0", "char", 195, 0),
        DeviceNode("/dev/nvidia1", "file", 0, 0),
    )


def test_lines_of_dkms_status_old_and_new() -> None:
    text = (
        "nvidia/580.126.09, 6.17.2-1-pve, x86_64: installed\n"
        "nvidia/580.126.09, 6.14.8-2-pve, x86_64: installed (Original modules exist)\n"
        "nvidia/580.126.09, 7.0.1-1-pve, x86_64: built\n"
        "nvidia, 535.54.03, 5.15.0, x86_64: installed\n"
        "nvidia/570.148.08: added\n"
        "Deprecated feature: REMAKE_INITRD\n"
    )
    assert dkms_builds(text) == (
        DkmsBuild("nvidia", "580.126.09", "6.17.2-1-pve", "installed"),
        DkmsBuild("nvidia", "580.126.09", "6.14.8-2-pve", "installed"),
        DkmsBuild("nvidia", "580.126.09", "7.0.1-1-pve", "built"),
        DkmsBuild("nvidia", "535.54.03", "5.15.0", "installed"),
        DkmsBuild("nvidia", "570.148.08", "", "added"),
    )


def test_modules_on_disk_by_kernel(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).kernel("6.14.8-2-pve", running=False)
    tree.driver("580.126.09", kernels=["6.17.2-1-pve"]).driver("570.148.08", kernels=["6.14.8-2-pve"])
    kernels = ["6.14.8-2-pve", "6.17.2-1-pve", "7.0.1-1-pve"]
    assert read_module_versions(tree.world, kernels) == {"6.14.8-2-pve": "570.148.08", "6.17.2-1-pve": "580.126.09"}


def test_firmware_is_told_from_the_chips_of_nouveau(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).file("/lib/firmware/nvidia/ga102/gsp/booter.bin", "")
    tree.file("/lib/firmware/nvidia/580.126.09/gsp_ga10x.bin", "")
    assert read_firmware(tree.world) == ("580.126.09",)
