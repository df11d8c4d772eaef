"""Which driver every function of every card is bound to, by PCI address: the host's own, or vfio-pci for the VMs.

By address and never by id, because cards of different owners share ids: the audio function of an RTX 3090 and of an
RTX A6000 are both 10de:1aef. `plan` is pure; how its steps are taken stands in `binding_steps`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .boot_files import boot_steps, files_given_back
from .facts import HostFacts, PciFunction, VmClaim
from .hiding_places import RUNNING_CMDLINE, Cards, claimed_ids
from .lxc_config import upcoming_paths
from .nvidia import nvidia_major
from .steps import Plan, Refusal, Step
from .users import PERSISTENCED, is_persistenced, others_on

VFIO = "vfio-pci"
#: Drivers of the functions beside the GPU, by the beginning of the class code: audio, USB, the USB-C controller.
COMPANIONS = {"0403": "snd_hda_intel", "0c03": "xhci_hcd", "0c80": "nvidia-gpu"}
CONTROL_MINOR = 255

_NODE = re.compile(r"/dev/nvidia(\d+|(ctl|-uvm|-uvm-tools))")


@dataclass(frozen=True)
class GpuWant:
    """A card of the inventory: `owner` is `host` or `vm`, `id` is vendor:device, by which the address is checked."""

    address: str
    owner: str
    id: str
    model: str = ""


@dataclass(frozen=True)
class BindingDesired:
    """What the inventory asks for.

    Attributes:
        gpus: every NVIDIA card of the host.
        host_driver: driver of the cards that are the host's.
        state: `present`, or `absent` for the way back: every card on vfio-pci, the boot files as they were found.
        driver_expected: the driver has to be installed already; not so in check mode, where an earlier role only
            said that it would install it.
        containers: numbers of the containers of the inventory, whose entries a later role brings in order.
        timeout_s: bound on every wait for the kernel.
    """

    gpus: tuple[GpuWant, ...]
    host_driver: str = "nvidia"
    state: str = "present"
    driver_expected: bool = True
    containers: tuple[int, ...] = ()
    timeout_s: float = 15.0

    @property
    def leaving(self) -> bool:
        return self.state == "absent"


@dataclass(frozen=True)
class Target:
    """The driver that one function is to have, and what `driver_override` says then (None: nothing).

    `optional`: the function may as well stay without a driver, as long as vfio-pci cannot take it.
    """

    function: PciFunction
    owner: str
    driver: str
    override: str | None
    optional: bool = False

    @property
    def holds(self) -> bool:
        driver, override = self.function.driver, self.function.override
        if self.owner == "vm":
            return is_vfio(driver) and override in (None, self.override)
        if self.optional:
            bound_elsewhere = driver is not None and not is_vfio(driver) and override != VFIO
            return bound_elsewhere or (driver is None and override == self.override)
        return driver == self.driver and override in (None, self.override)


def is_vfio(driver: str | None) -> bool:
    """vfio-pci or one of its variants for a device (`nvgrace_gpu_vfio_pci`)."""
    return driver is not None and driver.replace("-", "_").endswith("vfio_pci")


def plan(facts: HostFacts, desired: BindingDesired) -> Plan:
    """Steps that bring every card to its owner, or all reasons why nothing may be touched."""
    refusals = list(_refused_cards(facts, desired))
    targets = [] if refusals else _targets(facts, desired)
    if targets:
        refusals += _refused_moves(facts, [t for t in targets if not t.holds])
        refusals += _stranded_containers(facts, desired, targets)
        if not desired.leaving:
            refusals += [*_held(facts, targets), *_groups(facts, targets), *_missing_basis(facts, desired, targets)]
    if refusals:
        return Plan(refusals=refusals)
    overrides = {t.function.address: t.override for t in targets if t.override}
    boot = boot_steps(facts.settings, _cards(facts, desired), overrides, desired.leaving)
    rebinds = [_rebind(target, desired) for target in _in_order(targets) if not target.holds]
    moves = [*rebinds, *_nodes(facts, targets, bool(rebinds))]
    return Plan(
        steps=[*boot.before, *_around_persistenced(facts, targets, moves), *boot.after],
        notes=[*_notes(facts, desired, targets), *boot.notes],
    )


# -- what is asked for -------------------------------------------------------------------------------------------------


def _functions(facts: HostFacts, desired: BindingDesired) -> Iterator[tuple[GpuWant, PciFunction]]:
    """Every function of every card of the inventory, with the card's entry."""
    for want in desired.gpus:
        for function in facts.slot_functions(want.address.rsplit(".", 1)[0]):
            yield want, function


