"""The binding on the tree of a host whose kernel answers: what holds afterwards, and what is left after a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_host.apply import apply
from gpu_host.binding import BindingDesired, plan
from gpu_host.binding_steps import HANDLERS, bound_driver
from gpu_host.boot_files import MODULES, OPTIONS, RULES
from gpu_host.gather import gather
from gpu_host.pci import override_of
from gpu_host.steps import ApplyError, Plan
from gpu_host.world import Result, World
from tests.doubles.host_tree import HostTree, TreeWorld, kpro5

from .host_facts import HOST_CARDS, VM_CARDS, wants

VERSION = "580.126.09"
WAY_BACK = BindingDesired(wants().gpus, state="absent")
#: What the driver says of itself stays until the role nvidia_driver takes it away.
DRIVER_STATE = ("/proc/devices", "/proc/modules", "/proc/driver/nvidia", "/sys/module", "/sys/bus/pci/drivers/nvidia/")


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return kpro5(tmp_path, driver=VERSION)


def bring(tree: HostTree, desired: BindingDesired) -> Plan:
    """Plan and act, as the module does; nothing may be left to do."""
    made = plan(gather(tree.world), desired)
    assert made.refusals == []
    apply(made, tree.world, HANDLERS)
    again = plan(gather(tree.world), desired)
    assert (again.steps, again.refusals) == ([], [])
    return made


def without_driver_state(snapshot: dict[str, str]) -> dict[str, str]:
    return {path: text for path, text in snapshot.items() if not path.startswith(DRIVER_STATE)}


def below(snapshot: dict[str, str], *addresses: str) -> dict[str, str]:
    return {path: text for path, text in snapshot.items() if any(address in path for address in addresses)}


def drivers(world: World) -> dict[str, str | None]:
    return {address: bound_driver(world, address) for address in (*HOST_CARDS, *VM_CARDS)}


# -- both directions ----------------------------------------------------------------------------------------------


def test_two_cards_move_and_those_of_vms_are_not_touched(tree: HostTree) -> None:
    before = tree.snapshot()
    bring(tree, wants())
    assert drivers(tree.world) == dict.fromkeys(HOST_CARDS, "nvidia") | dict.fromkeys(VM_CARDS, "vfio-pci")
    assert bound_driver(tree.world, "0000:41:00.1") != "vfio-pci"
    assert below(tree.snapshot(), "0000:81:00", "0000:82:00") == below(before, "0000:81:00", "0000:82:00")
    assert {node.path: (node.major, node.minor) for node in gather(tree.world).nodes} == {
        "/dev/nvidia0": (195, 0),
        "/dev/nvidia1": (195, 1),
        "/dev/nvidiactl": (195, 255),
        "/dev/nvidia-uvm": (509, 0),
        "/dev/nvidia-uvm-tools": (509, 1),
    }


def test_planning_and_check_mode_change_nothing(tree: HostTree) -> None:
    before = tree.snapshot()
    assert plan(gather(tree.world), wants()).steps
    assert tree.snapshot() == before
    assert tree.world.mutations == []


def test_assignment_survives_a_reboot(tree: HostTree) -> None:
    bring(tree, wants())
    tree.world.kernel.reboot()
    assert drivers(tree.world) == dict.fromkeys(HOST_CARDS, "nvidia") | dict.fromkeys(VM_CARDS, "vfio-pci")
    assert bound_driver(tree.world, "0000:81:00.1") == "vfio-pci"
    assert bound_driver(tree.world, "0000:41:00.1") != "vfio-pci"
    assert [step.action for step in plan(gather(tree.world), wants()).steps] == ["nodes"]


def test_vm_start_does_not_catch_the_audio_function_of_a_host_card(tree: HostTree) -> None:
    """PVE writes the id of the VM's audio function to new_id; the A6000 have the same one."""
    bring(tree, wants())
    tree.world.poke("/sys/bus/pci/drivers/vfio-pci/remove_id", "10de 1aef")
    tree.world.poke("/sys/bus/pci/drivers/vfio-pci/new_id", "10de 1aef")
    assert bound_driver(tree.world, "0000:41:00.1") is None
    assert plan(gather(tree.world), wants()).steps == []


def test_card_goes_back_to_vms(tree: HostTree) -> None:
    bring(tree, wants())
    bring(tree, wants({HOST_CARDS[0]: "vm"}))
    assert bound_driver(tree.world, HOST_CARDS[0]) == "vfio-pci"
    assert [node.path for node in gather(tree.world).nodes if node.path[-1].isdigit()] == ["/dev/nvidia1"]


def test_persistence_daemon_lets_go_and_comes_back(tree: HostTree) -> None:
    bring(tree, wants())
    tree.world.must(["systemctl", "start", "nvidia-persistenced"])
    bring(tree, wants({HOST_CARDS[0]: "vm"}))
    assert gather(tree.world).users[HOST_CARDS[1]] == ("4242 nvidia-persistenced",)


