"""Cards to owners, by address: what moves, what is refused, and what the boot files say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_host.binding import BindingDesired, GpuWant, plan
from gpu_host.boot_files import MODULES, OPTIONS, RULES
from gpu_host.facts import DeviceNode, HostFacts, NvidiaGpu, PciFunction
from gpu_host.steps import Plan

from .host_facts import (
    AUDIO,
    HOST_CARDS,
    KERNEL,
    MAJORS,
    RTX3090,
    VM_CARDS,
    card,
    claim,
    container,
    kpro5,
    kpro5_bound,
    nodes,
    rules,
    wants,
)


def moves(made: Plan) -> dict[str, str]:
    return {step.target: step.detail["driver"] for step in made.steps if step.action == "rebind"}


def texts(made: Plan) -> dict[str, str]:
    return {step.target: step.detail["text"] for step in made.steps if "text" in step.detail}


def settled(facts: HostFacts, desired: BindingDesired) -> HostFacts:
    """The same snapshot with the files that the plan writes."""
    return replace(facts, settings={**facts.settings, **texts(plan(facts, desired))})


def with_function(facts: HostFacts, address: str, **changes: Any) -> HostFacts:
    functions = tuple(replace(f, **changes) if f.address == address else f for f in facts.functions)
    return replace(facts, functions=functions)


# -- the example ---------------------------------------------------------------------------------------------


def test_host_cards_leave_vfio_and_vm_cards_stay() -> None:
    made = plan(kpro5(), wants())
    assert made.refusals == []
    assert moves(made) == {
        "0000:41:00.0": "nvidia",
        "0000:41:00.1": "snd_hda_intel",
        "0000:42:00.0": "nvidia",
        "0000:42:00.1": "snd_hda_intel",
    }


def test_boot_rules_name_every_function_by_address_and_no_id() -> None:
    """#20: two cards share the audio's id, so an id would take both."""
    made = texts(plan(kpro5(), wants()))
    for address in VM_CARDS:
        for function in (address, f"{address[:-1]}1"):
            assert f'KERNEL=="{function}", ATTR{{driver_override}}="vfio-pci"' in made[RULES]
    assert f'KERNEL=="{HOST_CARDS[0][:-1]}1", ATTR{{driver_override}}="snd_hda_intel"' in made[RULES]
    assert "ids=" not in made[RULES] + made[OPTIONS] + made[MODULES]
    assert "softdep nvidia pre: vfio-pci" in made[OPTIONS]
    assert "blacklist nvidia" not in made[OPTIONS]
    assert made["/etc/modprobe.d/vfio.conf"].endswith("\noptions vfio-pci disable_vga=1\n")


def test_files_come_before_moves_and_the_initramfs_and_its_proof_come_last() -> None:
    made = plan(kpro5(), wants())
    order = [(s.action, s.target) for s in made.steps]
    first_move = next(i for i, (action, _) in enumerate(order) if action == "rebind")
    assert order.index(("write", RULES)) < order.index(("write", "/etc/modprobe.d/vfio.conf")) < first_move
    assert order[-3:] == [("nodes", "/dev/nvidia*"), ("run", "initramfs"), ("write", MODULES)]


def test_a_run_that_died_before_the_initramfs_is_taken_up() -> None:
    facts = settled(kpro5_bound(), wants())
    assert plan(facts, wants()).steps == []
    died = {path: text for path, text in facts.settings.items() if path != MODULES}
    again = plan(replace(facts, settings=died), wants())
    assert [(s.action, s.target) for s in again.steps] == [("run", "initramfs"), ("write", MODULES)]


def test_bound_host_needs_nothing() -> None:
    facts = settled(kpro5_bound(), wants())
    made = plan(facts, wants())
    assert (made.steps, made.refusals) == ([], [])


def test_all_cards_for_vms_blacklist_the_driver() -> None:
    made = plan(kpro5(), wants(dict.fromkeys(HOST_CARDS, "vm")))
    assert moves(made) == {}
    assert "\nblacklist nvidia\n" in texts(made)[OPTIONS]


