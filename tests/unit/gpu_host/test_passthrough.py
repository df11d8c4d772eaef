"""A container gets exactly its cards: by address, through the minors of now, and nothing of others is touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_host.facts import DeviceNode, HostFacts, NvidiaGpu
from gpu_host.lxc_config import raw_lines
from gpu_host.passthrough import PassthroughDesired, plan, uses_dev_form
from gpu_host.steps import Plan

from .host_facts import HOST_CARDS, VM_CARDS, claim, container, kpro5, kpro5_bound, nodes, rules

BOTH = PassthroughDesired(129, HOST_CARDS)
RESTARTED = replace(BOTH, restart=True)
FULL = (
    "dev0: /dev/nvidia0,mode=0666",
    "dev1: /dev/nvidia1,mode=0666",
    "dev2: /dev/nvidiactl,mode=0666",
    "dev3: /dev/nvidia-uvm,mode=0666",
    "dev4: /dev/nvidia-uvm-tools,mode=0666",
)
INSIDE = {node.path: node for node in nodes(2)}


def host(*lines: str, running: bool = False, facts: HostFacts | None = None, **changes: Any) -> HostFacts:
    base = facts or kpro5_bound()
    return replace(base, containers=(container(129, *lines, running=running, **changes),))


def actions(made: Plan) -> list[str]:
    return [step.action for step in made.steps]


def dev_keys(made: Plan) -> tuple[dict[str, str], list[str]]:
    step = next(step for step in made.steps if step.action == "pct-set")
    return step.detail["set"], step.detail["delete"]


# -- devN ------------------------------------------------------------------------------------------------------


def test_two_cards_need_five_nodes_and_no_more() -> None:
    made = plan(host(), BOTH)
    assert made.refusals == []
    assert dev_keys(made) == (dict(line.split(": ") for line in FULL), [])


def test_container_that_has_them_needs_nothing() -> None:
    assert plan(host(*FULL), BOTH).steps == []


@pytest.mark.parametrize("written", ["path=/dev/nvidia0,mode=666", "/dev/nvidia0,mode=0666,deny-write=0"])
def test_other_ways_to_write_an_entry_are_no_change(written: str) -> None:
    assert plan(host(f"dev0: {written}", *FULL[1:]), BOTH).steps == []


def test_node_without_a_mode_is_given_one() -> None:
    """#28: PVE's own 0660 of root hides the cards from every service that is not root."""
    made = plan(host("dev0: /dev/nvidia0", *FULL[1:]), BOTH)
    assert dev_keys(made) == ({"dev0": "/dev/nvidia0,mode=0666"}, [])
    grouped = plan(host(*FULL), replace(BOTH, mode="0660", gid=44))
    assert dev_keys(grouped)[0]["dev1"] == "/dev/nvidia1,mode=0660,gid=44"


def test_foreign_entries_stay_and_their_numbers_are_not_taken() -> None:
    made = plan(host("dev1: /dev/dri/renderD128,gid=104", "dev3: /dev/kvm"), BOTH)
    assert sorted(dev_keys(made)[0]) == ["dev0", "dev2", "dev4", "dev5", "dev6"]
    assert dev_keys(made)[1] == []


def test_card_that_it_no_longer_has_leaves_and_its_number_is_used_again() -> None:
    one = PassthroughDesired(129, HOST_CARDS[1:])
    made = plan(host(*FULL), one)
    assert dev_keys(made) == ({}, ["dev0"])
    other = plan(host("dev0: /dev/nvidia5,mode=0666", *FULL[1:]), BOTH)
    assert dev_keys(other) == ({"dev0": "/dev/nvidia0,mode=0666"}, [])


def test_entry_that_stands_twice_stands_once_afterwards() -> None:
    assert dev_keys(plan(host(*FULL, "dev7: /dev/nvidia0"), BOTH)) == ({}, ["dev7"])


def test_minors_are_those_of_now() -> None:
    """#22: address, minor and index are three different orders."""
    swapped = (NvidiaGpu(HOST_CARDS[0], 1), NvidiaGpu(HOST_CARDS[1], 0))
    made = plan(host(*FULL[:1], *FULL[2:], facts=kpro5_bound(gpus=swapped)), PassthroughDesired(129, HOST_CARDS[:1]))
    assert dev_keys(made) == ({"dev0": "/dev/nvidia1,mode=0666"}, [])


def test_pending_changes_count_as_made() -> None:
    lines = ("dev0: /dev/nvidia7", "dev9: /dev/nvidia8", "[pve:pending]", "delete: dev9", *FULL)
    assert plan(host(*lines, running=True), BOTH, None).steps == []


