"""The passthrough on the tree of a host: through `pct`, proven inside, and back to before after a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_host.apply import apply
from gpu_host.binding import plan as plan_binding
from gpu_host.binding_steps import HANDLERS as BINDING_HANDLERS
from gpu_host.container_nodes import look_inside
from gpu_host.gather import gather
from gpu_host.passthrough import PassthroughDesired, plan
from gpu_host.passthrough_steps import HANDLERS, is_running
from gpu_host.steps import ApplyError, Plan
from gpu_host.world import ContainerWorld, Result
from tests.doubles.host_tree import HostTree, kpro5

from .host_facts import HOST_CARDS, wants

BOTH = PassthroughDesired(129, HOST_CARDS, restart=True)
GONE = replace(BOTH, state="absent")
CONF = "/etc/pve/nodes/kpro5/lxc/129.conf"


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    """The example host with its cards assigned."""
    tree = kpro5(tmp_path, driver="580.126.09")
    apply(plan_binding(gather(tree.world), wants()), tree.world, BINDING_HANDLERS)
    tree.world.commands.clear()
    return tree


def planned(tree: HostTree, desired: PassthroughDesired) -> Plan:
    facts = gather(tree.world)
    container = facts.container(desired.vmid)
    running = container is not None and container.running
    return plan(facts, desired, look_inside(ContainerWorld(tree.world, desired.vmid)) if running else None)


def bring(tree: HostTree, desired: PassthroughDesired) -> Plan:
    """Plan and act, as the module does; nothing may be left to do."""
    made = planned(tree, desired)
    assert made.refusals == []
    apply(made, tree.world, HANDLERS)
    again = planned(tree, desired)
    assert (again.steps, again.refusals) == ([], [])
    return made


def config(tree: HostTree) -> str:
    return tree.world.read(CONF) or ""


def inside(tree: HostTree) -> dict[str, tuple[str, int, int]]:
    found = look_inside(ContainerWorld(tree.world, 129))
    assert found is not None
    return {path: (node.kind, node.major, node.minor) for path, node in found.items()}


def old_proxmox(tree: HostTree) -> None:
    tree.package("pve-manager", "8.0.4").package("pve-container", "5.0.4")


def start(tree: HostTree) -> None:
    tree.world.must(["pct", "start", "129"])


def test_container_that_is_off_gets_its_entries_and_stays_off(tree: HostTree) -> None:
    before = config(tree)
    bring(tree, BOTH)
    assert not is_running(tree.world, 129)
    assert "dev1: /dev/nvidia1,mode=0666" in config(tree)
    bring(tree, GONE)
    assert config(tree) == before


def test_running_container_is_restarted_once_and_has_exactly_its_nodes(tree: HostTree) -> None:
    start(tree)
    bring(tree, BOTH)
    assert inside(tree) == {
        "/dev/nvidia0": ("char", 195, 0),
        "/dev/nvidia1": ("char", 195, 1),
        "/dev/nvidiactl": ("char", 195, 255),
        "/dev/nvidia-uvm": ("char", 509, 0),
        "/dev/nvidia-uvm-tools": ("char", 509, 1),
    }
    verbs = [argv[1] for argv in tree.world.mutations if argv[0] == "pct"]
    assert verbs == ["start", "shutdown", "set", "start"]


def test_running_container_without_leave_waits_with_pending_changes(tree: HostTree) -> None:
    start(tree)
    made = bring(tree, replace(BOTH, restart=False))
    assert "[pve:pending]" in config(tree)
    assert any("pct reboot 129" in note for note in made.notes)
    assert inside(tree) == {}
    assert [step.action for step in planned(tree, BOTH).steps] == ["container-stop", "container-start"]


def test_taking_a_card_leaves_the_other_and_foreign_entries(tree: HostTree) -> None:
    tree.node("/dev/kvm", 10, 232)
    tree.world.must(["pct", "set", "129", "-dev1", "/dev/kvm"])
    start(tree)
    bring(tree, BOTH)
    bring(tree, replace(BOTH, addresses=HOST_CARDS[1:]))
    assert "/dev/nvidia0" not in config(tree)
    assert "dev1: /dev/kvm" in config(tree)
    assert "/dev/nvidia1" in inside(tree)
    assert "/dev/nvidia0" not in inside(tree)


def test_minors_that_changed_with_a_boot_are_followed(tree: HostTree) -> None:
    """#22: only the second card is driven after the change, and it is minor 0 now."""
    bring(tree, replace(BOTH, addresses=HOST_CARDS[1:]))
    assert "/dev/nvidia1" in config(tree)
    tree.world.kernel.detach(HOST_CARDS[0])
    tree.world.kernel.detach(HOST_CARDS[1])
    tree.world.kernel.attach(HOST_CARDS[1], "nvidia")
    bring(tree, replace(BOTH, addresses=HOST_CARDS[1:]))
    assert "/dev/nvidia0" in config(tree)
    assert "/dev/nvidia1" not in config(tree)


