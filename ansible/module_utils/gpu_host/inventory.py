"""Contradictions in an inventory, found before any host is touched.

Works on plain dictionaries, so it can judge an inventory that Ansible resolved and a test's few lines alike.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .kernels import table_of
from .steps import Refusal

KINDS = ("proxmox", "container", "rented", "storage")
OWNERS = ("host", "vm")
ADDRESS = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$")
CARD_ID = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{4}$")


@dataclass(frozen=True)
class Host:
    """One host as Ansible resolved it."""

    name: str
    groups: tuple[str, ...]
    variables: Mapping[str, Any]

    @property
    def decommissioned(self) -> bool:
        return "decommissioned" in self.groups

    def get(self, key: str, default: Any = None) -> Any:
        return self.variables.get(key, default)


#: (host, key) -> the file that the value was written in.
Origin = Callable[[Host, str], str]


@dataclass
class Inventory:
    """All hosts, where their values were written, and which variables the roles know.

    Attributes:
        hosts: by name.
        origin: names the file of a host's key.
        known: role prefix -> variables that the role's argument_specs document.
    """

    hosts: Mapping[str, Host]
    origin: Origin
    known: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Host]:
        return iter(sorted(self.hosts.values(), key=lambda host: host.name))

    def where(self, host: Host, key: str, part: str = "") -> str:
        return f"{self.origin(host, key)}: {key}{part}"


def contradictions(inventory: Inventory) -> list[Refusal]:
    """Every contradiction, one sentence each, in a stable order; an empty list is an inventory that can be built."""
    found: list[Refusal] = []
    for rule in (_kinds, _cards, _nodes, _containers, _drivers, _variables):
        found += rule(inventory)
    return found


def _kinds(inventory: Inventory) -> Iterator[Refusal]:
    for host in inventory:
        kind = host.get("gpu_host_kind")
        if kind not in KINDS:
            yield Refusal(
                "unknown-kind",
                f"{host.name} is of kind {kind!r}" if kind else f"{host.name} has no kind",
                inventory.where(host, "gpu_host_kind"),
                f"give it one of {', '.join(KINDS)}, best in the group_vars of its group",
            )


def _cards(inventory: Inventory) -> Iterator[Refusal]:
    for host in inventory:
        seen: dict[str, int] = {}
        for index, card in enumerate(host.get("gpu_host_gpus") or ()):
            where = inventory.where(host, "gpu_host_gpus", f"[{index}]")
            address = str(card.get("address", ""))
            if not ADDRESS.match(address):
                yield Refusal(
                    "bad-address",
                    f"{address!r} is no PCI address of a function",
                    f"{where}.address",
                    "write it as `lspci -D` does, such as 0000:41:00.0",
                )
                continue
            if card.get("owner") not in OWNERS:
                yield Refusal(
                    "unknown-owner",
                    f"{address} belongs to {card.get('owner')!r}",
                    f"{where}.owner",
                    "say `host` (containers use it) or `vm` (virtual machines use it)",
                )
            if not CARD_ID.match(str(card.get("id", ""))):
                yield Refusal(
                    "bad-card-id",
                    f"{address} has the id {card.get('id', '')!r}, by which nothing can be checked",
                    f"{where}.id",
                    "write vendor:device as `lspci -n` does, such as 10de:2230",
                )
            if address in seen:
                yield Refusal(
                    "two-owners",
                    f"{address} stands in two entries, [{seen[address]}] and [{index}]",
                    where,
                    "a card has one owner: remove one of the entries",
                )
            seen.setdefault(address, index)


def _nodes(inventory: Inventory) -> Iterator[Refusal]:
    doors: dict[tuple[str, int], Host] = {}
    for host in inventory:
        address = host.get("ansible_host")
        if not address or host.get("ansible_connection", "ssh") not in ("ssh", "smart", "paramiko"):
            continue
        door = (str(address), int(host.get("ansible_port") or 22))
        if door in doors:
            yield Refusal(
                "one-door-two-nodes",
                f"{host.name} and {doors[door].name} are both reached at {door[0]} port {door[1]}",
                inventory.where(host, "ansible_host"),
                "a node is host:port; correct one of the two, or remove it",
            )
        doors.setdefault(door, host)


def _containers(inventory: Inventory) -> Iterator[Refusal]:
    numbers: dict[tuple[str, int], Host] = {}
    cards: dict[tuple[str, str], Host] = {}
    for container in inventory:
        if container.get("gpu_host_kind") != "container" or container.decommissioned:
            continue
        name = container.get("lxc_gpu_host")
        where = inventory.where(container, "lxc_gpu_host")
        host = inventory.hosts.get(str(name))
        if host is None or host.get("gpu_host_kind") != "proxmox":
            what = f"{container.name} lives on {name!r}" if name else f"{container.name} names no host"
            hosts = sorted(h.name for h in inventory if h.get("gpu_host_kind") == "proxmox" and not h.decommissioned)
            yield Refusal(
                "unknown-host",
                f"{what}, which is no Proxmox host of this inventory" if name else what,
                where,
                f"name one of {', '.join(hosts)}" if hosts else "add the host to the group proxmox",
            )
            continue
        if host.decommissioned:
            yield Refusal(
                "host-out-of-service",
                f"{container.name} lives on {host.name}, which is decommissioned",
                where,
                f"move the container to a host in service, or take {host.name} out of the group decommissioned",
            )
        yield from _number(inventory, container, host, numbers)
        yield from _container_cards(inventory, container, host, cards)


def _number(
    inventory: Inventory, container: Host, host: Host, numbers: dict[tuple[str, int], Host]
) -> Iterator[Refusal]:
    where = inventory.where(container, "lxc_gpu_vmid")
    vmid = container.get("lxc_gpu_vmid")
    if not isinstance(vmid, int) or isinstance(vmid, bool) or vmid < 100:
        yield Refusal(
            "bad-vmid", f"{container.name} has the number {vmid!r}", where, "write the number that `pct list` shows"
        )
        return
    other = numbers.setdefault((host.name, vmid), container)
    if other is not container:
        yield Refusal(
            "one-number-two-containers",
            f"{container.name} and {other.name} are both container {vmid} of {host.name}",
            where,
            "a number is given once on a host: correct one of the two",
        )


def _container_cards(
    inventory: Inventory, container: Host, host: Host, taken: dict[tuple[str, str], Host]
) -> Iterator[Refusal]:
    # Of two entries for one card the first counts: the contradiction itself is told once, by `_cards`.
    owners = {str(card.get("address")): card.get("owner") for card in reversed(host.get("gpu_host_gpus") or [])}
    listed = inventory.origin(host, "gpu_host_gpus")
    mine: set[str] = set()
    for index, address in enumerate(container.get("lxc_gpu_addresses") or ()):
        where = inventory.where(container, "lxc_gpu_addresses", f"[{index}]")
        if address not in owners:
            yield Refusal(
                "unknown-card",
                f"{container.name} wants {address}, which {host.name} does not have",
                where,
                f"name a card of {listed}: gpu_host_gpus, or add it there",
            )
            continue
        if owners[address] == "vm":
            yield Refusal(
                "two-owners",
                f"{container.name} wants {address}, which belongs to virtual machines",
                where,
                f"set its owner to `host` in {listed}: gpu_host_gpus, or choose another card",
            )
        other = taken.setdefault((host.name, address), container)
        if address in mine or other is not container:
            yield Refusal(
                "two-owners",
                f"{address} of {host.name} is given to {container.name} twice"
                if address in mine
                else f"{address} of {host.name} is given to {other.name} and to {container.name}",
                where,
                "a card has one owner: remove it from one of the lists",
            )
        mine.add(address)


def _drivers(inventory: Inventory) -> Iterator[Refusal]:
    for host in inventory:
        if host.decommissioned or host.get("gpu_host_kind") not in ("proxmox", "container"):
            continue
        where = inventory.where(host, "nvidia_driver_version")
        version = str(host.get("nvidia_driver_version") or "")
        if host.get("gpu_host_kind") == "proxmox":
            if not any(card.get("owner") == "host" for card in host.get("gpu_host_gpus") or ()):
                continue
            if table_of(version, host.get("nvidia_driver_kernels") or {}) is None:
                yield Refusal(
                    "no-kernel-range",
                    f"no range of kernels is known for driver {version!r}",
                    where,
                    "name a version of the table in the role nvidia_driver, "
                    "or add its min and max kernel to nvidia_driver_kernels",
                )
            continue
        home = inventory.hosts.get(str(host.get("lxc_gpu_host")))
        if home is None or home.decommissioned or home.get("gpu_host_kind") != "proxmox":
            continue
        if str(home.get("nvidia_driver_version")) != version:
            yield Refusal(
                "two-versions",
                f"{host.name} is to have driver {version!r} and its host {home.name} "
                f"{str(home.get('nvidia_driver_version'))!r}",
                where,
                "a container's libraries must be of exactly its host's version: set one variable for both",
            )


def _variables(inventory: Inventory) -> Iterator[Refusal]:
    told: dict[tuple[str, str], list[str]] = defaultdict(list)
    for host in inventory:
        for key in host.variables:
            prefix = next((p for p in sorted(inventory.known, key=len, reverse=True) if key.startswith(f"{p}_")), None)
            if prefix is not None and key not in inventory.known[prefix]:
                told[(inventory.origin(host, key), key)].append(prefix)
    every = sorted({name for names in inventory.known.values() for name in names})
    for (file, key), prefixes in sorted(told.items()):
        near = difflib.get_close_matches(key, every, n=1)
        role = "preflight" if prefixes[0] == "gpu_host" else prefixes[0]
        yield Refusal(
            "unknown-variable",
            f"no role knows the variable {key}",
            f"{file}: {key}",
            f"write {near[0]}" if near else f"the role {role} documents its variables in meta/argument_specs.yml",
        )