def test_persistence_daemon_starts_with_the_first_cards(tree: HostTree) -> None:
    tree.file("/etc/systemd/system/nvidia-persistenced.service", "[Service]\n")
    bring(tree, wants())
    users = gather(tree.world).users
    assert {address: users[address] for address in HOST_CARDS} == dict.fromkeys(
        HOST_CARDS, ("4242 nvidia-persistenced",)
    )
    calls = len(tree.world.commands)
    assert bring(tree, wants()).steps == []
    assert not [argv for argv in tree.world.commands[calls:] if argv[0] == "systemctl"]


def test_cards_go_back_when_the_persistence_daemon_does_not_start(tree: HostTree) -> None:
    tree.file("/etc/systemd/system/nvidia-persistenced.service", "[Service]\n")
    tree.world.on("systemctl", lambda world, argv: Result(1, "", "Job failed.\n") if argv[1] == "restart" else 0)
    with pytest.raises(ApplyError, match="Job failed"):
        apply(plan(gather(tree.world), wants()), tree.world, HANDLERS)
    assert drivers(tree.world) == dict.fromkeys((*HOST_CARDS, *VM_CARDS), "vfio-pci")


def test_way_back_restores_the_tree(tree: HostTree) -> None:
    tree.file("/etc/kernel/cmdline", "root=ZFS=rpool/ROOT vfio-pci.ids=10de:2230 quiet\n")
    tree.file("/etc/driverctl.d/pci-0000:41:00.0", "vfio-pci\n")
    tree.file("/etc/initramfs-tools/modules", "# modules\nvfio-pci ids=10de:2230,10de:1aef\n")
    before = without_driver_state(tree.snapshot())
    bring(tree, wants())
    assert not tree.world.exists("/etc/driverctl.d/pci-0000:41:00.0")
    bring(tree, WAY_BACK)
    assert without_driver_state(tree.snapshot()) == before
    tree.world.kernel.reboot()
    assert drivers(tree.world) == dict.fromkeys((*HOST_CARDS, *VM_CARDS), "vfio-pci")


def test_way_back_without_old_ids_keeps_rules_by_address(tree: HostTree) -> None:
    tree.file("/etc/modprobe.d/vfio.conf", "")
    bring(tree, wants())
    bring(tree, WAY_BACK)
    tree.world.kernel.reboot()
    assert drivers(tree.world) == dict.fromkeys((*HOST_CARDS, *VM_CARDS), "vfio-pci")
    assert tree.world.read(RULES)
    assert "blacklist" not in (tree.world.read(OPTIONS) or "")


def test_way_back_of_a_host_of_vms_switches_no_driver_off(tree: HostTree) -> None:
    tree.file("/etc/modprobe.d/vfio.conf", "")
    all_vms = wants(dict.fromkeys(HOST_CARDS, "vm"))
    bring(tree, all_vms)
    assert "\nblacklist nvidia\n" in (tree.world.read(OPTIONS) or "")
    bring(tree, BindingDesired(all_vms.gpus, state="absent"))
    assert "\nblacklist nvidia\n" not in (tree.world.read(OPTIONS) or "")


def test_command_line_that_got_its_ids_back_still_leads_to_the_oldest(tree: HostTree) -> None:
    found = "root=x vfio-pci.ids=10de:2230 quiet\n"
    tree.file("/etc/kernel/cmdline", found)
    bring(tree, wants())
    tree.file("/etc/kernel/cmdline", "root=x quiet vfio-pci.ids=10de:2204\n")
    bring(tree, wants())
    assert tree.world.read("/etc/kernel/cmdline") == "root=x quiet\n"
    bring(tree, WAY_BACK)
    assert tree.world.read("/etc/kernel/cmdline") == found


def test_command_line_that_somebody_changed_since_stays(tree: HostTree) -> None:
    tree.file("/etc/kernel/cmdline", "root=x vfio-pci.ids=10de:2230\n")
    bring(tree, wants())
    tree.file("/etc/kernel/cmdline", "root=y\n")
    made = bring(tree, WAY_BACK)
    assert tree.world.read("/etc/kernel/cmdline") == "root=y\n"
    assert any("/etc/kernel/cmdline was changed since" in note for note in made.notes)


# -- hiding places ------------------------------------------------------------------------------------------------


def test_driver_that_was_switched_off_loads(tree: HostTree) -> None:
    tree.file("/etc/modprobe.d/off.conf", "install nvidia /bin/false\n")
    bring(tree, wants())
    assert bound_driver(tree.world, HOST_CARDS[0]) == "nvidia"


@pytest.mark.parametrize(
    ("path", "text", "refresh"),
    [
        ("/etc/default/grub", 'GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230"\n', ["update-grub"]),
        ("/etc/kernel/cmdline", "root=x vfio-pci.ids=10de:2230\n", ["proxmox-boot-tool", "refresh"]),
    ],
)
def test_boot_loader_is_told_or_the_file_is_as_before(tree: HostTree, path: str, text: str, refresh: list[str]) -> None:
    tree.file(path, text)
    made = plan(gather(tree.world), wants())
    tree.world.on(refresh[0], lambda world, argv: 1)
    with pytest.raises(ApplyError, match=" ".join(refresh)):
        apply(made, tree.world, HANDLERS)
    assert tree.world.read(path) == text
    assert tree.world.read(RULES) is None
    tree.world.on(refresh[0], lambda world, argv: 0)
    bring(tree, wants())
    assert refresh in tree.world.commands
    assert not any("ids" in line for line in (tree.world.read(path) or "").splitlines() if line[:1] != "#")