def _driver(function: PciFunction, owner: str, host_driver: str) -> str:
    if owner == "vm":
        return VFIO
    return host_driver if function.is_display else COMPANIONS.get(function.class_code[:4], "")


def _cards(facts: HostFacts, desired: BindingDesired) -> Cards:
    """The cards as the inventory assigns them, also while they are being given back."""
    return Cards(
        ids=frozenset(f"{function.vendor}:{function.device}" for _, function in _functions(facts, desired)),
        drivers={f.address: _driver(f, want.owner, desired.host_driver) for want, f in _functions(facts, desired)},
        host_driven=any(want.owner == "host" for want in desired.gpus),
    )


def _targets(facts: HostFacts, desired: BindingDesired) -> list[Target]:
    by_id: frozenset[str] = frozenset()
    if desired.leaving:
        files, _ = files_given_back(facts.settings, _cards(facts, desired))
        by_id = claimed_ids(files)
    targets = []
    for want, function in _functions(facts, desired):
        owner = "vm" if desired.leaving else want.owner
        driver = _driver(function, owner, desired.host_driver)
        override = None if f"{function.vendor}:{function.device}" in by_id else driver or None
        targets.append(Target(function, owner, driver, override, owner == "host" and not function.is_display))
    return targets


def _in_order(targets: list[Target]) -> list[Target]:
    """Cards that leave the host first; then by address, so that minors are given in the order of addresses."""
    return sorted(targets, key=lambda t: (t.owner == "host", t.function.address))


# -- refusals: the inventory against this machine ----------------------------------------------------------------------


def _refused_cards(facts: HostFacts, desired: BindingDesired) -> Iterator[Refusal]:
    if facts.rented:
        yield Refusal(
            "rented-host",
            f"this is a {facts.virtualization} of somebody else's host, whose cards cannot be bound from inside",
            facts.hostname or "this host",
            "set gpu_host_kind to `rented`, or run this on the Proxmox host itself",
        )
        return
    seen: set[str] = set()
    for want in desired.gpus:
        slot = want.address.rsplit(".", 1)[0]
        if slot in seen:
            yield Refusal(
                "two-owners",
                "the card stands in gpu_host_gpus twice",
                want.address,
                "a card has one owner: remove one of the entries",
            )
        seen.add(slot)
        if facts.function(want.address) is None and desired.leaving:
            continue  # A card that was taken out has nothing to give back.
        yield from _refused_card(facts, want)
    for function in facts.functions:
        if function.is_gpu and function.slot not in seen and not desired.leaving:
            yield Refusal(
                "undeclared-card",
                f"an NVIDIA card ({function.vendor}:{function.device}) is here that the inventory does not name, "
                "and it would go to whatever driver comes first",
                function.address,
                "add it to gpu_host_gpus with its owner, or take the card out",
            )


def _refused_card(facts: HostFacts, want: GpuWant) -> Iterator[Refusal]:
    function = facts.function(want.address)
    if function is None:
        same = [f.address for f in facts.functions if f"{f.vendor}:{f.device}" == want.id and f.is_display]
        yield Refusal(
            "no-such-card",
            f"there is no PCI function at this address; {want.id} is at {', '.join(same) if same else 'no address'}",
            want.address,
            "correct the address in gpu_host_gpus (addresses move when cards or firmware settings change), "
            "or put the card back",
        )
        return
    found = f"{function.vendor}:{function.device}"
    if found != want.id:
        yield Refusal(
            "wrong-card",
            f"{found} is at this address, not {want.id}{f' ({want.model})' if want.model else ''}",
            want.address,
            "correct address or id in gpu_host_gpus, or put the card back where it was",
        )
    elif not function.is_display:
        yield Refusal(
            "not-a-gpu",
            f"this is a function of class {function.class_code}, not the card's GPU",
            want.address,
            "name the display function, usually .0; the other functions follow it",
        )
    gpu = facts.gpu(want.address)
    if gpu and gpu.model and want.model and want.model.lower() not in gpu.model.lower():
        yield Refusal(
            "wrong-card",
            f"the driver calls this card {gpu.model}, not {want.model}",
            want.address,
            "correct the model in gpu_host_gpus, or put the card back where it was",
        )


