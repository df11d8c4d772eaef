"""A whole machine read into one snapshot: the example host, a container, a rented node, and next to nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_host.facts import HostFacts
from gpu_host.gather import gather
from tests.doubles.host_tree import HostTree, kpro5

KERNEL = "6.17.2-1-pve"


def test_the_example_host_as_it_is_found(tmp_path: Path) -> None:
    tree = kpro5(tmp_path)
    facts = gather(tree.world)
    assert (facts.hostname, facts.kernel, facts.kernels, facts.headers) == ("kpro5", KERNEL, (KERNEL,), (KERNEL,))
    assert facts.header_packages == (f"proxmox-headers-{KERNEL}",)
    assert (facts.pve, facts.pve_container, facts.quorate, facts.secure_boot) == ("9.1.1", "6.0.18", True, False)
    assert (facts.init, facts.virtualization, facts.rented, facts.iommu) == ("systemd", "none", False, True)
    assert {f.address: f.driver for f in facts.functions if f.is_gpu} == {
        "0000:41:00.0": "vfio-pci",
        "0000:42:00.0": "vfio-pci",
        "0000:81:00.0": "vfio-pci",
        "0000:82:00.0": "vfio-pci",
    }
    assert {c.vmid: (c.addresses[0], c.running) for c in facts.claims} == {
        101: ("0000:81:00.0", True),
        102: ("0000:82:00.0", False),
    }
    assert facts.reserved == {"0000:81:00.0": 101, "0000:81:00.1": 101}
    assert [(c.vmid, c.running, c.entries) for c in facts.containers] == [(129, False, ())]
    assert (facts.driver_version, facts.gpus, facts.nodes, facts.modules) == ("", (), (), ("vfio_pci",))
    assert "ids=10de:2230" in facts.settings["/etc/modprobe.d/vfio.conf"]
    assert {"/etc/modules", "/etc/default/grub"} < set(facts.settings)


def test_reading_changes_nothing_and_calls_few_commands(tmp_path: Path) -> None:
    tree = kpro5(tmp_path, driver="580.126.09")
    before, called = tree.snapshot(), len(tree.world.commands)
    facts = gather(tree.world)
    assert tree.snapshot() == before
    assert tree.world.mutations == []
    assert [argv[0] for argv in tree.world.commands[called:]] == ["dpkg-query", "dkms", "modinfo"]
    assert gather(tree.world) == facts


def test_a_snapshot_survives_the_way_through_json(tmp_path: Path) -> None:
    tree = kpro5(tmp_path, driver="580.126.09")
    tree.add_container(130, "dev0: /dev/dri/renderD128\n[clean]\ndev1: /dev/nvidia0\n")
    facts = gather(tree.world)
    assert HostFacts.from_dict(json.loads(json.dumps(facts.as_dict()))) == facts


def test_a_driver_that_is_installed_and_not_loaded(tmp_path: Path) -> None:
    facts = gather(kpro5(tmp_path, driver="580.126.09").world)
    assert facts.driver_version == ""
    assert facts.module_versions == {KERNEL: "580.126.09"}
    assert [(b.version, b.kernel, b.state) for b in facts.dkms] == [("580.126.09", KERNEL, "installed")]
    assert facts.firmware == ("580.126.09",)


@pytest.mark.parametrize("kind", ["open", "proprietary"])
def test_a_driver_that_is_loaded(tmp_path: Path, kind: str) -> None:
    tree = HostTree(tmp_path).add_gpu("0000:41:00.0", driver=None)
    facts = gather(tree.driver("580.126.09", kind, loaded=True, uvm_major=507).world)
    assert (facts.driver_version, facts.driver_kind) == ("580.126.09", kind)
    assert [(g.address, g.minor, g.model) for g in facts.gpus] == [("0000:41:00.0", 0, "NVIDIA RTX A6000")]
    assert (facts.majors["nvidia"], facts.majors["nvidia-uvm"]) == (195, 507)
    assert facts.modules == ("nvidia", "nvidia_uvm")


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_what_dkms_left_of_a_removed_kernel_is_no_kernel(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).kernel("7.0.1-1-pve", headers=False, running=False)
    tree.file("/lib/modules/6.8.12-4-pve/updates/dkms/nvidia.ko", "version=550.54\n")
    facts = gather(tree.world)
    assert facts.kernels == (KERNEL, "7.0.1-1-pve")
    assert facts.headers == (KERNEL,)


def test_a_link_to_headers_that_are_gone_is_no_headers(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).symlink(f"/lib/modules/{KERNEL}/build", "/usr/src/gone", absolute=True)
    assert gather(tree.world).headers == ()


def test_a_pinned_kernel(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.world.must(["proxmox-boot-tool", "kernel", "pin", KERNEL])
    assert gather(tree.world).pinned_kernel == KERNEL


# -- Secure Boot -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_secure_boot_is_what_the_firmware_says(tmp_path: Path, on: bool) -> None:
    assert gather(HostTree(tmp_path).secure_boot(on).world).secure_boot is on


def test_secure_boot_that_shim_does_not_enforce_is_off(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).secure_boot(True)
    tree.file("/sys/firmware/efi/efivars/MokSBStateRT-605dab50-e046-4300-abb6-3dd810dd8b23", "\x06\0\0\0\1")
    assert gather(tree.world).secure_boot is False


def test_firmware_in_setup_mode_enforces_nothing(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).secure_boot(True)
    tree.file("/sys/firmware/efi/efivars/SetupMode-8be4df61-93ca-11d2-aa0d-00e098032b8c", "\x06\0\0\0\1")
    assert gather(tree.world).secure_boot is False


def test_efi_without_variables_cannot_be_told(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).file("/sys/firmware/efi/fw_platform_size", "64\n")
    assert gather(tree.world).secure_boot is None


# -- what the machine itself runs in -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "virtualization"),
    [
        ("/run/systemd/container", "lxc\n", "lxc"),
        ("/proc/1/environ", "PATH=/bin\0container=lxc\0TERM=linux\0", "lxc"),
        ("/run/systemd/container", "systemd-nspawn\n", "container"),
        ("/.dockerenv", "", "docker"),
        ("/run/.containerenv", "", "podman"),
        ("/proc/mounts", "overlay / overlay rw,relatime 0 0\nproc /proc proc rw 0 0\n", "container"),
        ("/sys/class/dmi/id/sys_vendor", "QEMU\n", "kvm"),
        ("/sys/class/dmi/id/sys_vendor", "Supermicro\n", "none"),
    ],
)
def test_virtualization_without_systemd_to_ask(tmp_path: Path, path: str, text: str, virtualization: str) -> None:
    assert gather(HostTree(tmp_path, proxmox=False).file(path, text).world).virtualization == virtualization


def test_a_live_system_is_no_container(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).file("/proc/mounts", "overlay / overlay rw 0 0\n").file("/proc/2/comm", "kthreadd\n")
    assert gather(tree.world).virtualization == "none"


def rented(tmp_path: Path) -> HostTree:
    """A node of somebody else: a container without systemd, the host's driver, two of its four cards."""
    tree = HostTree(tmp_path, "c4f1b2", proxmox=False).file("/.dockerenv", "").file("/proc/1/comm", "sshd\n")
    for number in range(4):
        tree.add_gpu(f"0000:0{number + 1}:00.0", driver=None, group=None)
    tree.driver("580.95.05", loaded=True).node("/dev/nvidiactl", 195, 255).node("/dev/nvidia-uvm", 509, 0)
    return tree.node("/dev/nvidia1", 195, 1).node("/dev/nvidia3", 195, 3)