def test_card_goes_back_to_vms_with_its_audio() -> None:
    made = plan(kpro5_bound(), wants({HOST_CARDS[1]: "vm"}))
    assert made.refusals == []
    assert moves(made) == {"0000:42:00.0": "vfio-pci", "0000:42:00.1": "vfio-pci"}


def test_card_of_nouveau_is_taken_over() -> None:
    made = plan(with_function(kpro5(), HOST_CARDS[0], driver="nouveau"), wants())
    assert moves(made)[HOST_CARDS[0]] == "nvidia"


def test_override_that_would_lose_the_card_at_the_next_probe_is_corrected() -> None:
    facts = settled(with_function(kpro5_bound(), VM_CARDS[0], override="nvidia"), wants())
    assert moves(plan(facts, wants())) == {VM_CARDS[0]: "vfio-pci"}


def test_free_audio_function_is_kept_from_vfio() -> None:
    """PVE writes vendor and device to new_id when a VM starts, which catches any free function of that id."""
    audio = f"{HOST_CARDS[0][:-1]}1"
    open_to_all = settled(with_function(kpro5_bound(), audio, driver=None), wants())
    assert moves(plan(open_to_all, wants())) == {audio: "snd_hda_intel"}
    kept = with_function(open_to_all, audio, override="snd_hda_intel")
    assert moves(plan(kept, wants())) == {}


# -- holders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["VM 105 names it as hostpci0", "qm set 105 --delete hostpci0"]),
        ({"section": "pending"}, ["(pending)", "qm set 105 --revert hostpci0"]),
        ({"section": "snapshot before-upgrade"}, ["snapshot before-upgrade", "qm delsnapshot 105 before-upgrade"]),
        ({"mapping": "gpus"}, ["through the mapping gpus"]),
        ({"onboot": True}, ["starts with the host"]),
    ],
)
def test_card_of_the_host_that_a_vm_names_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    facts = kpro5()
    facts = replace(facts, claims=(*facts.claims, claim(105, HOST_CARDS[1], **changes)))
    made = plan(facts, wants())
    assert rules(made) == {"held-by-vm"}
    assert made.steps == []
    for word in words:
        assert word in made.refusal_text()
    assert "/etc/pve/qemu-server/105.conf" in made.refusal_text()


def test_all_holders_are_told_at_once() -> None:
    facts = kpro5(claims=(claim(105, HOST_CARDS[0]), claim(106, HOST_CARDS[0], section="snapshot a")))
    assert len(plan(facts, wants()).refusals) == 2


def test_claim_on_the_audio_function_alone_holds_the_card() -> None:
    facts = kpro5(claims=(claim(105, HOST_CARDS[0], addresses=("0000:41:00.1",)),))
    assert rules(plan(facts, wants())) == {"held-by-vm"}


@pytest.mark.parametrize("how", ["reserved", "running"])
def test_card_of_a_running_vm_does_not_move(how: str) -> None:
    """#21: the unbind would hang, or the VM lose its card."""
    facts = kpro5(claims=())
    if how == "reserved":
        facts = replace(facts, reserved={HOST_CARDS[0]: 105})
    else:
        facts = replace(facts, claims=(claim(105, HOST_CARDS[0], running=True),))
    made = plan(facts, wants())
    assert "held-by-running-vm" in rules(made)
    assert "qm shutdown 105" in made.refusal_text()


def test_running_vms_on_their_own_cards_disturb_nothing() -> None:
    facts = kpro5(reserved={VM_CARDS[0]: 101, f"{VM_CARDS[0][:-1]}1": 101})
    made = plan(facts, wants())
    assert made.refusals == []
    assert not {step.target for step in made.steps} & set(VM_CARDS)


def test_card_in_use_is_refused_with_its_processes() -> None:
    """#21: incus and LXD scan for users first, because unbind blocks in the kernel."""
    facts = kpro5_bound(users={HOST_CARDS[0]: ("4711 python3", "900 nvidia-persistenced")})
    made = plan(facts, wants({HOST_CARDS[0]: "vm"}))
    assert rules(made) == {"in-use"}
    assert "process 4711 python3" in made.refusal_text()
    assert "persistenced" not in made.refusal_text()


