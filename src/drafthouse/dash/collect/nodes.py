"""What nodes say when they are asked over ssh: a few at a time, each for itself, changing nothing there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from drafthouse.dash.collect.fleet import FleetSource, fleet_room
from drafthouse.dash.collect.source import Source
from drafthouse.dash.model import GpuView, NodeView
from drafthouse.errors import DrafthouseError

if TYPE_CHECKING:
    from drafthouse.fleet.inventory import Inventory
    from drafthouse.fleet.node import Node
    from drafthouse.fleet.probe.report import Report

AT_ONCE = 8
_SOON_S = 0.5  # until the inventory is read
LIMIT_S = 900.0
"""A round over a large fleet takes minutes; each node has limits of its own."""


class NodesSource(Source):
    """Probes of all nodes that are in service.

    Args:
        fleet: has the inventory.
        changed: called after every single node.
    """

    def __init__(self, fleet: FleetSource, pace_s: float, changed: Callable[[], None]) -> None:
        super().__init__("nodes", pace_s, limit_s=LIMIT_S)
        self._fleet, self._changed, self._rest_s = fleet, changed, pace_s
        self._views: dict[str, NodeView] = {}
        self._guard = threading.Lock()

    def views(self) -> dict[str, NodeView]:
        """What is known of every node of the inventory, by name."""
        inventory = self._fleet.inventory
        with self._guard:
            known = dict(self._views)
        if inventory is None:
            return known
        names = [node.name for node in inventory.nodes()]
        unknown = NodeView(name="", state="unknown", last_seen=None)
        return {name: known.get(name) or unknown.model_copy(update={"name": name}) for name in names}

    def recall(self, views: dict[str, NodeView]) -> None:
        """Begin with what was known before this process."""
        self._views = views

    def look(self) -> None:
        inventory = self._fleet.inventory
        self.pace_s = _SOON_S if inventory is None else self._rest_s
        if inventory is None:
            return
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="probe") as pool:
            for _ in pool.map(lambda node: self._ask(inventory, node), inventory.nodes()):
                self._changed()

    def _ask(self, inventory: Inventory, node: Node) -> None:
        answer = fleet_room("probe.fleet").inspect(inventory, [node], None)[node.name]
        now = datetime.now(UTC)
        with self._guard:
            if isinstance(answer, DrafthouseError):
                last = self._views.get(node.name) or NodeView(name=node.name, state="unknown", last_seen=None)
                state = "unknown" if last.last_seen is None else "silent"
                self._views[node.name] = last.model_copy(update={"state": state, "error": str(answer)})
            else:
                self._views[node.name] = _view(answer.report, now)


def _view(report: Report, now: datetime) -> NodeView:
    cores = None if report.cpu is None else report.cpu.quota_cores or float(report.cpu.cores)
    return NodeView(
        name=report.node,
        state="answers",
        last_seen=now,
        gpus=tuple(
            GpuView(
                index=gpu.index,
                name=gpu.name,
                uuid=gpu.uuid,
                memory_mib=gpu.memory_mib,
                used_mib=gpu.used_mib,
                utilization_percent=gpu.utilization_percent,
                temperature_c=gpu.temperature_c,
                power_w=gpu.power_w,
                job=next((holder.job for holder in gpu.holders if holder.job), None),
                source="probe",
                at=now,
            )
            for gpu in report.gpus or ()
        ),
        driver=report.driver,
        load_1min=report.cpu.load_1min if report.cpu else None,
        cores=cores,
        memory_bytes=report.memory.total_bytes if report.memory else None,
        memory_free_bytes=report.memory.free_bytes if report.memory else None,
        disk_bytes=report.disk.total_bytes if report.disk else None,
        disk_free_bytes=report.disk.free_bytes if report.disk else None,
        jobs=report.jobs,
    )