# -- refusals: who holds the cards -------------------------------------------------------------------------------------


def claim_text(claim: VmClaim) -> str:
    """`VM 101 names it as hostpci0 (snapshot before-upgrade, through the mapping gpus, starts with the host)`."""
    details = [] if claim.section == "main" else [claim.section]
    details += [f"through the mapping {claim.mapping}"] if claim.mapping else []
    details += ["starts with the host"] if claim.onboot else []
    return f"VM {claim.vmid} names it as {claim.key}" + (f" ({', '.join(details)})" if details else "")


def claim_fix(claim: VmClaim) -> str:
    """The command that takes this claim away."""
    if claim.section.startswith("snapshot"):
        return f"delete the snapshot (`qm delsnapshot {claim.vmid} {claim.section.partition(' ')[2]}`)"
    if claim.section == "pending":
        return f"take the pending change back (`qm set {claim.vmid} --revert {claim.key}`)"
    return f"take the card from the VM (`qm set {claim.vmid} --delete {claim.key}`)"


def running_holder(facts: HostFacts, address: str) -> int | None:
    """Number of the VM that runs, or is starting, with this function; None when there is none."""
    if address in facts.reserved:
        return facts.reserved[address]
    running = [c.vmid for c in facts.claims_on(address) if c.running and c.section == "main"]
    return running[0] if running else None


def _neighbours(facts: HostFacts, function: PciFunction) -> list[PciFunction]:
    """What vfio hands over together: the functions of the card and of its IOMMU group, without bridges."""
    found = {f.address: f for f in facts.slot_functions(function.slot)}
    found |= {f.address: f for f in facts.group_functions(function.group) if not f.is_bridge}
    return [found[address] for address in sorted(found)]


def _refused_moves(facts: HostFacts, moves: list[Target]) -> Iterator[Refusal]:
    """No function leaves its driver while a VM runs with its card or a process has it open."""
    held: dict[str, int] = {}
    for target in moves:
        function = target.function
        for neighbour in _neighbours(facts, function):
            vmid = running_holder(facts, neighbour.address)
            if vmid is not None:
                held.setdefault(function.slot, vmid)
        users = others_on(facts, function.address)
        if users and function.driver != target.driver:
            yield Refusal(
                "in-use",
                f"its device is open in {', '.join(f'process {user}' for user in users)}, "
                f"and unbinding {function.driver} would block until that ends",
                function.address,
                "stop these processes or the container that they run in, or leave the card with its owner",
            )
    for slot, vmid in held.items():
        yield Refusal(
            "held-by-running-vm",
            f"VM {vmid} runs with this card",
            slot,
            f"shut the VM down (`qm shutdown {vmid}`) and run again, or set the owner of the card to `vm`",
        )


def _leaving_nodes(facts: HostFacts, targets: list[Target]) -> Iterator[tuple[str, str]]:
    """(address, path) of the cards that the host's driver gives away."""
    for target in targets:
        gpu = facts.gpu(target.function.address)
        if not target.holds and target.owner == "vm" and gpu is not None and gpu.minor is not None:
            yield gpu.address, f"/dev/nvidia{gpu.minor}"


def _stranded_containers(facts: HostFacts, desired: BindingDesired, targets: list[Target]) -> Iterator[Refusal]:
    """Containers that would not start any more: they name a node that goes, and no role takes the entry out."""
    for address, path in _leaving_nodes(facts, targets):
        for container in facts.containers:
            if container.vmid in desired.containers or path not in upcoming_paths(container):
                continue
            yield Refusal(
                "used-by-container",
                f"container {container.vmid}, which the inventory does not name, lists {path}, the node of this card, "
                "and would not start without it",
                f"{address} ({container.file})",
                f"take the entry out of the container (`pct config {container.vmid}` shows it), add the container to "
                "the inventory, or set the owner of the card to `host`",
            )