def test_persistence_daemon_stops_first_and_starts_again_for_those_that_stay() -> None:
    users = dict.fromkeys(HOST_CARDS, ("900 nvidia-persistenced",))
    made = plan(kpro5_bound(users=users), wants({HOST_CARDS[1]: "vm"}))
    argvs = [step.detail["argv"] for step in made.steps if step.target == "nvidia-persistenced"]
    assert argvs == [["systemctl", "stop", "nvidia-persistenced"], ["systemctl", "start", "nvidia-persistenced"]]
    actions = [step.target for step in made.steps]
    assert actions.index("nvidia-persistenced") < actions.index(HOST_CARDS[1])
    gone = plan(kpro5_bound(users=users), wants(dict.fromkeys(HOST_CARDS, "vm")))
    assert [s.detail["argv"][1] for s in gone.steps if s.target == "nvidia-persistenced"] == ["stop"]


def test_persistence_daemon_takes_up_the_cards_that_come() -> None:
    """It opens cards only when it starts, so without this they would be kept from the next boot on."""

    def verbs(facts: HostFacts, desired: BindingDesired) -> list[str]:
        return [s.detail["argv"][1] for s in plan(facts, desired).steps if s.target == "nvidia-persistenced"]

    made = plan(kpro5(persistenced=True), wants())
    order = [step.target for step in made.steps]
    assert order.index("nvidia-persistenced") > order.index("/dev/nvidia*")
    assert verbs(kpro5(persistenced=True), wants()) == ["restart"]
    assert verbs(kpro5(), wants()) == [], "nothing to start where the unit is not installed"
    assert verbs(kpro5_bound(persistenced=True), wants()) == [], "nothing comes"
    one_comes = kpro5_bound(
        functions=(
            *card(HOST_CARDS[0], "2230", 13, "nvidia"),
            *card(HOST_CARDS[1], "2230", 14),
            *kpro5().functions[4:],
        ),
        users={HOST_CARDS[0]: ("900 nvidia-persistenced",)},
        persistenced=True,
    )
    assert verbs(one_comes, wants()) == ["stop", "restart"], "reversed, the daemon lets go before the card leaves again"
    assert verbs(one_comes, wants({HOST_CARDS[0]: "vm"})) == ["stop", "restart"]


@pytest.mark.parametrize("state", ["present", "absent"])
def test_container_that_would_not_start_without_a_leaving_card_is_refused(state: str) -> None:
    """Nobody would take the entry out of a container that the inventory does not name."""
    facts = kpro5_bound(containers=(container(130, "dev0: /dev/nvidia1,mode=0666"),))
    desired = replace(wants({HOST_CARDS[1]: "vm"}), state=state)
    made = plan(facts, desired)
    assert rules(made) == {"used-by-container"}
    assert "container 130, which the inventory does not name, lists /dev/nvidia1" in made.refusal_text()
    ours = plan(facts, replace(desired, containers=(130,)))
    assert not ours.refused
    assert any("container 130 still lists /dev/nvidia1" in note for note in ours.notes)
    assert not plan(facts, wants()).refused, "the card stays"


@pytest.mark.parametrize(
    "lines", [("[pve:pending]", "dev0: /dev/nvidia1"), ("lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind",)]
)
def test_every_form_of_a_containers_claim_counts(lines: tuple[str, ...]) -> None:
    assert rules(plan(kpro5_bound(containers=(container(130, *lines),)), wants({HOST_CARDS[1]: "vm"}))) == {
        "used-by-container"
    }


def test_an_entry_that_goes_with_the_next_start_is_no_claim() -> None:
    given_up = container(130, "dev0: /dev/nvidia1", "[pve:pending]", "delete: dev0", running=True)
    assert not plan(kpro5_bound(containers=(given_up,)), wants({HOST_CARDS[1]: "vm"})).refused


# -- groups --------------------------------------------------------------------------------------------------


def test_group_shared_between_host_and_vm_is_refused() -> None:
    """#29: `group 13 is not viable`."""
    functions = (*card(HOST_CARDS[0], "2230", 13), *card(VM_CARDS[0], RTX3090, 13))
    facts = kpro5(functions=functions, claims=())
    desired = BindingDesired(
        (GpuWant(HOST_CARDS[0], "host", "10de:2230"), GpuWant(VM_CARDS[0], "vm", f"10de:{RTX3090}"))
    )
    assert rules(plan(facts, desired)) == {"shared-group"}


