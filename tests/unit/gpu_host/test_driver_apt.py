"""Exact versions through apt: the preferences are judged by apt itself, over an archive of a few packages."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpu_host import apt
from gpu_host.kernels import table_of, unfit_headers_pattern

VERSION = "580.126.09"
SEVERAL = {
    "libcuda1": ("580.173.02-1", "580.126.09-1", "550.163.01-2"),
    "libnvidia-ml1": ("580.173.02-1", "580.126.09-1"),
    "nvidia-smi": ("590.48.01-1", "580.126.09-1"),
    "nvidia-container-toolkit": ("1.19.0-1",),
    "libnvidia-container1": ("1.19.0-1",),
    "nvidia-driver": ("590.48.01-1",),
    "proxmox-headers-7.0": ("7.0.2-1",),
    "proxmox-headers-7.0.2-1-pve": ("7.0.2-1",),
    "proxmox-headers-6.17.2-1-pve": ("6.17.2-1",),
    "proxmox-default-headers": ("2.1.0",),
    "vim": ("9.1-1",),
}

Policy = Callable[[Mapping[str, tuple[str, ...]], str], dict[str, str]]


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """(archive, preferences) -> candidate of each package, as apt answers."""
    if shutil.which("apt-cache") is None:
        pytest.skip("needs apt")
    for folder in ("etc/preferences.d", "state/lists/partial", "cache/archives/partial", "repository"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "status").touch()
    options = {
        "Dir::Etc": f"{tmp_path}/etc",
        "Dir::Etc::Parts": "/nonexistent",
        "Dir::State": f"{tmp_path}/state",
        "Dir::State::status": f"{tmp_path}/status",
        "Dir::Cache": f"{tmp_path}/cache",
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "root",
    }
    chosen = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]

    def candidates(archive: Mapping[str, tuple[str, ...]], preferences: str) -> dict[str, str]:
        stanzas = [
            f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody\n"
            f"Filename: ./{name}_{version}.deb\nSize: 1\nDescription: a package\n"
            for name, versions in archive.items()
            for version in versions
        ]
        (tmp_path / "repository/Packages").write_text("\n".join(stanzas))
        (tmp_path / "etc/sources.list").write_text(f"deb [trusted=yes] file:{tmp_path}/repository ./\n")
        (tmp_path / "etc/preferences").write_text(preferences)
        subprocess.run(["apt-get", *chosen, "-qq", "update"], check=True, capture_output=True, timeout=60)
        shown = subprocess.run(
            ["apt-cache", *chosen, "policy", *archive], check=True, capture_output=True, text=True, timeout=60
        ).stdout
        found, name = {}, ""
        for line in shown.splitlines():
            if line and not line.startswith(" "):
                name = line.rstrip(":")
            elif line.strip().startswith("Candidate:"):
                found[name] = line.split(":", 1)[1].strip()
        return found

    return candidates


def test_apt_takes_this_version_and_no_other(policy: Policy) -> None:
    found = policy(SEVERAL, apt.preferences(VERSION))
    assert {found[name] for name in ("libcuda1", "libnvidia-ml1", "nvidia-smi")} == {"580.126.09-1"}
    assert found["nvidia-driver"] == "(none)"  # a metapackage of another branch


def test_apt_takes_nothing_where_the_version_was_dropped(policy: Policy) -> None:
    dropped = {**SEVERAL, "libcuda1": ("580.173.02-1", "550.163.01-2")}
    assert policy(dropped, apt.preferences(VERSION))["libcuda1"] == "(none)"


@pytest.mark.parametrize("version", [VERSION, None])
def test_the_container_toolkit_has_versions_of_its_own(policy: Policy, version: str | None) -> None:
    found = policy(SEVERAL, apt.preferences(version))
    assert found["nvidia-container-toolkit"] == "1.19.0-1"
    assert found["libnvidia-container1"] == "1.19.0-1"
    assert found["vim"] == "9.1-1"


def test_beside_a_run_file_no_package_of_the_driver_has_a_candidate(policy: Policy) -> None:
    found = policy(SEVERAL, apt.preferences(None))
    assert {found[name] for name in ("libcuda1", "libnvidia-ml1", "nvidia-smi", "nvidia-driver")} == {"(none)"}


def test_headers_of_unfit_kernels_have_no_candidate(policy: Policy) -> None:
    known = table_of(VERSION)
    assert known is not None
    found = policy(SEVERAL, apt.header_preferences(unfit_headers_pattern(known)))
    unfit = ("proxmox-headers-7.0", "proxmox-headers-7.0.2-1-pve", "proxmox-default-headers")
    assert {found[name] for name in unfit} == {"(none)"}
    assert found["proxmox-headers-6.17.2-1-pve"] == "6.17.2-1"


def test_unattended_upgrades_leave_the_driver_and_move_the_toolkit() -> None:
    """It matches its patterns at the start of a name, as Python regular expressions."""
    patterns = re.findall(r'"([^"]+)";', apt.unattended_blacklist())

    def left_alone(name: str) -> bool:
        return any(re.match(pattern, name) for pattern in patterns)

    assert all(left_alone(n) for n in ("nvidia-utils-580", "libnvidia-compute-580", "libcuda1"))
    assert not any(left_alone(n) for n in ("nvidia-container-toolkit", "libnvidia-container1", "linux-libc-dev"))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("libnvidia-compute-580", True),
        ("nvidia-kernel-open-dkms", True),
        ("nvidia-utils-580", True),
        ("libcuda1", True),
        ("firmware-nvidia-gsp", True),
        ("nvidia-container-toolkit", False),
        ("libnvidia-container-tools", False),
        ("libnvidia-egl-wayland1", False),
        ("nvidia-settings", False),
        ("nvidia-driver-pinning-580.126.09", False),
        ("pve-nvidia-vgpu-helper", False),
        ("libcudart12", False),
    ],
)
def test_only_packages_with_the_drivers_version_are_the_drivers(name: str, ours: bool) -> None:
    assert apt.is_driver_package(name) is ours


def test_madison_is_read_in_its_order() -> None:
    text = (
        " libcuda1 | 580.173.02-1 | https://example.org/debian x Packages\n"
        " libcuda1 | 580.126.09-1 | https://example.org/debian x Packages\n"
        " libcuda1 | 580.126.09-1 | https://example.org/mirror x Packages\n"
        "nvidia-smi | 580.126.09-1 | https://example.org/debian x Packages\n"
    )
    assert apt.madison(text) == {"libcuda1": ("580.173.02-1", "580.126.09-1"), "nvidia-smi": ("580.126.09-1",)}
    assert apt.madison("N: Unable to locate package libcuda1\n") == {}


def test_a_version_matches_to_the_last_digit() -> None:
    """Rows 13 and 14: a point release apart is another driver."""
    available = {"libcuda1": ("580.126.091-1", "580.126.0-1")}
    chosen, refusals = apt.exact_versions(("libcuda1",), available, VERSION, "apt")
    assert chosen == {}
    assert [r.rule for r in refusals] == ["no-exact-version"]


@pytest.mark.parametrize(
    ("distribution", "version", "expected"),
    [
        ("ubuntu", VERSION, "libnvidia-compute-580"),
        ("ubuntu", "590.48.01", "libnvidia-compute"),
        ("debian", VERSION, "libcuda1"),
    ],
)
def test_package_sets_have_no_metapackage_and_no_kernel(distribution: str, version: str, expected: str) -> None:
    names = apt.library_packages(distribution, version)
    assert expected in names
    assert not any("dkms" in name or "driver" in name or "headless" in name or name == "cuda" for name in names)
    assert all(apt.is_driver_package(name) for name in names)
    hosts = apt.host_packages(distribution, version, "open")
    assert set(names) < set(hosts)
    assert any("dkms" in name and "open" in name for name in hosts)
    assert not any("open" in name for name in apt.host_packages(distribution, version, "proprietary"))