def _held(facts: HostFacts, targets: list[Target]) -> Iterator[Refusal]:
    """A card of the host that a VM names anywhere: the VM would take it at its next start or rollback."""
    told: set[tuple[str, str, int, str, str]] = set()
    for target in targets:
        for neighbour in _neighbours(facts, target.function) if target.owner == "host" else ():
            same_card = neighbour.slot == target.function.slot
            for claim in facts.claims_on(neighbour.address):
                key = (target.function.slot, neighbour.slot, claim.vmid, claim.key, claim.section)
                if key in told:
                    continue
                told.add(key)
                names = claim_text(claim)
                yield Refusal(
                    "held-by-vm" if same_card else "shared-group",
                    names
                    if same_card
                    else f"it shares IOMMU group {target.function.group} with {neighbour.address}, and {names}",
                    f"{target.function.address} ({claim.file}: {claim.key})",
                    f"{claim_fix(claim)}, or set the owner of the card to `vm`",
                )


def _groups(facts: HostFacts, targets: list[Target]) -> Iterator[Refusal]:
    """vfio opens a group only when every member that is no bridge is free or on a vfio driver."""
    owners = {t.function.address: t.owner for t in targets}
    told: set[tuple[int | None, str]] = set()
    for target in targets:
        if target.owner != "vm":
            continue
        group = target.function.group
        for member in facts.group_functions(group):
            if member.is_bridge or owners.get(member.address) == "vm" or (group, member.address) in told:
                continue
            told.add((group, member.address))
            if owners.get(member.address) == "host":
                rule, is_what = "shared-group", "a card of the host"
            elif member.driver is None or is_vfio(member.driver) or member.driver == "pci-stub":
                continue
            else:
                rule, is_what = "group-not-viable", f"a device on {member.driver}"
            yield Refusal(
                rule,
                f"IOMMU group {group} also holds {member.address}, {is_what}, so no VM can start with this card",
                target.function.address,
                "give the whole group to one owner, or move a card to a slot with a group of its own (ACS)",
            )


def _missing_basis(facts: HostFacts, desired: BindingDesired, targets: list[Target]) -> Iterator[Refusal]:
    if not facts.iommu and any(t.owner == "vm" for t in targets):
        yield Refusal(
            "no-iommu",
            "cards are to belong to virtual machines, but the kernel runs without an IOMMU",
            facts.hostname or "this host",
            "switch on VT-d or AMD-Vi in the firmware and intel_iommu=on on kernels before 6.8, "
            "or give every card to the host",
        )
    if desired.driver_expected and _driver_missing(facts, targets):
        yield Refusal(
            "no-driver",
            f"kernel {facts.kernel} has no {desired.host_driver} module, which the cards of the host need",
            facts.hostname or "this host",
            "run the role nvidia_driver first, or boot the kernel that its module was built for",
        )


def _driver_missing(facts: HostFacts, targets: list[Target]) -> bool:
    wanted = any(t.owner == "host" and t.function.is_gpu and not t.holds for t in targets)
    return wanted and not facts.driver_version and facts.kernel not in facts.module_versions


# -- steps -------------------------------------------------------------------------------------------------------------


def _rebind(target: Target, desired: BindingDesired) -> Step:
    function = target.function
    whose = "virtual machines" if target.owner == "vm" else "the host"
    now = function.driver or "no driver"
    if function.driver == target.driver:
        why = f"stays with {target.driver} after the next probe (driver_override is {function.override})"
    elif target.optional:
        why = f"follows its card to {whose}, away from {now}"
    else:
        why = f"belongs to {whose}: {now} → {target.driver}"
    detail = {
        "driver": target.driver,
        "override": target.override,
        "optional": target.optional,
        "timeout_s": desired.timeout_s,
    }
    return Step("rebind", function.address, why, detail)