def test_vm_device_in_the_group_of_a_host_card_is_refused() -> None:
    """PVE binds every function of the group at the start of the VM, the host's card among them."""
    nic = PciFunction("0000:43:00.0", "020000", "8086", "1521", driver="igb", group=13)
    facts = kpro5()
    facts = replace(
        facts,
        functions=(*facts.functions, nic),
        claims=(*facts.claims, claim(107, nic.address, addresses=(nic.address,))),
    )
    made = plan(facts, wants())
    assert rules(made) == {"shared-group"}
    assert "0000:43:00.0" in made.refusal_text()


@pytest.mark.parametrize(
    ("class_code", "driver", "refused"),
    [
        ("010601", "ahci", True),
        ("010601", None, False),
        ("010601", "vfio-pci", False),
        ("060400", "pcieport", False),
        ("060000", None, False),
    ],
)
def test_group_of_a_vm_card_is_viable_without_bridges(class_code: str, driver: str | None, refused: bool) -> None:
    other = PciFunction("0000:80:01.0", class_code, "8086", "a000", driver=driver, group=15)
    facts = kpro5()
    made = plan(replace(facts, functions=(*facts.functions, other)), wants())
    assert rules(made) == ({"group-not-viable"} if refused else set())


def test_vm_cards_need_an_iommu() -> None:
    assert rules(plan(kpro5(iommu=False), wants())) == {"no-iommu"}


# -- the inventory against the machine -----------------------------------------------------------------------


def test_card_that_moved_is_told_where_its_like_is() -> None:
    functions = (*card("0000:43:00.0", "2230", 13), *card(HOST_CARDS[1], "2230", 14))
    desired = BindingDesired(tuple(GpuWant(a, "host", "10de:2230") for a in HOST_CARDS))
    made = plan(kpro5(functions=functions, claims=()), desired)
    assert "no-such-card" in rules(made)
    assert "10de:2230 is at 0000:43:00.0, 0000:42:00.0" in made.refusal_text()


def test_other_card_at_the_address_is_refused() -> None:
    """#22: an index or an old address is no proof of identity."""
    made = plan(with_function(kpro5(), HOST_CARDS[0], device=RTX3090), wants())
    assert rules(made) == {"wrong-card"}
    assert "10de:2204 is at this address, not 10de:2230" in made.refusal_text()


def test_model_is_checked_where_the_driver_tells_it() -> None:
    desired = BindingDesired(tuple(replace(want, model="RTX A6000") for want in wants().gpus[:2]) + wants().gpus[2:])
    facts = settled(kpro5_bound(), desired)
    assert plan(facts, desired).refusals == []
    other = replace(facts, gpus=(NvidiaGpu(HOST_CARDS[0], 0, "NVIDIA RTX A5000"), facts.gpus[1]))
    assert rules(plan(other, desired)) == {"wrong-card"}


def test_audio_function_is_no_card() -> None:
    desired = replace(wants(), gpus=(GpuWant("0000:41:00.1", "host", f"10de:{AUDIO}"), *wants().gpus[1:]))
    assert "not-a-gpu" in rules(plan(kpro5(), desired))


def test_card_that_the_inventory_does_not_name_is_refused() -> None:
    facts = kpro5()
    facts = replace(facts, functions=(*facts.functions, *card("0000:c1:00.0", "2230", 17)))
    made = plan(facts, wants())
    assert rules(made) == {"undeclared-card"}
    assert "0000:c1:00.0" in made.refusal_text()


def test_card_named_twice_is_refused() -> None:
    desired = replace(wants(), gpus=(*wants().gpus, GpuWant(HOST_CARDS[0], "vm", "10de:2230")))
    assert "two-owners" in rules(plan(kpro5(), desired))


def test_rented_node_is_left_alone() -> None:
    facts = HostFacts(hostname="rented1", virtualization="docker", init="none", driver_version="570.1")
    assert rules(plan(facts, wants())) == {"rented-host"}


