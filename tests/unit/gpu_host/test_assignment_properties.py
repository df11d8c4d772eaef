"""For any assignment and holders: no card of a VM is touched, a second run finds nothing, the way back is exact."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_host.apply import apply
from gpu_host.binding import BindingDesired, GpuWant, plan
from gpu_host.binding_steps import HANDLERS, bound_driver
from gpu_host.gather import gather
from gpu_host.passthrough import PassthroughDesired
from gpu_host.passthrough import plan as plan_passthrough
from gpu_host.passthrough_steps import HANDLERS as PASSTHROUGH_HANDLERS
from tests.doubles.host_tree import HostTree

from .test_binding_steps import without_driver_state

CARDS = {"0000:41:00.0": "2230", "0000:42:00.0": "2230", "0000:81:00.0": "2204", "0000:82:00.0": "2204"}
IDS = "10de:2230,10de:2204,10de:1aef"
SLOTS = sorted(CARDS)

owners = st.fixed_dictionaries({address: st.sampled_from(["host", "vm"]) for address in SLOTS})
holders = st.lists(
    st.fixed_dictionaries(
        {
            "card": st.sampled_from(SLOTS),
            "form": st.sampled_from(["address", "function", "list", "short", "mapping"]),
            "section": st.sampled_from(["main", "pending", "snapshot"]),
            "running": st.booleans(),
        }
    ),
    max_size=2,
)
#: Files in which the assignment as it was found hides; each of them gives every card to vfio-pci.
hides = st.fixed_dictionaries(
    {
        "/etc/modprobe.d/vfio.conf": st.sampled_from(
            [
                f"options vfio-pci ids={IDS}\n",
                f"# old\noptions vfio-pci ids={IDS},8086:1521 disable_vga=1\nblacklist nvidia\n",
            ]
        ),
        "/etc/initramfs-tools/modules": st.sampled_from(["", "vfio\n", f"vfio-pci ids={IDS}\n"]),
        "/etc/default/grub": st.sampled_from(
            ['GRUB_CMDLINE_LINUX="quiet"\n', f'GRUB_CMDLINE_LINUX="quiet vfio-pci.ids={IDS} iommu=pt"\nGRUB_TIMEOUT=5']
        ),
        "/etc/kernel/cmdline": st.sampled_from(["root=x\n", f"root=x vfio-pci.ids={IDS}\n"]),
        "/etc/modprobe.d/off.conf": st.sampled_from(["", "install nvidia /bin/false\nblacklist nouveau\n"]),
    }
)
drivers = st.fixed_dictionaries(
    {address: st.sampled_from(["vfio-pci", "nvidia", "nouveau", None]) for address in SLOTS}
)
#: A group of its own for every card, as a server board has it, or two cards behind one switch.
groups = st.sampled_from([[13, 14, 15, 16], [13, 14, 15, 16], [13, 13, 15, 16], [13, 14, 14, 16]])
#: Where the files of a host are made: in memory if possible, because every write is synced.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def claim_text(holder: dict[str, Any]) -> str:
    slot = holder["card"][:-2]
    value = {
        "address": slot,
        "function": f"host={holder['card']},pcie=1",
        "list": f"0000:c1:00.0;{holder['card']}",
        "short": slot[5:],
        "mapping": f"mapping=card-{slot[5:7]}",
    }[holder["form"]]
    head = {"main": "", "pending": "\n[PENDING]\n", "snapshot": "\n[before]\n"}[holder["section"]]
    return f"name: vm\n{head}hostpci0: {value}\n"


@contextmanager
def host(
    held: list[dict[str, Any]], bound: dict[str, str | None], group: list[int], files: dict[str, str]
) -> Iterator[HostTree]:
    """A host of four cards with these holders, drivers, groups and files."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        tree = HostTree(Path(folder)).driver("580.126.09")
        for path, text in files.items():
            tree.file(path, text)
        tree.world.kernel.load("vfio-pci")
        for number, (address, device) in zip(group, CARDS.items(), strict=True):
            tree.add_gpu(address, device, None, number)
        for address, driver in bound.items():
            for function in (address, f"{address[:-1]}1") if driver == "vfio-pci" else (address,) if driver else ():
                tree.world.kernel.add_driver(driver)
                tree.world.kernel.attach(function, driver)
        if "nvidia" in bound.values():
            assert tree.world.kernel.load("nvidia") is None
        mapping = "card-{0}\n\tmap id=10de:2230,iommugroup=1,node=kpro5,path=0000:{0}:00,subsystem-id=10de:1459\n"
        tree.mapping("".join(mapping.format(address[5:7]) for address in CARDS))
        for number, holder in enumerate(held):
            tree.add_vm(101 + number, claim_text(holder), running=holder["running"])
        tree.add_container(129, "arch: amd64\nhostname: ct129\n")
        yield tree


