"""Which runtime looks after what."""

from __future__ import annotations

from drafthouse.errors import FleetError
from drafthouse.fleet.node import Node
from drafthouse.fleet.runtime.docker import Docker
from drafthouse.fleet.runtime.process import Process
from drafthouse.fleet.runtime.protocol import Launch, Runtime


def runtime_of(what: Launch | str, node: Node) -> Runtime:
    """The runtime of a launch, or the one of that name ("docker" or "process").

    Raises:
        FleetError: a container is wanted on a rented node, which is a container itself and has no engine.
    """
    name = ("docker" if what.image else "process") if isinstance(what, Launch) else what
    for runtime in runtimes_of(node):
        if runtime.name == name:
            return runtime
    raise FleetError(
        f"units of the runtime '{name}' cannot run here",
        where=node.name,
        fix="use a job with `venv` on a rented node" if name == "docker" else "known are docker and process",
    )


def runtimes_of(node: Node) -> list[Runtime]:
    """All runtimes that may have units on a node."""
    return [Process()] if node.kind == "rented" else [Process(), Docker()]
