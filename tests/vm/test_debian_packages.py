"""Pins and the exact match on the distribution's real NVIDIA packages, in a Debian below a folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_host import apt
from gpu_host.steps import Step
from gpu_host.userspace import UserspaceDesired, mismatches
from gpu_host.userspace_state import gather_state

from .debian_tree import NonFreeError, TreeWorld, build
from .requirements import debian

PACKAGES = ("libcuda1", "libnvidia-ml1", "libnvidia-ptxjitcompiler1", "nvidia-smi")
#: A driver that no Debian release has.
OTHER_VERSION = "580.126.09"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"


@pytest.fixture(scope="module")
def tree(folder: Path) -> Iterator[TreeWorld]:
    release = debian()
    assert release is not None
    try:
        yield build(folder / "tree", release)
    except NonFreeError as reason:
        pytest.skip(f"Debian's non-free component cannot be reached: {reason}")


@pytest.fixture(scope="module")
def version(tree: TreeWorld) -> str:
    """Driver version of the archive, without Debian's revision."""
    return apt.available(tree, ["libcuda1"])["libcuda1"][0].split("-")[0]


@pytest.fixture(autouse=True)
def without_pins(tree: TreeWorld) -> Iterator[None]:
    yield
    tree.remove(apt.PREFERENCES)


def _candidate(world: TreeWorld, package: str) -> str:
    match = re.search(r"Candidate: (.*)", world.must(["apt-cache", "policy", package]).out)
    assert match
    return match[1]


class TestPins:
    def test_another_version_is_no_candidate_instead_of_a_drift(self, tree: TreeWorld) -> None:
        assert not _candidate(tree, "libcuda1").startswith((OTHER_VERSION, "("))
        tree.write(apt.PREFERENCES, apt.preferences(OTHER_VERSION))
        assert {package: _candidate(tree, package) for package in PACKAGES} == dict.fromkeys(PACKAGES, "(none)")
        asked = tree.run(["apt-get", "install", "--simulate", "libcuda1"])
        assert not asked.ok
        assert "no installation candidate" in asked.err

    def test_the_very_version_stays_a_candidate(self, tree: TreeWorld, version: str) -> None:
        tree.write(apt.PREFERENCES, apt.preferences(version))
        assert _candidate(tree, "libcuda1").startswith(f"{version}-")

    def test_a_metapackage_cannot_bring_the_driver_in_beside_the_installer(self, tree: TreeWorld) -> None:
        tree.write(apt.PREFERENCES, apt.preferences(None))
        assert not tree.run(["apt-get", "install", "--simulate", "nvidia-driver"]).ok

    def test_what_the_archive_has_instead_is_said(self, tree: TreeWorld, version: str) -> None:
        found = apt.available(tree, PACKAGES)
        chosen, refusals = apt.exact_versions(PACKAGES, found, OTHER_VERSION, "apt-cache madison")
        assert not chosen
        assert [refusal.rule for refusal in refusals] == ["no-exact-version"] * len(PACKAGES)
        assert all(f"it has {version}-" in refusal.what for refusal in refusals)


@pytest.fixture(scope="module")
def installed(tree: TreeWorld, version: str) -> TreeWorld:
    """The tree with the packages of exactly this version."""
    tree.write(apt.PREFERENCES, apt.preferences(version))
    chosen, refusals = apt.exact_versions(PACKAGES, apt.available(tree, PACKAGES), version, "apt-cache madison")
    assert not refusals
    apt.apt_install(Step("apt-install", "libraries", "test", {"packages": chosen}), tree)
    return tree


class TestExactMatch:
    """After an installation. Whichever of them runs first makes it."""

    def test_packages_named_with_their_version_are_installed_and_fit(self, installed: TreeWorld, version: str) -> None:
        tree = installed
        there = apt.driver_packages(tree)
        assert set(PACKAGES) <= set(there)
        assert not apt.astray(PACKAGES, there, version)
        state = gather_state(tree, UserspaceDesired(version=version, source="apt", probe=False), version)
        assert not mismatches(state, version)
        assert mismatches(state, OTHER_VERSION)

    def test_held_packages_do_not_move(self, installed: TreeWorld) -> None:
        tree = installed
        apt.apt_hold(Step("apt-hold", "libraries", "test", {"packages": list(PACKAGES)}), tree)
        assert set(PACKAGES) <= set(apt.held(tree))
        removal = tree.run(["apt-get", "purge", "--simulate", "-y", "libcuda1"])
        assert not removal.ok
        assert "held packages" in removal.err.lower() + removal.out.lower()

    def test_a_library_of_a_second_version_is_seen_beside_the_first(self, installed: TreeWorld, version: str) -> None:
        tree = installed
        first = gather_state(tree, UserspaceDesired(version=version, source="apt", probe=False), version)
        real = next(end for end in first.resolved.values() if end.endswith(f"libcuda.so.{version}"))
        second = f"{LIBRARIES}/libcuda.so.{OTHER_VERSION}"
        shutil.copy2(tree.path(real), tree.path(second))
        try:
            again = gather_state(tree, UserspaceDesired(version=version, source="apt", probe=False), version)
            assert any(OTHER_VERSION in clause for clause in mismatches(again, version))
        finally:
            tree.remove(second)
