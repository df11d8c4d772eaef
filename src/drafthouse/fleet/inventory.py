"""The nodes of the fleet, read through `ansible-inventory` from the files that Ansible reads."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthouse.errors import FleetError
from drafthouse.fleet.node import Node

__all__ = ["Inventory", "Node"]

NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
ANSIBLE_S = 60.0
_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9:._%-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")
# ansible-inventory warns about a file that it cannot read and goes on without it; and it wants a UTF-8 locale.
_STRICT = {
    "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
    "ANSIBLE_INVENTORY_UNPARSED_FAILED": "true",
    "ANSIBLE_NOCOLOR": "true",
    "LC_ALL": "C.UTF-8",
}


@dataclass(frozen=True)
class Inventory:
    """All nodes, in the order of their names.

    Attributes:
        path: the folder.
        known_hosts: file of the host keys that are trusted.
        fleet_store: URL of the store that keeps the fleet's records (`fleet_store`, the same for all hosts).
    """

    path: Path
    known_hosts: Path
    fleet_store: str | None
    _nodes: Mapping[str, Node]
    _groups: Mapping[str, tuple[str, ...]]

    @classmethod
    def load(cls, path: Path = Path("inventory"), known_hosts: Path | None = None) -> Inventory:
        """Read the inventory in the folder `path`.

        Args:
            known_hosts: default: `known_hosts` in the folder where it is there, otherwise ~/.ssh/known_hosts.

        Raises:
            FleetError: Ansible is missing or refuses the files; a host's variables make no node; two nodes are reached
                at one host and port.
        """
        hosts = path / "hosts.yml"
        if not hosts.is_file():
            raise FleetError(
                "there is no inventory", where=str(hosts), fix="change to the repository, or name its folder"
            )
        own = path / "known_hosts"
        trusted = known_hosts or (own if own.is_file() else Path("~/.ssh/known_hosts").expanduser())
        return cls.of(path, _listed(hosts), trusted)

    @classmethod
    def of(cls, path: Path, listed: Mapping[str, Any], known_hosts: Path) -> Inventory:
        """The inventory of what `ansible-inventory --list` said about the folder `path`.

        Raises:
            FleetError: as `load`.
        """
        hosts = path / "hosts.yml"
        groups = {name: tuple(_members(listed, name)) for name in sorted(listed) if name != "_meta"}
        variables = listed.get("_meta", {}).get("hostvars", {})
        names = sorted({*variables, *groups.get("all", ())})
        nodes = {name: _node(name, variables.get(name, {}), groups, hosts) for name in names}
        _check_doors(nodes.values(), hosts)
        return cls(path, known_hosts, _fleet_store(variables, path), nodes, groups)

    def node(self, name: str) -> Node:
        """A node by its name.

        Raises:
            FleetError: there is none; says which names are near.
        """
        if name in self._nodes:
            return self._nodes[name]
        if name in self._groups:
            members = ", ".join(self._groups[name]) or "nobody"
            raise FleetError(f"'{name}' is a group ({members})", where=str(self.path), fix="name one node of it")
        raise self._unknown(name, self._nodes)

    def nodes(self, pattern: str | None = None) -> list[Node]:
        """Nodes by names and groups, comma separated, each once; by default (or `all`) those that are in service.

        Raises:
            FleetError: a word is neither node nor group.
        """
        found: dict[str, Node] = {}
        for word in (word.strip() for word in (pattern or "all").split(",")):
            if word == "all":
                found |= {name: node for name, node in self._nodes.items() if not node.decommissioned}
            elif word in self._groups:
                found |= {name: self._nodes[name] for name in self._groups[word]}
            elif word in self._nodes:
                found[word] = self._nodes[word]
            else:
                raise self._unknown(word, {**self._nodes, **self._groups})
        return list(found.values())

    def _unknown(self, name: str, known: Mapping[str, Any]) -> FleetError:
        near = difflib.get_close_matches(name, known, 3)
        fix = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known) or 'none'}"
        return FleetError(f"there is no node '{name}'", where=str(self.path / "hosts.yml"), fix=fix)


def _listed(hosts: Path) -> dict[str, Any]:
    """What `ansible-inventory --list` says: groups, and the variables of every host."""
    program = shutil.which("ansible-inventory") or shutil.which(
        "ansible-inventory", path=str(Path(sys.executable).parent)
    )
    if program is None:
        raise FleetError("ansible-inventory is not installed", where=str(hosts), fix="pip install 'drafthouse[fleet]'")
    try:
        done = subprocess.run(
            [program, f"--inventory={hosts}", "--list"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=ANSIBLE_S,
            check=False,
            env={**os.environ, **_STRICT},
        )
    except subprocess.TimeoutExpired:
        raise FleetError(
            f"ansible-inventory took longer than {ANSIBLE_S:g} s", where=str(hosts), fix="run it by hand with --list"
        ) from None
    if done.returncode:
        words = " ".join(line for line in done.stderr.splitlines() if "[WARNING]" not in line).split()
        reason = " ".join(words)[:500] or "it gave no reason"
        raise FleetError(f"ansible-inventory refuses it ({reason})", where=str(hosts), fix="correct the file")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def _members(listed: Mapping[str, Any], group: str) -> Iterator[str]:
    entry = listed.get(group, {})  # a group without hosts is named as a child and has no entry
    seen: set[str] = set()
    below = (host for child in entry.get("children", ()) for host in _members(listed, child))
    for host in (*entry.get("hosts", ()), *below):
        if host not in seen:
            seen.add(host)
            yield host


def _node(name: str, variables: Mapping[str, Any], groups: Mapping[str, tuple[str, ...]], hosts: Path) -> Node:
    def fail(key: str, what: str, fix: str) -> FleetError:
        return FleetError(f"{name}: {key}: {what}", where=str(hosts.parent), fix=fix)

    def text(key: str, default: str, pattern: re.Pattern[str]) -> str:
        value = str(variables.get(key) or default)
        if not pattern.fullmatch(value):
            raise fail(key, f"{value!r} cannot be used", "write it plainly; templates are not resolved here")
        return value

    def number(key: str, default: int | float | None) -> Any:
        value = variables.get(key, default)
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0):
            return value
        raise fail(key, f"{value!r} is not a number from 0 on", "correct it")

    if not re.fullmatch(NODE_NAME, name):
        raise FleetError(
            f"{name!r} is no name for a node", where=str(hosts), fix="use letters, digits, '-', '_' and '.'"
        )
    port = number("ansible_port", 22)
    if not isinstance(port, int) or not 1 <= port <= 65535:
        raise fail("ansible_port", f"{port!r} is no port", "give a number from 1 to 65535")
    key = variables.get("ansible_ssh_private_key_file") or variables.get("ansible_private_key_file")
    return Node(
        name=name,
        host=text("ansible_host", name, _HOST),
        port=port,
        user=text("ansible_user", "root", _USER),
        key_file=Path(str(key)).expanduser() if key else None,
        groups=tuple(sorted(group for group, members in groups.items() if name in members and group != "all")),
        kind=variables.get("gpu_host_kind"),
        gpu_count=_gpu_count(variables, number("gpu_host_gpu_count", None)),
        price_per_hour=number("price_per_hour", None),
        store=variables.get("node_store"),
        vars=dict(variables),
    )


def _gpu_count(variables: Mapping[str, Any], rented: int | None) -> int | None:
    """GPUs that jobs may have: of a container those it was given, of a Proxmox host those that it keeps itself."""
    if rented is not None:
        return rented
    if "lxc_gpu_addresses" in variables:
        return len(variables["lxc_gpu_addresses"] or ())
    if "gpu_host_gpus" in variables:
        return sum(1 for card in variables["gpu_host_gpus"] or () if card.get("owner") == "host")
    return None


def _check_doors(nodes: Iterable[Node], hosts: Path) -> None:
    doors: dict[tuple[str, int], str] = {}
    for node in nodes:
        other = doors.setdefault((node.host, node.port), node.name)
        if other != node.name:
            raise FleetError(
                f"{other} and {node.name} are both reached at {node.host} port {node.port}",
                where=str(hosts),
                fix="a node is host:port; correct one of the two, or remove it",
            )


def _fleet_store(variables: Mapping[str, Mapping[str, Any]], path: Path) -> str | None:
    values = {str(one["fleet_store"]): host for host, one in sorted(variables.items()) if one.get("fleet_store")}
    if len(values) > 1:
        hosts = " and ".join(values.values())
        raise FleetError(
            f"fleet_store differs between {hosts}",
            where=str(path),
            fix="the fleet has one store: set it in group_vars/all.yml only",
        )
    return next(iter(values), None)
