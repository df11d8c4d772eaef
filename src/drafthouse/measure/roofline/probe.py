"""This node as the roofline needs it: GPUs, how they are linked, and what memory and arithmetic really reach.

`facts_of_node` reads nvidia-smi and sysfs, `hardware_of` decides from what was read, `hardware_from_probe` does both.
A PCI Express link negotiates a low generation while it is idle, so its generation is read while data moves over it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drafthouse.measure.machine import collect_machine
from drafthouse.measure.roofline import speed
from drafthouse.measure.roofline.errors import RooflineError
from drafthouse.measure.roofline.hardware import Figure, Hardware, Link, LinkKind, known_hardware, link_of, pcie_gb_s

if TYPE_CHECKING:
    import torch

QUERY = (
    "index",
    "name",
    "memory.total",
    "pci.bus_id",
    "pcie.link.gen.max",
    "pcie.link.gen.current",
    "pcie.link.width.max",
    "pcie.link.width.current",
)
_LOAD_SECONDS = 2.0
_NVLINK = re.compile(r"NV(\d+)")
# nvidia-smi's own legend, nearest first.
PATHS = {
    "PIX": "one PCI Express bridge between them",
    "PXB": "several PCI Express bridges between them",
    "PHB": "the host bridge of one CPU between them",
    "NODE": "host bridges of one NUMA node between them",
    "SYS": "the interconnect between NUMA nodes between them",
}


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as nvidia-smi and sysfs describe it; None is what they did not tell."""

    index: int
    name: str
    memory_mib: int | None
    bus_id: str
    generation_max: int | None
    generation_now: int | None
    width_max: int | None
    width_now: int | None
    numa_node: int | None = None


@dataclass(frozen=True)
class Speeds:
    """Measured rates: GB/s and TFLOP/s, by type of number."""

    bandwidth_gb_s: float
    tflops: dict[str, float]
    how: str
    host_link_gb_s: float | None = None


@dataclass(frozen=True)
class NodeFacts:
    """GPUs as found idle and as found while data moved, and what lies between each pair (nvidia-smi's word)."""

    gpus: tuple[GpuFacts, ...]
    paths: dict[tuple[int, int], str] = field(default_factory=dict)
    under_load: tuple[GpuFacts, ...] = ()


def hardware_from_probe() -> Hardware:
    """The first GPU of this node with its measured rates and its link to the others; the CPU where there is none.

    Takes some seconds: memory is read and matrices are multiplied.

    Raises:
        RooflineError: nvidia-smi lists GPUs but torch cannot use them, so that nothing can be measured.
    """
    import torch

    idle = _query()
    if not idle:
        return cpu_hardware()
    if not torch.cuda.is_available():
        raise RooflineError(
            f"nvidia-smi lists {len(idle)} GPUs but torch can use none",
            where="--hardware probe",
            fix=f"install a CUDA build of torch, or name the entry: {', '.join(known_hardware())}",
        )
    device = torch.device("cuda", 0)
    under_load, host_link = _while_busy(device)
    tflops = {
        "bfloat16": speed.matmul_tflops(device, torch.bfloat16),
        "float32": speed.matmul_tflops(device, torch.float32),
    }
    bandwidth = max(speed.read_gb_s(device), speed.copy_gb_s(device))
    speeds = Speeds(bandwidth, tflops, "measured on this node with torch", host_link)
    return hardware_of(NodeFacts(idle, parse_topology(_smi("topo", "-m")), under_load), speeds)


def cpu_hardware() -> Hardware:
    """This machine's CPU: its reading rate and its matrix products, with as many threads as torch uses."""
    import torch

    device = torch.device("cpu")
    how = f"measured on this node with torch, {torch.get_num_threads()} threads"
    machine = collect_machine()
    memory = machine["memory_total_bytes"]
    wide = speed.matmul_tflops(device, torch.float32)
    # A CPU without bfloat16 units widens the numbers as it reads them; torch's own fallback is far slower than that.
    tflops = {"bfloat16": max(wide, speed.matmul_tflops(device, torch.bfloat16)), "float32": wide}
    return Hardware(
        name="cpu",
        title=str(machine["cpu_model"] or "CPU"),
        memory_gb=Figure(value=memory / 1e9, source="/proc/meminfo") if memory else None,
        bandwidth_gb_s=Figure(value=speed.read_gb_s(device), source=how),
        tflops={kind: Figure(value=value, source=how) for kind, value in tflops.items()},
        notes=("Measured, not from a data sheet: the bound is what this CPU reaches now, beside all else it does.",),
    )


