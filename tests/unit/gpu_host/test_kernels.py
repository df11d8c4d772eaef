"""The kernel gate: what is known to build, what a refusal says, and which headers are kept away."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_host.kernels import (
    TABLE,
    KernelRange,
    fitting,
    judge,
    newer_driver,
    series_of,
    table_of,
    unfit_headers_pattern,
    unknown_driver,
    version_key,
    ways_out,
)

DRIVER = "580.126.09"


def known(version: str = DRIVER) -> KernelRange:
    found = table_of(version)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("version", "kernel", "builds"),
    [
        (DRIVER, "6.8.12-11-pve", True),
        (DRIVER, "6.14.8-2-pve", True),
        (DRIVER, "6.17.2-1-pve", True),
        (DRIVER, "6.18.3-1-pve", True),
        (DRIVER, "6.19.2", False),  # row 1: NixOS/nixpkgs#492422
        ("580.126.18", "7.0.1_1", False),  # row 2: void-linux/void-packages#60171
        ("580.119.02", "6.18.32-1-cachyos-lts", True),  # row 3: Frogging-Family/nvidia-all#379
        ("580.119.02", "7.0.9-1-cachyos", False),  # row 3: an upper bound, not only a lower one
        ("550.163.01", "6.17.13-1-pve", False),  # row 4: NVIDIA/open-gpu-kernel-modules#1143
        ("580.159.04", "7.1.0-1-pve", True),
        ("580.173.02", "7.0.2-1-pve", True),
        ("590.48.01", "6.19.7", False),
        (DRIVER, "4.9.0", False),
        (DRIVER, "not a kernel", False),
        ("470.256.02", "6.8.12-11-pve", False),  # nothing is known about it
    ],
)
def test_the_table_judges_as_the_reports_do(version: str, kernel: str, builds: bool) -> None:
    assert judge(version, kernel) is builds


def test_the_spans_of_the_table_are_ordered_and_do_not_overlap() -> None:
    ends = [(version_key(r.first), version_key(r.last)) for r in TABLE]
    assert all(first <= last for first, last in ends)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))
    assert all(r.source and r.low < r.high for r in TABLE)


def test_the_inventory_adds_to_the_table_and_overrides_it() -> None:
    extra = {"570": {"min": "5.15", "max": "6.14", "source": "our own builds"}, DRIVER: {"max": "6.17"}}
    branch = table_of("570.195.03", extra)
    assert branch is not None
    assert (branch.low, branch.high, branch.source) == ((5, 15), (6, 14), "our own builds")
    assert judge(DRIVER, "6.17.2-1-pve", extra)
    assert not judge(DRIVER, "6.18.1-1-pve", extra)


@pytest.mark.parametrize("entry", [{}, {"max": "newest"}, {"min": "old", "max": "6.14"}])
def test_an_entry_without_a_range_is_no_range(entry: dict[str, str]) -> None:
    assert table_of("570.195.03", {"570": entry}) is None


@pytest.mark.parametrize("version", ["", "newest", "580", "580.126.09; reboot", "580."])
def test_text_that_is_no_version_has_no_range(version: str) -> None:
    assert table_of(version) is None


def test_an_unknown_driver_is_refused_with_the_ones_that_are_known() -> None:
    refusal = unknown_driver("470.256.02", "nvidia_driver_version")
    assert refusal.rule == "no-kernel-range"
    assert "470.256.02" in refusal.sentence()
    assert "580.126.09 (4.15 to 6.18)" in refusal.fix
    assert "nvidia_driver_kernels" in refusal.fix


def test_both_ways_out_are_named_with_an_installed_kernel() -> None:
    kernels = ("6.8.12-11-pve", "6.17.2-1-pve", "6.17.13-1-pve", "7.0.2-1-pve")
    out = ways_out(DRIVER, known(), "7.0.2-1-pve", kernels, proxmox=True)
    assert "proxmox-boot-tool kernel pin 6.17.13-1-pve" in out  # row 5, and the newest of them by number, not by text
    assert "580.159.04" in out


def test_without_an_installed_kernel_the_package_is_named() -> None:
    out = ways_out(DRIVER, known(), "7.0.2-1-pve", ("7.0.2-1-pve",), proxmox=True)
    assert "proxmox-kernel-6.18" in out
    elsewhere = ways_out(DRIVER, known(), "7.0.2-amd64", ("7.0.2-amd64", "6.12.5-amd64"), proxmox=False)
    assert "proxmox" not in elsewhere
    assert "6.12.5-amd64" in elsewhere


def test_no_newer_driver_is_invented() -> None:
    assert newer_driver(DRIVER, "6.19.2") == "580.159.04"
    assert newer_driver(DRIVER, "9.0.0") is None
    assert "a newer driver" in ways_out(DRIVER, known(), "9.0.0", (), proxmox=True)


def test_the_newest_fitting_kernel_comes_first() -> None:
    assert fitting(known(), ("6.8.12-11-pve", "7.0.2-1-pve", "6.17.2-1-pve", "6.17.13-1-pve")) == [
        "6.17.13-1-pve",
        "6.17.2-1-pve",
        "6.8.12-11-pve",
    ]


RELEASES = st.builds("{}.{}.{}-{}-pve".format, st.integers(4, 30), st.integers(0, 60), st.integers(0, 40), st.just(1))


@settings(deadline=None)
@given(st.sampled_from([r.first for r in TABLE]), RELEASES, st.sampled_from(["proxmox", "pve", "linux"]))
def test_the_preferences_keep_away_exactly_the_headers_that_are_too_new(version: str, kernel: str, origin: str) -> None:
    found, series = known(version), series_of(kernel)
    assert series is not None
    matches = bool(re.search(unfit_headers_pattern(found), f"{origin}-headers-{kernel}"))
    assert matches is (series > found.high)


@pytest.mark.parametrize("name", ["proxmox-default-headers", "pve-headers", "proxmox-headers-7.0", "pve-headers-6.19"])
def test_metapackages_of_newer_kernels_are_kept_away(name: str) -> None:
    assert re.search(unfit_headers_pattern(known()), name)


@pytest.mark.parametrize("name", ["proxmox-headers-6.17", "linux-headers-amd64", "linux-headers-generic", "dkms"])
def test_other_packages_are_left_alone(name: str) -> None:
    assert not re.search(unfit_headers_pattern(known()), name)
