"""The fleet's view: nodes with their GPUs, and one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from drafthouse.dash import bars, keys
from drafthouse.dash.gone import GoneError
from drafthouse.dash.model import GpuView, NodeView, Snapshot
from drafthouse.dash.words import total

# Up to here every GPU has a line of its own; a larger fleet gets a line a node, and its GPUs when it is opened.
GPUS_ONE_BY_ONE = 64

Values = dict[str, Any]


def fleet(snapshot: Snapshot, query: Mapping[str, str]) -> Values:
    """The nodes that match the filter, with their GPUs."""
    text, state = query.get("q", "").strip().casefold(), query.get("state", "")
    nodes = [node for node in snapshot.nodes if _matches(node, text, state)]
    nodes.sort(key=lambda node: (node.state != "silent", node.name))
    gpus = sum(len(node.gpus) for node in nodes)
    one_by_one = gpus <= GPUS_ONE_BY_ONE
    return {
        "q": query.get("q", ""),
        "state": state,
        "states": Counter(node.state for node in snapshot.nodes),
        "nodes": nodes if one_by_one else [],
        "bare": [node for node in nodes if not node.gpus and not node.error] if one_by_one else [],
        "lines": [] if one_by_one else [_node_line(node) for node in nodes],
        "matching": len(nodes),
        "gpu_count": gpus,
        "gpu_cells": gpu_cells,
        "gpu_names": gpu_names,
    }


def node(snapshot: Snapshot, key: str) -> Values:
    """One node."""
    found = keys.find_node(snapshot, key)
    if found is None:
        raise GoneError(f"there is no node '{key}'")
    return {
        "node": found,
        "title": found.name,
        "gpu_cells": gpu_cells,
        "gpu_names": gpu_names,
        "jobs": [job for job in snapshot.jobs if job.name in found.jobs or job.node == found.name],
    }


def gpu_cells(gpu: GpuView) -> list[tuple[str, Any, str]]:
    """The figures of a GPU as (column, bar, number with unit)."""
    space = "\u00a0"
    hot = gpu.temperature_c is not None and gpu.temperature_c >= bars.HOT_C
    full = (bars.memory(gpu) or 0) >= bars.FULL
    used = None if gpu.used_mib is None else f"{gpu.used_mib / 1024:.1f}"
    total = "" if gpu.memory_mib is None else f" of {gpu.memory_mib / 1024:.0f}"
    limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
    load, heat, power = gpu.utilization_percent, gpu.temperature_c, gpu.power_w
    return [
        ("utilisation", bars.bar(bars.utilization(gpu)), "–" if load is None else f"{load:.0f}{space}%"),
        ("memory", bars.bar(bars.memory(gpu), "warn" if full else ""), f"{used}{total}{space}GiB" if used else "–"),
        (
            "temperature",
            bars.bar(bars.temperature(gpu), "warn" if hot else ""),
            "–" if heat is None else f"{'▲ ' if hot else ''}{heat:.0f}{space}°C",
        ),
        ("power", bars.bar(bars.power(gpu)), "–" if power is None else f"{power:.0f}{limit}{space}W"),
    ]


def gpu_names(gpus: Sequence[GpuView]) -> str:
    """`8 × NVIDIA H200`."""
    return ", ".join(f"{many} × {name}" for name, many in Counter(gpu.name for gpu in gpus).items())


def _matches(node: NodeView, text: str, state: str) -> bool:
    if state and node.state != state:
        return False
    words = " ".join([node.name, *node.jobs, *(gpu.name for gpu in node.gpus)]).casefold()
    return all(part in words for part in text.split())


def _node_line(node: NodeView) -> Values:
    """A node of a large fleet: its GPUs as strips, with the figures that sum them up."""
    gpus = node.gpus
    loads = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    heats = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    hottest = max(heats, default=None)
    return {
        "node": node,
        "load": bars.strip([bars.utilization(gpu) for gpu in gpus]),
        "load_mean": sum(loads) / len(loads) / 100 if loads else None,
        "memory": bars.strip([bars.memory(gpu) for gpu in gpus]),
        "used": total(gpu.used_mib for gpu in gpus),
        "total": total(gpu.memory_mib for gpu in gpus),
        "hottest": hottest,
        "hot": hottest is not None and hottest >= bars.HOT_C,
        "power": total(gpu.power_w for gpu in gpus),
    }