def test_a_rented_container_is_told_from_a_host(tmp_path: Path) -> None:
    facts = gather(rented(tmp_path).world)
    assert facts.rented
    assert (facts.init, facts.virtualization, facts.driver_version) == ("sshd", "docker", "580.95.05")
    assert (facts.pve, facts.quorate, facts.claims, facts.containers, facts.secure_boot) == ("", None, (), (), None)
    assert len(facts.gpus) == 4


def test_a_machine_without_anything_is_read_too(tmp_path: Path) -> None:
    """No dpkg, no /lib/modules, no sysfs, and no program that could be asked."""
    (tmp_path / "proc").mkdir()
    tree = HostTree(tmp_path / "other")
    tree.world.root = str(tmp_path)
    tree.world.programs.clear()
    facts = gather(tree.world)
    assert replace(facts, secure_boot=None) == HostFacts()


# -- engine and packages -----------------------------------------------------------------------------------------------


def test_engine_and_toolkit_from_their_packages(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).package("docker-ce", "5:28.1.1-1~debian.13~trixie")
    tree.package("nvidia-container-toolkit-base", "1.19.0-1").package("nvidia-container-toolkit", "1.19.0-1")
    facts = gather(tree.world)
    assert (facts.engine, facts.toolkit) == ("28.1.1", "1.19.0")


def test_an_engine_without_a_package_is_asked(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).file("/usr/local/bin/docker", "")
    tree.world.on("docker", lambda world, argv: "Docker version 27.5.1, build 9f9e405\n")
    assert gather(tree.world).engine == "27.5.1"


def test_removed_packages_do_not_count(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).package("nvidia-kernel-dkms", "550.163.01-2").package("libcuda1", "550.163.01-2")
    status = tree.path("/var/lib/dpkg/status").read_text()
    removed = "Package: libcuda1\nStatus: deinstall ok config-files"
    tree.file("/var/lib/dpkg/status", status.replace("Package: libcuda1\nStatus: install ok installed", removed))
    facts = gather(tree.world)
    assert facts.packages == {"nvidia-kernel-dkms": "550.163.01-2"}


def test_files_where_an_assignment_hides_are_all_read(tmp_path: Path) -> None:
    paths = [
        "/etc/default/grub.d/gpu.cfg",
        "/etc/driverctl.d/pci-0000:41:00.0",
        "/etc/initramfs-tools/modules",
        "/etc/kernel/cmdline",
        "/etc/modprobe.d/gpu.conf",
        "/etc/modules-load.d/vfio.conf",
        "/etc/udev/rules.d/99-gpu.rules",
    ]
    tree = HostTree(tmp_path)
    for path in [*paths, "/etc/modprobe.d/gpu.conf.bak"]:
        tree.file(path, f"text of {path}\n")
    assert gather(tree.world).settings == {path: f"text of {path}\n" for path in paths}