def test_no_node_is_left_when_the_container_has_no_card() -> None:
    made = plan(host(*FULL, "dev5: /dev/kvm"), replace(BOTH, state="absent"))
    assert dev_keys(made) == ({}, ["dev0", "dev1", "dev2", "dev3", "dev4"])
    assert plan(host("dev5: /dev/kvm"), replace(BOTH, state="absent")).steps == []


def test_container_that_is_gone_has_nothing_to_give_back() -> None:
    made = plan(replace(kpro5_bound(), containers=()), replace(BOTH, state="absent"))
    assert (made.steps, made.refusals) == ([], [])
    assert "no container 129" in made.notes[0]


def test_rollback_that_brings_entries_back_is_announced() -> None:
    made = plan(host(*FULL, "[before-upgrade]", "dev0: /dev/nvidia3"), BOTH)
    assert made.steps == []
    assert any("snapshot before-upgrade" in note for note in made.notes)


# -- raw keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pve", "pve_container", "dev"),
    [
        ("9.1.1", "6.0.18", True),
        ("8.1.3", "5.0.7", True),
        ("8.0.4", "5.0.6", False),
        ("8.0", "", False),
        ("8.2", "", True),
    ],
)
def test_old_proxmox_knows_no_dev_keys(pve: str, pve_container: str, dev: bool) -> None:
    facts = kpro5_bound(pve=pve, pve_container=pve_container)
    assert uses_dev_form(facts) is dev
    made = plan(host(facts=facts), BOTH)
    assert actions(made) == (["pct-set"] if dev else ["raw-lines"])


def test_raw_lines_have_exact_numbers_read_now() -> None:
    """#9 #10 #11: a uvm major that was written down is wrong after the next kernel; `195:*` is every card."""
    facts = kpro5_bound(majors={"mem": 1, "nvidia": 195, "nvidia-uvm": 509}, nodes=nodes(2, uvm=509))
    made = plan(host(facts=facts), replace(BOTH, form="raw"))
    added = made.steps[0].detail["add"]
    assert "lxc.cgroup2.devices.allow: c 509:0 rwm" in added
    assert "lxc.cgroup2.devices.allow: c 195:1 rwm" in added
    assert "lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,create=file" in added
    assert not any("*" in line or "optional" in line for line in added)
    assert made.steps[0].target == "/etc/pve/lxc/129.conf"


def test_stale_and_wide_raw_lines_go() -> None:
    lines = (
        "lxc.cgroup2.devices.allow: c 195:* rwm",
        "lxc.cgroup2.devices.allow: c 510:* rwm",
        "lxc.cgroup2.devices.allow: c 226:128 rwm",
        "lxc.cgroup.devices.allow: c 195:0 rwm",
        "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file",
        "lxc.mount.entry: /dev/dri dev/dri none bind,optional,create=dir",
    )
    made = plan(host(*lines), replace(BOTH, form="raw"))
    assert made.steps[0].detail["drop"] == [lines[0], lines[1], lines[3], lines[4]]


def test_stale_major_that_another_driver_has_now_is_left_alone() -> None:
    facts = kpro5_bound(majors={"nvidia": 195, "nvidia-uvm": 511, "hidraw": 510})
    lines = ("lxc.cgroup2.devices.allow: c 510:0 rwm", "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind")
    made = plan(host(*lines, facts=facts), replace(BOTH, form="raw"))
    assert lines[0] not in made.steps[0].detail["drop"]


def test_raw_entries_give_way_to_dev_keys() -> None:
    numbers = {node.path: (node.major, node.minor) for node in nodes(2)}
    made = plan(host(*raw_lines(numbers)), BOTH)
    assert actions(made) == ["pct-set", "raw-lines"]
    assert made.steps[1].detail == {"drop": raw_lines(numbers), "add": []}
    assert plan(host(*raw_lines(numbers)), replace(BOTH, form="raw")).steps == []


def test_dev_keys_that_were_asked_for_are_refused_on_old_proxmox() -> None:
    facts = kpro5_bound(pve="8.0.4", pve_container="5.0.4")
    assert rules(plan(host(facts=facts), replace(BOTH, form="dev"))) == {"no-dev-keys"}


# -- the running container ----------------------------------------------------------------------------------------


def test_running_container_is_stopped_before_and_started_after_the_change() -> None:
    made = plan(host(running=True), RESTARTED, {})
    assert actions(made) == ["container-stop", "pct-set", "container-start"]
    assert made.steps[-1].detail["nodes"]["/dev/nvidia1"] == [195, 1]


def test_without_leave_to_restart_the_operator_is_told() -> None:
    made = plan(host(running=True), BOTH, {})
    assert actions(made) == ["pct-set"]
    assert any("pct reboot 129" in note for note in made.notes)


