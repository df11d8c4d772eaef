"""Whether a machine is what the inventory says, before anything on it is touched; and the table of its cards.

The refusals are those of the planners that come later, asked now with everything they will be asked then: an operator
hears all reasons at once, and no role has written by that time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import binding, driver, passthrough
from .binding import BindingDesired, GpuWant
from .driver_state import DriverDesired, DriverState
from .facts import CONTAINERS, HostFacts, PciFunction
from .passthrough import PassthroughDesired
from .pci import normalise
from .steps import Plan, Refusal

#: Rules of the later planners that do not depend on what an earlier role will have done by then.
DRIVER_RULES = frozenset({"kernel-unfit", "next-kernel-unfit", "no-kernel-range", "headers-unfit", "secure-boot"})
CONTAINER_RULES = frozenset({"no-such-container", "container-locked"})
_CARD_NODE = re.compile(r"/dev/nvidia(\d+)")


@dataclass(frozen=True)
class PreflightDesired:
    """What the inventory says of this machine.

    Attributes:
        kind: `proxmox`, `container`, `rented` or `storage`.
        gpus: every card of a Proxmox host with its owner.
        addresses: cards given to this container.
        gpu_count: how many cards a rented node must have, 0 when that was not said.
        driver_version: version for hosts and containers.
        driver_minimum: the oldest that will do on a machine whose driver is somebody else's.
        kernels: kernel ranges on top of the table, as `kernels.table_of` takes them.
        pin_kernel: a kernel may be pinned, so an unfit one that is running is no reason to stop.
        containers: number -> cards of the containers that this Proxmox host has.
        mok_enrolled: the key that DKMS signs with is enrolled.
    """

    kind: str
    gpus: tuple[GpuWant, ...] = ()
    addresses: tuple[str, ...] = ()
    gpu_count: int = 0
    driver_version: str = ""
    driver_minimum: str = ""
    kernels: dict[str, Any] = field(default_factory=dict)
    pin_kernel: bool = False
    containers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    mok_enrolled: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> PreflightDesired:
        """From the arguments of the module `gpu_facts`, with addresses as sysfs writes them.

        Raises:
            ValueError: an address or a container's number is none; the text says where.
        """
        values = dict(arguments)
        values["gpus"] = tuple(
            GpuWant(_address(card["address"], "gpus"), card["owner"], card["id"].lower(), card["model"])
            for card in values["gpus"]
        )
        values["addresses"] = tuple(_address(address, "addresses") for address in values["addresses"])
        containers = {}
        for vmid, addresses in values["containers"].items():
            if not str(vmid).isdigit():
                raise ValueError(f"containers: {vmid!r} is no number of a container; write what `pct list` shows")
            containers[int(vmid)] = tuple(_address(address, f"containers.{vmid}") for address in addresses)
        return cls(**{**values, "containers": containers})


def _address(written: str, where: str) -> str:
    try:
        address = normalise(written)
    except ValueError as wrong:
        raise ValueError(f"{where}: {wrong}; write it as `lspci -D` does, such as 0000:41:00.0") from wrong
    if "." not in address:
        raise ValueError(f"{where}: {written!r} names no function; write the one of the display, such as {address}.0")
    return address


def judge(facts: HostFacts, desired: PreflightDesired) -> Plan:
    """All reasons why this machine is not to be touched, and what an operator should know; never a step."""
    rules = {"proxmox": _proxmox, "container": _container, "rented": _rented}
    found = Plan()
    if desired.kind in rules:
        found.refusals += rules[desired.kind](facts, desired)
    if desired.kind == "container":
        found.notes += _foreign_cards(facts, desired)
    return found


# -- Proxmox hosts -----------------------------------------------------------------------------------------------------


def _proxmox(facts: HostFacts, desired: PreflightDesired) -> Iterator[Refusal]:
    if not facts.pve:
        yield Refusal(
            "not-proxmox",
            "this is no Proxmox VE host (no package pve-manager)",
            facts.hostname or "this host",
            "correct ansible_host, or gpu_host_kind",
        )
        return
    if not facts.quorate:
        yield Refusal(
            "no-quorum",
            "the cluster has no quorum, so /etc/pve takes no writes",
            facts.hostname,
            "bring the other nodes back, or (one node left on purpose) `pvecm expected 1`, and run again",
        )
    cards = BindingDesired(desired.gpus, driver_expected=False, containers=tuple(desired.containers))
    yield from binding.plan(facts, cards).refusals
    if any(gpu.owner == "host" for gpu in desired.gpus):
        yield from _driver_basis(facts, desired)
    for vmid, addresses in sorted(desired.containers.items()):
        asked = passthrough.plan(facts, PassthroughDesired(vmid, addresses, predict=True))
        yield from (refusal for refusal in asked.refusals if refusal.rule in CONTAINER_RULES)


def _driver_basis(facts: HostFacts, desired: PreflightDesired) -> Iterator[Refusal]:
    asked = DriverDesired(version=desired.driver_version, kernels=desired.kernels, pin_kernel=desired.pin_kernel)
    found = driver.plan(facts, DriverState(mok_enrolled=desired.mok_enrolled), asked, runfile_coming=True)
    yield from (refusal for refusal in found.refusals if refusal.rule in DRIVER_RULES)


# -- containers and rented nodes: the driver is their host's -----------------------------------------------------------


def _container(facts: HostFacts, desired: PreflightDesired) -> Iterator[Refusal]:
    if facts.pve or facts.virtualization not in CONTAINERS:
        yield Refusal(
            "not-a-container",
            "this machine is no container",
            facts.hostname or "this machine",
            "correct ansible_host, or gpu_host_kind",
        )
        return
    yield from _somebodys_driver(facts, desired.driver_version, desired.driver_minimum)
    for address in desired.addresses if facts.driver_version else ():
        what = _not_usable(facts, address)
        if what:
            yield Refusal(
                "card-not-here",
                what,
                address,
                "run site.yml with -l and the name of its host (lxc_gpu_host), which passes the card in, "
                "or take it out of lxc_gpu_addresses",
            )


def _not_usable(facts: HostFacts, address: str) -> str:
    """Why CUDA could not open this card from inside the container, empty when it could."""
    gpu = facts.gpu(address)
    if gpu is None or gpu.minor is None:
        return "the host's driver does not drive this card"
    if "nvidia-uvm" not in facts.majors:
        return "nvidia-uvm is not loaded on the host"
    standing = {node.path: node for node in facts.nodes}
    for path, (major, minor) in binding.expected_nodes([gpu.minor], facts.majors).items():
        node = standing.get(path)
        if node is None:
            return f"{path} is not in this container"
        if node.kind != "char":
            return f"a {node.kind} stands at {path} in the place of the device"
        if (node.major, node.minor) != (major, minor):
            return f"{path} is {node.major}:{node.minor} here, and its driver is at {major}:{minor} now"
    return ""


def _foreign_cards(facts: HostFacts, desired: PreflightDesired) -> Iterator[str]:
    for gpu in facts.gpus:
        here = any(node.path == f"/dev/nvidia{gpu.minor}" and node.kind == "char" for node in facts.nodes)
        if here and desired.addresses and gpu.address not in desired.addresses:
            yield f"{gpu.address} ({gpu.model}) is in this container too, and lxc_gpu_addresses does not name it"


def _rented(facts: HostFacts, desired: PreflightDesired) -> Iterator[Refusal]:
    yield from _somebodys_driver(facts, desired.driver_version, desired.driver_minimum)
    count = len(_cards_inside(facts))
    if desired.gpu_count and count != desired.gpu_count:
        yield Refusal(
            "wrong-gpu-count",
            f"{count} GPUs are here, {desired.gpu_count} were rented",
            facts.hostname or "this node",
            "ask the provider for the missing ones, or correct gpu_host_gpu_count",
        )


def _somebodys_driver(facts: HostFacts, version: str, minimum: str) -> Iterator[Refusal]:
    asked = DriverDesired(version=version, state="verified", minimum=minimum or version)
    yield from driver.plan(facts, DriverState(), asked).refusals


def _cards_inside(facts: HostFacts) -> set[int]:
    """Minors that can be opened here; /proc shows all cards of the host, given or not."""
    matches = (_CARD_NODE.fullmatch(node.path) for node in facts.nodes if node.kind == "char")
    return {int(match[1]) for match in matches if match}


# -- the table ---------------------------------------------------------------------------------------------------------

COLUMNS = ("address", "model", "id", "driver", "group", "owner", "holders")


def cards(facts: HostFacts, desired: PreflightDesired) -> list[dict[str, str]]:
    """A row for each NVIDIA card, by address, with the columns `COLUMNS`; in a container, for those that it has."""
    owners = {want.address: want for want in desired.gpus}
    inside = _cards_inside(facts) if desired.kind in ("container", "rented") else None
    rows = []
    for function in facts.functions:
        gpu = facts.gpu(function.address)
        if not function.is_gpu or (inside is not None and (gpu is None or gpu.minor not in inside)):
            continue
        want, found = owners.get(function.address), f"{function.vendor}:{function.device}"
        named = want.model if want and want.id == found else ""
        rows.append(
            {
                "address": function.address,
                "model": (gpu.model if gpu else "") or named or "?",
                "id": found,
                "driver": function.driver or "none",
                "group": "none" if function.group is None else str(function.group),
                "owner": want.owner if want else "-",
                "holders": ", ".join(_holders(facts, function)) or "-",
            }
        )
    return rows


def _holders(facts: HostFacts, function: PciFunction) -> Iterator[str]:
    """Virtual machines that name any function of the card, containers that list its node, processes on it."""
    slot = {f.address for f in facts.slot_functions(function.slot)}
    claims = [claim for claim in facts.claims if slot & set(claim.addresses)]
    reserved = {facts.reserved[address] for address in slot if address in facts.reserved}
    for vmid in sorted({claim.vmid for claim in claims} | reserved):
        keys = [f"{c.key}{'' if c.section == 'main' else f' in {c.section}'}" for c in claims if c.vmid == vmid]
        on = vmid in reserved or any(c.running for c in claims if c.vmid == vmid)
        yield f"VM {vmid} ({'; '.join([*keys, *(['running'] if on else [])])})"
    gpu = facts.gpu(function.address)
    node = f"/dev/nvidia{gpu.minor}" if gpu and gpu.minor is not None else None
    for container in facts.containers:
        if node and any(entry.path == node and entry.section == "main" for entry in container.entries):
            yield f"CT {container.vmid}{' (running)' if container.running else ''}"
    # Of a card on vfio-pci the only user is the virtual machine itself.
    for user in () if reserved else facts.users.get(function.address, ()):
        yield f"process {user}"


def table(rows: list[dict[str, str]]) -> list[str]:
    """The rows as lines of text with aligned columns; a single sentence where there is no card."""
    if not rows:
        return ["no NVIDIA card is here"]
    cells = [COLUMNS, *(tuple(row[column] for column in COLUMNS) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    return ["  ".join(text.ljust(widths[i]) for i, text in enumerate(line)).rstrip() for line in cells]
