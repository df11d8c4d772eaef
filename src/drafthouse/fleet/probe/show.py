"""Reports of nodes for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from drafthouse.fleet.probe.report import GIB, Gpu, Report

_COLUMNS = ("node", "GPUs", "driver / CUDA", "cores", "free memory", "free disk", "/dev/shm", "runs", "clock")
_CLOCK_S = 1.0


def table(found: Mapping[str, Report | Exception], unfit: Mapping[str, Sequence[str]] | None = None) -> RenderableType:
    """All nodes in one table, and below it what is wrong with which.

    Args:
        unfit: node -> why a job would not fit it.
    """
    nodes = Table(*_COLUMNS, title="nodes", title_justify="left")
    below: list[RenderableType] = []
    for name, report in found.items():
        if isinstance(report, Report):
            nodes.add_row(escape(name), *_cells(report))
            below += [f"[dim]{escape(name)}: {part}: {escape(reason)}[/]" for part, reason in report.reasons.items()]
        else:
            nodes.add_row(escape(name), "[red]no answer[/]")
            below.append(f"[red]{escape(name)}[/]: {escape(str(report))}")
    for name, sentences in (unfit or {}).items():
        below += [f"[red]{escape(name)}[/]: {escape(sentence)}" for sentence in sentences]
        if not sentences:
            below.append(f"[green]{escape(name)}[/]: the job would fit")
    return Group(nodes, *below)


def _cells(report: Report) -> list[str]:
    engine = f"docker {report.engine.version}" if report.engine else "processes"
    return [
        escape(_gpus(report)),
        f"{report.driver or '–'} / {report.cuda or '–'}",
        _cores(report),
        _gib(report.memory.free_bytes if report.memory else None),
        _gib(report.disk.free_bytes if report.disk else None),
        _gib(report.shm.total_bytes if report.shm else None),
        escape(f"{engine}, {'systemd' if report.systemd else 'no systemd'}"),
        _clock(report),
    ]


def _gpus(report: Report) -> str:
    """One line a GPU, and what lies between them."""
    lines = [_gpu(gpu) for gpu in report.gpus or ()]
    words = set(report.paths.values())
    if len(words) == 1:
        lines.append(f"all pairs {words.pop()}")
    else:
        lines += [f"{pair} {word}" for pair, word in report.paths.items()]
    return "\n".join(lines) or "none"


def _gpu(gpu: Gpu) -> str:
    used = f"{gpu.used_mib / 1024:.0f}" if gpu.used_mib is not None else "?"
    total = f"{gpu.memory_mib / 1024:.0f}" if gpu.memory_mib is not None else "?"
    told = [(gpu.temperature_c, "°C"), (gpu.power_w, " W"), (gpu.utilization_percent, " %")]
    rest = "".join(f", {value:.0f}{unit}" for value, unit in told if value is not None)
    held = "".join(f", {holder.job or holder.name}" for holder in gpu.holders)
    return f"{gpu.index} {gpu.name} {used}/{total} GiB{rest}{held}"


def _cores(report: Report) -> str:
    if report.cpu is None:
        return "–"
    quota = report.cpu.quota_cores
    return f"{report.cpu.cores}" if quota is None else f"{min(quota, report.cpu.cores):g}"


def _gib(value: int | None) -> str:
    return "–" if value is None else f"{value / GIB:.1f} GiB"


def _clock(report: Report) -> str:
    if report.clock is None:
        return "–"
    text = f"{report.clock.offset_s:+.2f} ± {report.clock.bound_s:.2f} s"
    return text if abs(report.clock.offset_s) <= report.clock.bound_s + _CLOCK_S else f"[yellow]{text}[/]"