def test_change_that_waits_for_a_restart_is_not_taken_for_done() -> None:
    waiting = host(*FULL, running=True)
    assert actions(plan(waiting, RESTARTED, {})) == ["container-stop", "container-start"]
    told = plan(waiting, BOTH, {})
    assert told.steps == []
    assert any("/dev/nvidia0 is not inside yet" in note for note in told.notes)


def test_running_container_that_is_right_is_left_running() -> None:
    made = plan(host(*FULL, running=True), RESTARTED, INSIDE)
    assert (made.steps, made.notes) == ([], [])


def test_node_inside_with_an_old_major_needs_a_restart() -> None:
    old = {**INSIDE, "/dev/nvidia-uvm": DeviceNode("/dev/nvidia-uvm", "char", 510, 0)}
    made = plan(host(*FULL, running=True), RESTARTED, old)
    assert "/dev/nvidia-uvm inside is not the device 511:0" in made.steps[0].why


def test_card_that_was_taken_is_still_inside_until_the_restart() -> None:
    made = plan(host(running=True), replace(RESTARTED, state="absent"), INSIDE)
    assert actions(made) == ["container-stop", "container-start"]
    assert made.steps[-1].detail["nodes"] == {}


def test_empty_file_inside_goes_before_the_restart() -> None:
    """#25: a bind mount of a missing node left a file, over which no device can be made."""
    trap = {**INSIDE, "/dev/nvidia0": DeviceNode("/dev/nvidia0", "file")}
    made = plan(host(*FULL, running=True), RESTARTED, trap)
    assert actions(made) == ["remove-inside", "container-stop", "container-start"]
    assert made.steps[0].target == "129:/dev/nvidia0"


def test_container_that_cannot_be_asked_is_not_restarted() -> None:
    assert plan(host(*FULL, running=True), RESTARTED, None).steps == []


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param({"pve": ""}, "not-proxmox", id="not-a-proxmox-host"),
        pytest.param({"quorate": False}, "no-quorum", id="19-no-quorum"),
        pytest.param({"containers": (container(130),)}, "no-such-container", id="other-host"),
        pytest.param({"containers": (container(129, lock="backup"),)}, "container-locked", id="locked"),
        pytest.param({"claims": (claim(105, HOST_CARDS[0]),)}, "held-by-vm", id="vm-names-it"),
        pytest.param({"reserved": {HOST_CARDS[0]: 105}}, "held-by-running-vm", id="vm-runs-with-it"),
        pytest.param({"gpus": (NvidiaGpu(HOST_CARDS[1], 0),)}, "card-not-driven", id="not-initialised"),
        pytest.param(
            {"gpus": (NvidiaGpu(HOST_CARDS[0], None), NvidiaGpu(HOST_CARDS[1], 1))}, "card-not-driven", id="23-no-minor"
        ),
        pytest.param({"nodes": nodes(2)[1:]}, "node-missing", id="24-node-not-made"),
        pytest.param({"majors": {"nvidia": 195}}, "node-missing", id="27-uvm-not-loaded"),
        pytest.param({"nodes": (DeviceNode("/dev/nvidia0", "file"), *nodes(2)[1:])}, "node-is-a-file", id="25-file"),
        pytest.param({"nodes": nodes(2, uvm=510)}, "node-stale", id="10-old-major"),
    ],
)
def test_refused_before_anything_is_written(change: dict[str, Any], rule: str) -> None:
    made = plan(kpro5_bound(**change), BOTH)
    assert rule in rules(made)
    assert made.steps == []
    assert all(refusal.fix and refusal.where for refusal in made.refusals)


def test_card_of_a_vm_or_no_card_is_refused() -> None:
    made = plan(kpro5_bound(claims=()), PassthroughDesired(129, (VM_CARDS[0],)))
    assert rules(made) == {"card-not-driven"}
    assert "is on vfio-pci" in made.refusal_text()
    assert rules(plan(kpro5_bound(), PassthroughDesired(129, ("0000:99:00.0",)))) == {"no-such-card"}


def test_same_card_in_two_containers_is_told() -> None:
    facts = kpro5_bound(containers=(container(129), container(130, "dev0: /dev/nvidia1")))
    assert any("container 130 lists /dev/nvidia1" in note for note in plan(facts, BOTH).notes)


def test_check_mode_forecasts_minors_of_cards_that_are_still_on_vfio() -> None:
    made = plan(kpro5(), replace(BOTH, predict=True))
    assert made.refusals == []
    assert dev_keys(made)[0]["dev1"] == "/dev/nvidia1,mode=0666"
    assert len(dev_keys(made)[0]) == 5
    assert any("forecast" in note for note in made.notes)
    assert rules(plan(kpro5(), BOTH)) >= {"card-not-driven"}
