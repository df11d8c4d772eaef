"""Old assignments are taken out of every place, nothing else changes, and the way back is exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_host.hiding_places import Cards, claimed_ids, clean, keep_line, kept_texts, restore

IDS = frozenset({"10de:2230", "10de:2204", "10de:1aef"})
DRIVERS = {"0000:41:00.0": "nvidia", "0000:81:00.0": "vfio-pci"}
CARDS = Cards(IDS, DRIVERS, host_driven=True)
VMS_ONLY = Cards(IDS, DRIVERS, host_driven=False)
MODPROBE = "/etc/modprobe.d/old.conf"


def live(text: str | None) -> list[str]:
    """Lines that are not comments."""
    return [line for line in (text or "").split("\n") if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize(
    ("path", "line", "left"),
    [
        (MODPROBE, "options vfio-pci ids=10de:2230,10de:1aef", []),
        (
            MODPROBE,
            "options vfio_pci ids=10DE:2230,8086:1521 disable_vga=1",
            ["options vfio_pci ids=8086:1521 disable_vga=1"],
        ),
        (MODPROBE, "options vfio-pci ids=10de:2204:10de:1467", []),
        (MODPROBE, "options pci-stub ids=10de:2230", []),
        (MODPROBE, "options vfio-pci disable_idle_d3=1", ["options vfio-pci disable_idle_d3=1"]),
        (MODPROBE, "blacklist nvidia", []),
        (MODPROBE, "blacklist nvidia-drm", []),
        (MODPROBE, "blacklist nouveau", ["blacklist nouveau"]),
        (MODPROBE, "blacklist nvidiafb", ["blacklist nvidiafb"]),
        (MODPROBE, "install nvidia /bin/false", []),
        (MODPROBE, "install nvidia_uvm /usr/bin/true", []),
        (MODPROBE, "install nvidia /sbin/modprobe -i nvidia", ["install nvidia /sbin/modprobe -i nvidia"]),
        (MODPROBE, "# options vfio-pci ids=10de:2230", []),
        ("/etc/initramfs-tools/modules", "vfio-pci ids=10de:2230,10de:1aef", ["vfio-pci"]),
        ("/etc/modules-load.d/vfio.conf", "vfio", ["vfio"]),
        (
            "/etc/default/grub",
            'GRUB_CMDLINE_LINUX_DEFAULT="quiet vfio-pci.ids=10de:2230 iommu=pt"',
            ['GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=pt"'],
        ),
        (
            "/etc/default/grub",
            "GRUB_CMDLINE_LINUX='vfio_pci.ids=10de:2230,8086:1521'",
            ["GRUB_CMDLINE_LINUX='vfio_pci.ids=8086:1521'"],
        ),
        (
            "/etc/default/grub",
            'GRUB_CMDLINE_LINUX="modprobe.blacklist=nouveau,nvidia"',
            ['GRUB_CMDLINE_LINUX="modprobe.blacklist=nouveau"'],
        ),
        ("/etc/default/grub", 'GRUB_TIMEOUT="5"', ['GRUB_TIMEOUT="5"']),
        ("/etc/kernel/cmdline", "root=ZFS=rpool vfio-pci.ids=10de:2230 quiet", ["root=ZFS=rpool quiet"]),
        ("/etc/udev/rules.d/99-gpu.rules", 'KERNEL=="0000:41:00.0", ATTR{driver_override}="vfio-pci"', []),
        ("/etc/udev/rules.d/99-gpu.rules", 'ATTR{vendor}=="0x10de", ATTR{driver_override}="vfio-pci"', []),
        (
            "/etc/udev/rules.d/99-gpu.rules",
            'KERNEL=="0000:99:00.0", ATTR{driver_override}="vfio-pci"',
            ['KERNEL=="0000:99:00.0", ATTR{driver_override}="vfio-pci"'],
        ),
        ("/etc/driverctl.d/pci-0000:41:00.0", "vfio-pci", []),
        ("/etc/driverctl.d/pci-0000:81:00.0", "vfio-pci", ["vfio-pci"]),
        ("/usr/lib/modprobe.d/vendor.conf", "blacklist nvidia", ["blacklist nvidia"]),
    ],
)
def test_every_hiding_place(path: str, line: str, left: list[str]) -> None:
    assert live(clean(path, f"{line}\n", CARDS)) == left


def test_blacklist_stays_where_every_card_is_a_vms() -> None:
    text = "blacklist nvidia\ninstall nvidia /bin/false\n"
    assert clean(MODPROBE, text, VMS_ONLY) == text
    assert live(clean(MODPROBE, "options vfio-pci ids=10de:2204\n", VMS_ONLY)) == []


def test_second_old_assignment_on_a_shortened_line_keeps_the_first_way_back() -> None:
    first = clean(MODPROBE, "options vfio-pci ids=10de:2230 disable_vga=1\n", CARDS)
    assert first is not None
    edited = first.replace("options vfio-pci disable_vga=1\n", "options vfio-pci disable_vga=1 ids=10de:2204\n")
    again = clean(MODPROBE, edited, CARDS)
    assert again == first
    assert restore(MODPROBE, first, CARDS) == "options vfio-pci ids=10de:2230 disable_vga=1\n"


def test_line_that_somebody_changed_since_is_not_put_back() -> None:
    cleaned = clean(MODPROBE, "options vfio-pci ids=10de:2230 disable_vga=1\n", CARDS)
    assert cleaned is not None
    edited = cleaned.replace("disable_vga=1\n", "disable_vga=0\n").replace(
        "shortened: options vfio-pci ids=10de:2230 disable_vga=0",
        "shortened: options vfio-pci ids=10de:2230 disable_vga=1",
    )
    assert restore(MODPROBE, edited, CARDS) == "options vfio-pci disable_vga=0\n"


def test_texts_without_comments_are_kept_elsewhere() -> None:
    text = "root=ZFS=rpool vfio-pci.ids=10de:2230\n"
    own = f"# head\n{keep_line('/etc/kernel/cmdline', text)}\nsoftdep nvidia pre: vfio-pci\n"
    assert kept_texts(own) == {"/etc/kernel/cmdline": text}


def test_ids_of_the_boot_files_are_found() -> None:
    settings = {
        MODPROBE: "options vfio-pci ids=10DE:2230,8086:1521\n# options vfio-pci ids=10de:9999\n",
        "/etc/default/grub": 'GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:1aef:10de:1467"\n',
    }
    assert claimed_ids(settings) == {"10de:2230", "8086:1521", "10de:1aef"}


LINES = st.sampled_from(
    [
        "",
        "# a comment",
        "options vfio-pci ids=10de:2230,10de:1aef",
        "options vfio-pci ids=10de:2230,8086:1521 disable_vga=1",
        "options   vfio_pci   disable_vga=1  ids=10de:2204",
        "blacklist nvidia",
        "blacklist nouveau",
        "install nvidia /bin/false",
        "softdep nvidia pre: vfio-pci",
        'GRUB_CMDLINE_LINUX_DEFAULT="quiet vfio-pci.ids=10de:2230  modprobe.blacklist=nvidia"',
        "GRUB_CMDLINE_LINUX=''",
        'SUBSYSTEM=="pci", KERNEL=="0000:41:00.0", ATTR{driver_override}="vfio-pci"',
        "vfio-pci ids=10de:2230",
    ]
)


@given(
    path=st.sampled_from([MODPROBE, "/etc/default/grub", "/etc/initramfs-tools/modules", "/etc/udev/rules.d/99.rules"]),
    lines=st.lists(LINES, max_size=8),
    end=st.sampled_from(["", "\n"]),
)
def test_cleaning_is_exact_both_ways(path: str, lines: list[str], end: str) -> None:
    """Cleaning twice is cleaning once, nothing of the cards is left, and the way back is byte for byte."""
    text = "\n".join(lines) + end
    cleaned = clean(path, text, CARDS)
    assert cleaned is not None
    assert clean(path, cleaned, CARDS) == cleaned
    assert not claimed_ids({path: cleaned}) & IDS
    assert restore(path, cleaned, CARDS) == text