# -- raw lines ---------------------------------------------------------------------------------------------------


def test_old_proxmox_gets_raw_lines_in_place_and_sections_stay(tree: HostTree) -> None:
    """#19: the cluster file system refuses chmod and what a rename needs, so the file is written in place."""
    old_proxmox(tree)
    snapshot = "\n[before]\ndev0: /dev/nvidia7\nhostname: old\n"
    tree.file(CONF, config(tree) + snapshot)
    before, place = config(tree), tree.path(CONF)
    inode = place.stat().st_ino
    bring(tree, BOTH)
    assert "lxc.cgroup2.devices.allow: c 509:1 rwm" in config(tree)
    assert config(tree).endswith(snapshot)
    assert place.stat().st_ino == inode
    assert not [argv for argv in tree.world.mutations if argv[:2] == ["pct", "set"]]
    bring(tree, GONE)
    assert config(tree) == before


def test_new_uvm_major_is_written_on_the_next_run(tree: HostTree) -> None:
    """#9 #10 #11."""
    old_proxmox(tree)
    bring(tree, BOTH)
    for module in ("nvidia-uvm", "nvidia"):
        assert tree.world.kernel.unload(module) is None
    tree.world.kernel.uvm_major = 511
    for path in tree.world.glob("/dev/nvidia*"):
        tree.world.remove(path)
    apply(plan_binding(gather(tree.world), wants()), tree.world, BINDING_HANDLERS)
    bring(tree, BOTH)
    assert "c 511:0 rwm" in config(tree)
    assert "c 509:" not in config(tree)


def test_lost_quorum_is_refused_before_the_write(tree: HostTree) -> None:
    tree.quorum(False)
    made = planned(tree, BOTH)
    assert [refusal.rule for refusal in made.refusals] == ["no-quorum"]


def test_file_that_takes_no_write_is_told(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    old_proxmox(tree)
    made = planned(tree, BOTH)

    def refuse(path: str, text: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(tree.world, "poke", refuse)
    with pytest.raises(ApplyError, match="Permission denied"):
        apply(made, tree.world, HANDLERS)


# -- failures ----------------------------------------------------------------------------------------------------


def test_container_that_does_not_start_gets_its_old_configuration_and_runs(tree: HostTree) -> None:
    start(tree)
    before = config(tree)
    made = planned(tree, BOTH)
    starts = iter([Result(1, "", "startup for container '129' failed\n")])
    tree.world.on("pct", lambda world, argv: next(starts, None) if argv[1] == "start" else None)
    with pytest.raises(ApplyError, match="startup for container '129' failed"):
        apply(made, tree.world, HANDLERS)
    assert config(tree) == before
    assert is_running(tree.world, 129)


def test_container_that_does_not_stop_is_not_killed_and_nothing_changes(tree: HostTree) -> None:
    start(tree)
    before = config(tree)
    made = planned(tree, BOTH)
    tree.world.on("pct", lambda world, argv: Result(255, "", "timeout\n") if argv[1] == "shutdown" else None)
    with pytest.raises(ApplyError, match="still runs 120 s after the shutdown"):
        apply(made, tree.world, HANDLERS)
    assert config(tree) == before
    assert not any("--forceStop" in argv for argv in tree.world.commands)


def test_container_that_starts_without_its_nodes_is_a_failure(tree: HostTree) -> None:
    start(tree)
    before = config(tree)
    made = planned(tree, BOTH)
    tree.world.on("pct", lambda world, argv: "" if argv[1] == "exec" else None)
    with pytest.raises(ApplyError, match="/dev/nvidia0 is not inside yet"):
        apply(made, tree.world, HANDLERS)
    assert config(tree) == before
    assert is_running(tree.world, 129)


def test_empty_file_that_a_bind_mount_left_inside_is_replaced(tree: HostTree) -> None:
    """#25."""
    bring(tree, BOTH)
    start(tree)
    tree.file("/var/lib/lxc/129/rootfs/dev/nvidia1", "")
    made = bring(tree, BOTH)
    assert made.steps[0].action == "remove-inside"
    assert inside(tree)["/dev/nvidia1"] == ("char", 195, 1)


def test_locked_container_is_left_alone(tree: HostTree) -> None:
    tree.file(CONF, config(tree) + "lock: backup\n")
    made = planned(tree, BOTH)
    assert [refusal.rule for refusal in made.refusals] == ["container-locked"]
    assert "pct unlock 129" in made.refusal_text()


def test_check_mode_asks_and_changes_nothing(tree: HostTree) -> None:
    start(tree)
    tree.world.commands.clear()
    before = tree.snapshot()
    assert planned(tree, replace(BOTH, predict=True)).steps
    assert tree.snapshot() == before
    assert tree.world.mutations == []