def _around_persistenced(facts: HostFacts, targets: list[Target], steps: list[Step]) -> list[Step]:
    """The persistence daemon has to let go of a card that leaves, and takes up new ones only when it starts.

    One that runs is stopped first in both cases, because the way back takes the steps in reverse: it starts again
    when the cards are where they were.
    """
    held = {address for address, users in facts.users.items() if any(is_persistenced(user) for user in users)}
    moves = [target for target in targets if not target.holds]
    leaves = any(target.owner == "vm" and target.function.address in held for target in moves)
    joins = facts.persistenced and any(target.owner == "host" and target.function.is_gpu for target in moves)
    stop, start, restart = (["systemctl", verb, PERSISTENCED] for verb in ("stop", "start", "restart"))
    before, after = [], []
    if leaves or (joins and held):
        why = "it holds a card open that changes its owner" if leaves else "it takes up new cards only when it starts"
        before = [Step("run", PERSISTENCED, why, {"argv": stop, "undo": start})]
    if joins:
        after = [Step("run", PERSISTENCED, "it keeps the new cards initialised", {"argv": restart, "undo": stop})]
    elif leaves and any(target.owner == "host" for target in targets):
        after = [Step("run", PERSISTENCED, "cards of the host stay", {"argv": start, "undo": stop})]
    return [*before, *steps, *after]


def expected_nodes(minors: list[int], majors: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Path -> (major, minor) of the nodes for cards with these minors; uvm is absent until its module is loaded."""
    major = nvidia_major(majors)
    nodes = {f"/dev/nvidia{minor}": (major, minor) for minor in minors}
    nodes["/dev/nvidiactl"] = (major, CONTROL_MINOR)
    if "nvidia-uvm" in majors:
        nodes["/dev/nvidia-uvm"] = (majors["nvidia-uvm"], 0)
        nodes["/dev/nvidia-uvm-tools"] = (majors["nvidia-uvm"], 1)
    return nodes


def has_no_card(path: str, expected: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a node of a card stands without its card, or a node that all cards need on a host that drives none."""
    match = _NODE.fullmatch(path)
    return match is not None and path not in expected and not (match[2] and expected)


def _nodes(facts: HostFacts, targets: list[Target], moving: bool) -> list[Step]:
    """Device nodes as they must be: nothing creates them by itself, and a bind mount leaves files in their place."""
    driven = any(t.owner == "host" and t.function.is_gpu for t in targets)
    minors = [gpu.minor for gpu in facts.gpus if gpu.minor is not None]
    expected = expected_nodes(minors, facts.majors) if driven else {}
    standing = {node.path: node for node in facts.nodes}
    wrong = []
    for path, numbers in expected.items():
        node = standing.get(path)
        if node is None or node.kind != "char" or (node.major, node.minor) != numbers:
            wrong.append(f"{path} is {'absent' if node is None else _node_text(node.kind, node.major, node.minor)}")
    if driven and "nvidia-uvm" not in facts.majors:
        wrong.append("nvidia-uvm is not loaded")
    wrong += [f"{path} has no card" for path in standing if has_no_card(path, expected)]
    if not wrong and not (moving and driven):
        return []
    why = "; ".join(wrong) if wrong else "minors are given anew"
    return [Step("nodes", "/dev/nvidia*", why, {"driven": driven})]


def _node_text(kind: str, major: int, minor: int) -> str:
    return f"{major}:{minor}" if kind == "char" else f"a {kind}"


# -- notes -------------------------------------------------------------------------------------------------------------


def _notes(facts: HostFacts, desired: BindingDesired, targets: list[Target]) -> Iterator[str]:
    if claimed_ids({RUNNING_CMDLINE: facts.cmdline}) and not desired.leaving:
        yield "the running kernel was started with vfio-pci.ids=, which is gone with the next boot"
    if not desired.driver_expected and not desired.leaving and _driver_missing(facts, targets):
        yield f"kernel {facts.kernel} has no {desired.host_driver} module yet: the role nvidia_driver installs it first"
    for address, path in _leaving_nodes(facts, targets):
        for container in facts.containers:
            if path in upcoming_paths(container):
                yield (
                    f"container {container.vmid} still lists {path}, the node of {address}: "
                    "it does not start until the role lxc_gpu has taken the entry out"
                )
