"""Many nodes at once: what they are, and whether a job would fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafthouse.errors import FleetError
from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.inventory import Inventory
from drafthouse.fleet.jobs import Job
from drafthouse.fleet.node import Node
from drafthouse.fleet.parallel import each
from drafthouse.fleet.probe.fit import Finding, misfits
from drafthouse.fleet.probe.peers import of_job
from drafthouse.fleet.probe.report import Report
from drafthouse.fleet.probe.run import probe
from drafthouse.progress import Progress


@dataclass(frozen=True)
class Inspected:
    """A node and what speaks against a job on it (nothing, when none was asked about)."""

    report: Report
    misfits: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.report.model_dump(mode="json"), "misfits": [finding.sentence for finding in self.misfits]}


def inspect(
    inventory: Inventory, nodes: Sequence[Node], job: Job | None, progress: Progress | None = None
) -> dict[str, Inspected | FleetError]:
    """Ask all nodes side by side; one that does not answer is an error in its own place."""

    def one(node: Node) -> Inspected:
        with NodeConnection(node, inventory.known_hosts) as connection:
            report = probe(connection)
            if job is None:
                return Inspected(report, ())

            def connect(name: str) -> NodeConnection:
                return NodeConnection(inventory.node(name), inventory.known_hosts)

            return Inspected(report, tuple(misfits(job, report, of_job(job, connection, connect))))

    return each(nodes, one, progress, "probe")