def hardware_of(facts: NodeFacts, speeds: Speeds) -> Hardware:
    """The entry that a node's facts make: measured rates, the link to the second GPU, what a reader must know.

    Raises:
        RooflineError: no GPU among the facts.
    """
    if not facts.gpus:
        raise RooflineError("no GPU was found", where="nvidia-smi", fix="name the hardware instead of probing it")
    first = facts.gpus[0]
    listed = next((e for e in known_hardware().values() if first.name in e.reported_as), None)
    measured = Figure(value=speeds.bandwidth_gb_s, source=speeds.how)
    rates = dict(listed.tflops) if listed else {}
    rates |= {kind: Figure(value=value, source=speeds.how) for kind, value in speeds.tflops.items()}
    if listed and "fp8" in rates:
        # Only what was measured is this node's; the others keep the data sheet's relation to bfloat16.
        scale = rates["bfloat16"].value / listed.tflops["bfloat16"].value
        for kind in set(rates) - set(speeds.tflops):
            figure = rates[kind]
            rates[kind] = Figure(value=figure.value * scale, source=f"{figure.source}, scaled as bfloat16 was measured")
    link, notes = _link(facts, listed)
    if listed:
        sheet = listed.bandwidth_gb_s.value
        notes.append(f"Memory reads at {measured.value:.0f} GB/s, {measured.value / sheet:.0%} of the data sheet.")
    if speeds.host_link_gb_s:
        notes.append(f"Pinned host memory reaches the GPU at {speeds.host_link_gb_s:.1f} GB/s.")
    if len({gpu.name for gpu in facts.gpus}) > 1:
        kinds = ", ".join(sorted({gpu.name for gpu in facts.gpus}))
        notes.append(f"The GPUs differ ({kinds}); the figures are those of GPU {first.index}.")
    return Hardware(
        name=listed.name if listed else "probed",
        title=listed.title if listed else first.name,
        reported_as=(first.name,),
        memory_gb=Figure(value=first.memory_mib * 2**20 / 1e9, source="nvidia-smi") if first.memory_mib else None,
        bandwidth_gb_s=measured,
        tflops=rates,
        links={link.kind: link} if link else {},
        link=link.kind if link else None,
        notes=tuple(notes),
    )


def parse_gpus(text: str) -> tuple[GpuFacts, ...]:
    """GPUs in what nvidia-smi prints for `QUERY` as CSV without header and units; "[N/A]" becomes None."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY) and cells[0].isdecimal():
            numbers = [int(cell) if cell.isdecimal() else None for cell in (cells[2], *cells[4:])]
            found.append(GpuFacts(int(cells[0]), cells[1], numbers[0], cells[3], *numbers[1:]))
    return tuple(found)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """What lies between each pair of GPUs in the matrix of `nvidia-smi topo -m`: "NV12", "PIX", … "SYS"."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the header is underlined
    lines = [line.split() for line in plain.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and line[1:2] != ["X"]), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    paths = {}
    for line in lines:
        if line and re.fullmatch(r"GPU\d+", line[0]) and line is not header:
            row = int(line[0][3:])
            for column, word in zip(columns, line[1:], strict=False):
                if row != column:
                    paths[row, column] = word
    return paths


def _link(facts: NodeFacts, listed: Hardware | None) -> tuple[Link | None, list[str]]:
    """How the first two GPUs reach each other; None for a single one."""
    notes = []
    first = (facts.under_load or facts.gpus)[0]
    if facts.under_load and facts.gpus[0].generation_now != first.generation_now:
        notes.append(
            f"PCI Express generation {facts.gpus[0].generation_now} while idle, {first.generation_now} under load."
        )
    if len(facts.gpus) < 2:
        return None, notes
    pair = facts.gpus[0].index, facts.gpus[1].index
    path = facts.paths.get(pair, "")
    nodes = [gpu.numa_node for gpu in facts.gpus[:2]]
    if between := PATHS.get(path):
        where = f", NUMA nodes {nodes[0]} and {nodes[1]}" if None not in nodes else ""
        notes.append(f"GPU {pair[0]} and GPU {pair[1]} have {between} ({path}{where}).")
    if nvlinks := _NVLINK.fullmatch(path):
        notes.append(f"GPU {pair[0]} and GPU {pair[1]} share {nvlinks[1]} NVLinks.")
        if listed and "nvlink" in listed.links:
            return listed.links["nvlink"], notes
    kind: LinkKind = "pcie"
    generation = first.generation_now if facts.under_load else first.generation_max
    width = first.width_now if facts.under_load else first.width_max
    if generation is None or width is None:
        return listed.links.get(kind) if listed else None, notes
    if first.generation_max and generation < first.generation_max:
        notes.append(f"The link could be of generation {first.generation_max}: check riser, slot and firmware.")
    state = "under load" if facts.under_load else "at most"
    source = f"nvidia-smi: PCI Express {generation}.0 x{width} {state}"
    return link_of(kind, Figure(value=pcie_gb_s(generation, width), source=source)), notes


def _while_busy(device: torch.device) -> tuple[tuple[GpuFacts, ...], float | None]:
    """What nvidia-smi says while host memory is copied to the GPU, and how fast the copies were."""
    rates: list[float] = []
    copying = threading.Thread(target=lambda: rates.append(speed.keep_link_busy(device, _LOAD_SECONDS)), daemon=True)
    copying.start()
    copying.join(_LOAD_SECONDS / 4)  # pinning memory comes first
    busy = _query()
    copying.join()
    return busy, rates[0] if rates else None


def _query() -> tuple[GpuFacts, ...]:
    found = parse_gpus(_smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"))
    return tuple(
        GpuFacts(**{**vars(gpu), "numa_node": _numa_node(gpu.bus_id, Path("/sys/bus/pci/devices"))}) for gpu in found
    )


def _numa_node(bus_id: str, devices: Path) -> int | None:
    """Of a PCI device; nvidia-smi writes eight digits of the domain, sysfs four. None on machines with one node."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((devices / f"{domain[-4:]}:{rest}" / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _smi(*words: str) -> str:
    """What nvidia-smi prints; nothing where it is not installed or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