def test_host_without_the_module_is_refused_but_planned_in_check_mode() -> None:
    facts = kpro5(module_versions={})
    made = plan(facts, wants())
    assert rules(made) == {"no-driver"}
    assert KERNEL in made.refusal_text()
    planned = plan(facts, replace(wants(), driver_expected=False))
    assert HOST_CARDS[0] in moves(planned)
    assert any("nvidia_driver installs it first" in note for note in planned.notes)


# -- device nodes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param({"nodes": ()}, "/dev/nvidia0 is absent", id="24-27-not-made-after-boot"),
        pytest.param({"nodes": nodes(2, uvm=510)}, "/dev/nvidia-uvm is 510:0", id="8-9-10-11-major-changed"),
        pytest.param(
            {"nodes": (DeviceNode("/dev/nvidia0", "file"), *nodes(2)[1:])},
            "/dev/nvidia0 is a file",
            id="25-file-of-a-bind-mount",
        ),
        pytest.param({"majors": {"nvidia": 195}}, "nvidia-uvm is not loaded", id="7-27-uvm-not-loaded"),
        pytest.param({"nodes": nodes(3)}, "/dev/nvidia2 has no card", id="card-left"),
    ],
)
def test_nodes_are_put_right(change: dict[str, Any], told: str) -> None:
    facts = settled(kpro5_bound(), wants())
    made = plan(replace(facts, **change), wants())
    assert [step.action for step in made.steps] == ["nodes"]
    assert told in made.steps[0].why


def test_card_without_a_minor_is_no_crash() -> None:
    """#23: `Device Minor` is missing while a card is not initialised."""
    facts = kpro5_bound(gpus=(NvidiaGpu(HOST_CARDS[0], None), NvidiaGpu(HOST_CARDS[1], 0)), nodes=nodes(1))
    assert plan(settled(facts, wants()), wants()).steps == []


# -- the way back --------------------------------------------------------------------------------------------


def test_way_back_gives_every_card_to_vfio_and_the_files_as_found() -> None:
    found = kpro5()
    bound = settled(replace(kpro5_bound(), settings=found.settings), wants())
    back = plan(bound, replace(wants(), state="absent"))
    assert moves(back) == dict.fromkeys(
        (f"{address[:-1]}{function}" for address in HOST_CARDS for function in (0, 1)), "vfio-pci"
    )
    assert {s.detail["override"] for s in back.steps if s.action == "rebind"} == {None}
    removed = {step.target for step in back.steps if step.action == "remove"}
    assert removed == {RULES, OPTIONS, MODULES}
    assert {p: t for p, t in {**bound.settings, **texts(back)}.items() if p not in removed} == found.settings


def test_way_back_keeps_rules_for_what_ids_do_not_cover() -> None:
    bound = settled(kpro5_bound(settings={}), wants())
    back = plan(bound, replace(wants(), state="absent"))
    rule_file = texts(back)[RULES]
    assert all(f'KERNEL=="{address}"' in rule_file for address in (*HOST_CARDS, *VM_CARDS))
    assert "nvidia" not in rule_file.replace("vfio-pci", "")
    assert plan(settled_back(bound, back), replace(wants(), state="absent")).steps == []


def settled_back(facts: HostFacts, back: Plan) -> HostFacts:
    settings = {**facts.settings, **texts(back)}
    for step in back.steps:
        if step.action == "remove":
            settings.pop(step.target)
    functions = tuple(
        replace(f, driver="vfio-pci", override=moves(back) and f.override) if f.address in moves(back) else f
        for f in facts.functions
    )
    return replace(facts, settings=settings, functions=functions, gpus=(), nodes=(), majors=MAJORS)


def test_way_back_waits_for_users_as_well() -> None:
    facts = kpro5_bound(users={HOST_CARDS[0]: ("4711 python3",)})
    assert rules(plan(facts, replace(wants(), state="absent"))) == {"in-use"}


def test_way_back_does_not_miss_a_card_that_was_taken_out() -> None:
    facts = kpro5_bound()
    facts = replace(facts, functions=tuple(f for f in facts.functions if f.slot != HOST_CARDS[0][:-2]))
    assert "no-such-card" in rules(plan(facts, wants()))
    assert set(moves(plan(facts, replace(wants(), state="absent")))) == {HOST_CARDS[1], f"{HOST_CARDS[1][:-1]}1"}