def wanted(owner: dict[str, str], state: str = "present") -> BindingDesired:
    return BindingDesired(tuple(GpuWant(a, owner[a], f"10de:{CARDS[a]}") for a in SLOTS), state=state)


def of_card(snapshot: dict[str, str], address: str) -> dict[str, str]:
    return {path: text for path, text in snapshot.items() if address[:-2] in path and path.startswith("/sys")}


@settings(max_examples=50, deadline=None)
@given(owner=owners, held=holders, bound=drivers, group=groups, consistent=st.booleans())
def test_no_plan_touches_a_card_that_a_vm_holds(
    owner: dict[str, str], held: list[dict[str, Any]], bound: dict[str, str | None], group: list[int], consistent: bool
) -> None:
    if consistent:  # the inventory knows of the holders
        owner = {**owner, **{holder["card"]: "vm" for holder in held}}
    with host(held, bound, group, {}) as tree:
        before = tree.snapshot()
        facts = gather(tree.world)
        made = plan(facts, wanted(owner))
        for holder in held:
            claimed = [c for c in facts.claims if holder["card"] in c.addresses]
            assert claimed, "the holder is seen in every form and section"
        if made.refused:
            assert made.steps == []
            return
        for holder in held:
            assert owner[holder["card"]] == "vm", "a card that any VM names is never given to the host"
        apply(made, tree.world, HANDLERS)
        for holder in held:
            assert bound_driver(tree.world, holder["card"]) == "vfio-pci"
            if holder["running"] and holder["section"] == "main":
                assert of_card(tree.snapshot(), holder["card"]) == of_card(before, holder["card"])
        again = plan(gather(tree.world), wanted(owner))
        assert (again.steps, again.refusals) == ([], [])


@settings(max_examples=15, deadline=None)
@given(owner=owners, files=hides, card_count=st.integers(0, 4))
def test_applying_twice_is_applying_once_and_the_way_back_restores_the_tree(
    owner: dict[str, str], files: dict[str, str], card_count: int
) -> None:
    with host([], dict.fromkeys(SLOTS, "vfio-pci"), [13, 14, 15, 16], files) as tree:
        before = without_driver_state(tree.snapshot())
        addresses = tuple(a for a in SLOTS if owner[a] == "host")[:card_count]
        container = PassthroughDesired(129, addresses)
        for desired in (wanted(owner), wanted(owner)):
            made = plan(gather(tree.world), desired)
            assert made.refusals == []
            apply(made, tree.world, HANDLERS)
        assert made.steps == []
        if addresses:
            made = plan_passthrough(gather(tree.world), container)
            assert made.refusals == []
            apply(made, tree.world, PASSTHROUGH_HANDLERS)
            assert plan_passthrough(gather(tree.world), container).steps == []
        gone = PassthroughDesired(129, state="absent")
        apply(plan_passthrough(gather(tree.world), gone), tree.world, PASSTHROUGH_HANDLERS)
        back = wanted(owner, state="absent")
        apply(plan(gather(tree.world), back), tree.world, HANDLERS)
        again = plan(gather(tree.world), back)
        assert (again.steps, again.refusals) == ([], [])
        assert without_driver_state(tree.snapshot()) == before


@settings(max_examples=10, deadline=None)
@given(owner=owners, files=hides)
def test_every_assignment_survives_a_reboot(owner: dict[str, str], files: dict[str, str]) -> None:
    with host([], dict.fromkeys(SLOTS, "vfio-pci"), [13, 14, 15, 16], files) as tree:
        apply(plan(gather(tree.world), wanted(owner)), tree.world, HANDLERS)
        tree.world.kernel.reboot()
        for address in SLOTS:
            assert bound_driver(tree.world, address) == ("nvidia" if owner[address] == "host" else "vfio-pci")
