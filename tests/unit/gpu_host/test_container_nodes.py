"""Whether a running container has the NVIDIA nodes that its configuration lists."""

from __future__ import annotations

import pytest

from gpu_host.container_nodes import awaits_restart
from gpu_host.facts import DeviceNode
from gpu_host.lxc_config import upcoming_paths

from .host_facts import container, kpro5_bound, nodes

GIVEN = ("dev0: /dev/nvidia0,mode=0666", "dev1: /dev/nvidiactl", "dev2: /dev/dri/card0")
PENDING = ("dev2: /dev/dri/card0", "[pve:pending]", *GIVEN[:2])
RAW = tuple(f"lxc.mount.entry: /dev/{n} dev/{n} none bind,create=file" for n in ("nvidia0", "nvidiactl"))
TAKEN = (*GIVEN, "[pve:pending]", "delete: dev0,dev1")
INSIDE = {node.path: node for node in nodes(1) if "uvm" not in node.path}


@pytest.mark.parametrize("lines", [GIVEN, PENDING, RAW])
def test_it_waits_until_the_nodes_are_inside(lines: tuple[str, ...]) -> None:
    given = container(129, *lines, running=True)
    assert awaits_restart(kpro5_bound(), given, {}) == "/dev/nvidia0 is not inside yet"
    assert awaits_restart(kpro5_bound(), given, INSIDE) == ""


def test_it_waits_while_cards_that_were_taken_are_still_inside() -> None:
    taken = container(129, *TAKEN, running=True)
    assert awaits_restart(kpro5_bound(), taken, INSIDE) == "/dev/nvidia0 is still inside"
    assert awaits_restart(kpro5_bound(), taken, {}) == ""


def test_it_waits_while_nodes_have_the_numbers_of_an_earlier_boot() -> None:
    """The major of nvidia-uvm is dynamic, and a file stays where `create=file` found no device."""
    given = container(129, "dev0: /dev/nvidia-uvm", running=True)
    old = {"/dev/nvidia-uvm": DeviceNode("/dev/nvidia-uvm", "char", 508, 0)}
    assert awaits_restart(kpro5_bound(), given, old) == "/dev/nvidia-uvm inside is not the device 511:0"
    empty = {"/dev/nvidia-uvm": DeviceNode("/dev/nvidia-uvm", "file")}
    assert "is not the device" in awaits_restart(kpro5_bound(), given, empty)


def test_a_container_without_cards_or_that_cannot_be_asked_waits_for_nothing() -> None:
    assert awaits_restart(kpro5_bound(), container(129, running=True), {}) == ""
    assert awaits_restart(kpro5_bound(), container(129, *GIVEN, running=True), None) == ""


def test_the_next_start_has_pending_changes_and_no_snapshots() -> None:
    assert upcoming_paths(container(129, *PENDING)) == {"/dev/nvidia0", "/dev/nvidiactl", "/dev/dri/card0"}
    assert upcoming_paths(container(129, *TAKEN)) == {"/dev/dri/card0"}
    assert upcoming_paths(container(129, *RAW)) == {"/dev/nvidia0", "/dev/nvidiactl"}
    assert upcoming_paths(container(129, "[before]", *GIVEN)) == frozenset()
