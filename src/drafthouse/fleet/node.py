"""A node: one machine that is reached by ssh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DECOMMISSIONED = "decommissioned"


@dataclass(frozen=True)
class Node:
    """One machine; what makes it this one is host and port together with its host key.

    Attributes:
        name: as in hosts.yml.
        host, port, user, key_file: `ansible_host`, `ansible_port`, `ansible_user`, `ansible_ssh_private_key_file`
            (None: the keys of the agent and of ~/.ssh).
        groups: all that it is in, sorted.
        kind: `gpu_host_kind`.
        gpu_count: how many GPUs jobs may have there by what the inventory says; None: it says nothing.
        price_per_hour: what it costs (`price_per_hour`).
        store: URL under which jobs there reach their store, where it is another than elsewhere (`node_store`).
        vars: all its variables.
    """

    name: str
    host: str
    port: int = 22
    user: str = "root"
    key_file: Path | None = None
    groups: tuple[str, ...] = ()
    kind: str | None = None
    gpu_count: int | None = None
    price_per_hour: float | None = None
    store: str | None = None
    vars: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def decommissioned(self) -> bool:
        """Out of service: jobs are moved away from it and never to it."""
        return DECOMMISSIONED in self.groups

    @property
    def known_as(self) -> str:
        """Its name in a known_hosts file (sshd(8)): the port is part of it unless it is 22."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    def __str__(self) -> str:
        return f"{self.name} ({self.host}:{self.port})"
