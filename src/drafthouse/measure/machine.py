"""What machine a result was made on, as a plain dict whose keys carry their units.

Read it before the work starts: the load average is meant to say how quiet the machine was then. Nothing that
names the machine or its owner is collected (no host name, no user, no path, no serial number).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "obstore",
    "pydantic",
    "matplotlib",
    "jinja2",
)

SMI_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


def collect_machine() -> dict[str, Any]:
    """CPU, memory, load, system, Python, package versions and GPUs of this machine.

    What cannot be known here (no `/proc`, no load average on Windows, no memory limit) is `None`, never
    guessed; without GPUs `gpus` is an empty list. Packages that are not installed are absent from `versions`.

    Returns:
        `cpu_model`, `architecture`, `cpu_cores_logical`, `cpu_cores_usable` (affinity of this process),
        `cpu_quota_cores` and `memory_limit_bytes` (control group of a container), `memory_total_bytes`,
        `memory_available_bytes`, `load_average_1min` / `_5min` / `_15min` (runnable tasks), `os`, `kernel`,
        `python`, `versions` {package: version}, `gpus` [{`name`, `memory_bytes`, `driver`}].
    """
    memory = memory_bytes(_read("/proc/meminfo"))
    load = _load_average()
    return {
        "cpu_model": cpu_model(_read("/proc/cpuinfo")) or _cpu_model_elsewhere(),
        "architecture": platform.machine() or None,
        "cpu_cores_logical": os.cpu_count(),
        "cpu_cores_usable": _usable_cores(),
        "cpu_quota_cores": cpu_quota_cores(_read("/sys/fs/cgroup/cpu.max")),
        "memory_total_bytes": memory.get("MemTotal", _physical_memory_bytes()),
        "memory_available_bytes": memory.get("MemAvailable"),
        "memory_limit_bytes": memory_limit_bytes(_read("/sys/fs/cgroup/memory.max")),
        "load_average_1min": load[0],
        "load_average_5min": load[1],
        "load_average_15min": load[2],
        "os": _os_name(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": package_versions(PACKAGES),
        "gpus": _gpus(),
    }


def cpu_model(cpuinfo: str) -> str | None:
    """Model name in the text of `/proc/cpuinfo`; None where it has none (many ARM machines)."""
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(\S.*)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else None


def memory_bytes(meminfo: str) -> dict[str, int]:
    """The lines of `/proc/meminfo` in bytes (the kernel writes KiB and calls them kB)."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in found}


def cpu_quota_cores(cpu_max: str) -> float | None:
    """Cores that a control group may use, from `cpu.max` ("200000 100000" → 2.0, "max 100000" → None)."""
    match = re.fullmatch(r"(\d+)\s+(\d+)", cpu_max.strip())
    return int(match[1]) / int(match[2]) if match and int(match[2]) else None


def memory_limit_bytes(memory_max: str) -> int | None:
    """Memory limit of a control group, from `memory.max` ("max" → None)."""
    text = memory_max.strip()
    return int(text) if text.isdecimal() else None


def gpus_of_smi(output: str) -> list[dict[str, Any]]:
    """GPUs in what `nvidia-smi` prints for `SMI_QUERY`.

    Memory is MiB there; "[N/A]" (unified-memory boards) becomes None.
    """
    gpus = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.rsplit(",", 2)]
        if len(cells) == 3:
            name, mebibytes, driver = cells
            memory = int(mebibytes) * 1024**2 if mebibytes.isdecimal() else None
            gpus.append({"name": name, "memory_bytes": memory, "driver": driver})
    return gpus


def package_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions by distribution metadata: nothing is imported for it."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> list[dict[str, Any]]:
    smi = _output("nvidia-smi", *SMI_QUERY)
    if gpus := gpus_of_smi(smi):
        return gpus
    # a container may see the devices without the tool; the driver itself still names them
    texts = [_read(str(path)) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    names = [match[1].strip() for text in texts if (match := re.search(r"^Model:\s*(\S.*)$", text, re.MULTILINE))]
    return [{"name": name, "memory_bytes": None, "driver": None} for name in names]


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        mac = platform.mac_ver()[0]
        return f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"


def _cpu_model_elsewhere() -> str | None:
    return _output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.processor() or None


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _physical_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _load_average() -> tuple[float, float, float] | tuple[None, None, None]:
    try:
        return os.getloadavg()
    except (AttributeError, OSError):
        return None, None, None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return ""
    try:
        # a driver that hangs must not hang a report: it is a line in it, not its purpose
        result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""