# -- failures -----------------------------------------------------------------------------------------------------


def assert_undone(tree: HostTree, before: dict[str, str]) -> None:
    assert without_driver_state(tree.snapshot()) == before


def test_unbind_that_hangs_is_given_up_and_everything_undone(tree: HostTree) -> None:
    """#21: the write would never return."""
    before = without_driver_state(tree.snapshot())
    made = plan(gather(tree.world), wants())
    tree.world.kernel.hanging.add(HOST_CARDS[1])
    with pytest.raises(ApplyError, match=r"rebind 0000:42:00\.0.*did not return within 15 s.*vfio-pci as before"):
        apply(made, tree.world, HANDLERS)
    assert_undone(tree, before)


def test_probe_that_fails_leaves_the_card_where_it_was(tree: HostTree) -> None:
    before = without_driver_state(tree.snapshot())
    made = plan(gather(tree.world), wants())
    tree.world.kernel.failing.add((HOST_CARDS[1], "nvidia"))
    with pytest.raises(ApplyError, match=r"0000:42:00\.0 is on no driver after the probe, not on nvidia"):
        apply(made, tree.world, HANDLERS)
    assert_undone(tree, before)


@pytest.mark.parametrize("program", ["update-initramfs", "nvidia-modprobe"])
def test_program_that_fails_late_undoes_the_moves(tree: HostTree, program: str) -> None:
    before = without_driver_state(tree.snapshot())
    made = plan(gather(tree.world), wants())
    tree.world.on(program, lambda world, argv: Result(1, "", "no space left\n"))
    with pytest.raises(ApplyError, match="no space left"):
        apply(made, tree.world, HANDLERS)
    assert_undone(tree, before)
    assert tree.world.read(MODULES) is None


def test_vm_that_starts_after_the_plan_wins(tree: HostTree) -> None:
    made = plan(gather(tree.world), wants())
    tree.process(7000, "kvm").reserve(HOST_CARDS[0], 105, "pid:7000")
    with pytest.raises(ApplyError, match="VM 105 has just taken 0000:41:00"):
        apply(made, tree.world, HANDLERS)
    assert drivers(tree.world) == dict.fromkeys((*HOST_CARDS, *VM_CARDS), "vfio-pci")


def test_process_that_opens_the_card_after_the_plan_wins(tree: HostTree) -> None:
    bring(tree, wants())
    made = plan(gather(tree.world), wants({HOST_CARDS[0]: "vm"}))
    tree.process(7001, "python3", opens=["/dev/nvidia0"])
    with pytest.raises(ApplyError, match="process 7001 python3 has just opened its device"):
        apply(made, tree.world, HANDLERS)
    assert bound_driver(tree.world, HOST_CARDS[0]) == "nvidia"
    assert override_of(tree.world, HOST_CARDS[0]) == "nvidia"


def test_file_of_a_bind_mount_becomes_a_device(tree: HostTree) -> None:
    """#25: nvidia-modprobe takes what stands there for the node."""
    bring(tree, wants())
    tree.file("/dev/nvidia1", "")
    bring(tree, wants())
    assert tree.world.device("/dev/nvidia1") == ("char", 195, 1)


def test_major_of_the_next_kernel_is_followed(tree: HostTree) -> None:
    """#8 #9 #10 #11."""
    bring(tree, wants())
    tree.world.kernel.reboot()
    tree.node("/dev/nvidia-uvm", 509, 0)
    tree.world.kernel.uvm_major = 511
    bring(tree, wants())
    assert tree.world.device("/dev/nvidia-uvm") == ("char", 511, 0)


# -- a write that blocks ------------------------------------------------------------------------------------------


def test_write_that_blocks_is_left_behind_in_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "unbind")  # nobody reads it, so opening it for writing blocks
    with pytest.raises(ApplyError, match=r"did not return within 0\.2 s"):
        World(str(tmp_path)).poke_within("/unbind", "0000:41:00.0", 0.2)


def test_write_within_time_reaches_the_file_and_a_refusal_is_told(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("")
    World(str(tmp_path)).poke_within("/probe", "0000:41:00.0", 5)
    assert (tmp_path / "probe").read_text() == "0000:41:00.0"
    with pytest.raises(OSError, match="refuses"):
        World(str(tmp_path)).poke_within("/absent/unbind", "0000:41:00.0", 5)


def test_tree_without_the_program_is_told(tree: HostTree) -> None:
    world: TreeWorld = tree.world
    del world.programs["nvidia-modprobe"]
    with pytest.raises(ApplyError, match="nvidia-modprobe: command not found"):
        apply(plan(gather(world), wants()), world, HANDLERS)
