"""Says what this machine is, as JSON. Sent to a node on standard input: standard library of Python 3.9 only.

    python3 - JOB_ROOT LIMIT_S < program.py

A part that cannot be told is null and has its reason in `reasons`; programs that hang are left alone after LIMIT_S
seconds (a process in uninterruptible sleep, as nvidia-smi with a broken driver, does not die of SIGKILL either).
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable  # noqa: UP035 - Python 3.9

GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "pcie.link.gen.max",
    "pcie.link.gen.current",
    "pcie.link.width.max",
    "pcie.link.width.current",
    "driver_version",
)
HOLDER_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
CSV = "--format=csv,noheader,nounits"
PROGRAMS = {
    "gpus": ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", CSV],
    "holders": ["nvidia-smi", f"--query-compute-apps={','.join(HOLDER_FIELDS)}", CSV],
    "topology": ["nvidia-smi", "topo", "-m"],
    "engine": ["docker", "info", "--format", "{{json .}}"],
}


class UnknownError(Exception):
    """Why a part cannot be told."""


class Program:
    """A program that runs beside the others."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process: subprocess.Popen[bytes] | None = None
        if shutil.which(argv[0]):
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err, start_new_session=True
            )

    def output(self, end: float) -> str:
        """What it printed.

        Raises:
            UnknownError: it is not there, failed, or has not ended by `end` (monotonic seconds).
        """
        name = self.argv[0]
        if self.process is None:
            raise UnknownError(f"{name} is not installed")
        while self.process.poll() is None:
            if time.monotonic() > end:
                raise UnknownError(f"{name} does not answer")
            time.sleep(0.01)
        if self.process.returncode:
            said = " ".join((self._text(self.err) or self._text(self.out)).split())
            raise UnknownError(f"{name} failed with {self.process.returncode}: {said[:300]}")
        return self._text(self.out)

    def kill(self) -> None:
        """End it, if it has not ended; not waited for."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _text(self, file: Any) -> str:
        file.seek(0)
        return str(file.read().decode(errors="replace"))


def number(text: str) -> Any:
    """An int or float in a cell of nvidia-smi; None for "[N/A]" and its like."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return None


def rows(output: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Lines of a CSV query. A name may hold a comma only in the one text field, which is never the last."""
    found = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(fields):
            found.append({field: cells[place] for place, field in enumerate(fields)})
    return found


def gpus(output: str, holders: str) -> list[dict[str, Any]]:
    held: dict[str, list[dict[str, Any]]] = {}
    for row in rows(holders, HOLDER_FIELDS):
        pid = number(row["pid"])
        holder = {"pid": pid, "name": row["process_name"], "memory_mib": number(row["used_memory"])}
        held.setdefault(row["gpu_uuid"], []).append({**holder, "job": job_of(pid)})
    return [
        {
            "index": number(row["index"]),
            "uuid": row["uuid"],
            "name": row["name"],
            "bus_id": row["pci.bus_id"],
            "memory_mib": number(row["memory.total"]),
            "used_mib": number(row["memory.used"]),
            "utilization_percent": number(row["utilization.gpu"]),
            "temperature_c": number(row["temperature.gpu"]),
            "power_w": number(row["power.draw"]),
            "pcie_generation": number(row["pcie.link.gen.current"]),
            "pcie_generation_max": number(row["pcie.link.gen.max"]),
            "pcie_width": number(row["pcie.link.width.current"]),
            "pcie_width_max": number(row["pcie.link.width.max"]),
            "holders": held.get(row["uuid"], []),
        }
        for row in rows(output, GPU_FIELDS)
    ]


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def job_of(pid: Any) -> Any:
    """Which of our jobs a process belongs to, by its environment (proc(5)); None for others."""
    try:
        words = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = [word[len(b"DRAFTHOUSE_JOB=") :] for word in words if word.startswith(b"DRAFTHOUSE_JOB=")]
    return found[0].decode(errors="replace") if found else None


def driver(output: str) -> str:
    """Version of the kernel's driver, or else what nvidia-smi says."""
    text = read("/proc/driver/nvidia/version") or ""
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    listed = [row["driver_version"] for row in rows(output, GPU_FIELDS)]
    if match is None and not listed:
        raise UnknownError("no NVIDIA driver is loaded")
    return match[1] if match else listed[0]


def cuda() -> str:
    """Newest CUDA that the driver's libcuda can run (cuDriverGetVersion)."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            raise UnknownError("libcuda does not tell its version")
    except (OSError, AttributeError) as error:
        raise UnknownError(f"libcuda cannot be loaded ({error})") from None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def engine(output: str) -> dict[str, Any]:
    info = json.loads(output)
    if not info.get("ServerVersion"):
        raise UnknownError("; ".join(info.get("ServerErrors") or ["no Docker Engine answers"]))
    return {
        "version": info["ServerVersion"],
        "nvidia": "nvidia" in (info.get("Runtimes") or {}) or bool(info.get("DiscoveredDevices")),
        "root": info.get("DockerRootDir"),
        "free_bytes": free(info.get("DockerRootDir")),
    }


def free(path: Any) -> Any:
    try:
        return shutil.disk_usage(path).free
    except (OSError, TypeError):
        return None


def disk(path: str) -> dict[str, Any]:
    """The file system that `path` lies on, or would lie on."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    usage = os.statvfs(place)
    writable = os.access(place, os.W_OK) and not usage.f_flag & os.ST_RDONLY
    return {
        "path": path,
        "total_bytes": usage.f_blocks * usage.f_frsize,
        "free_bytes": usage.f_bavail * usage.f_frsize,
        "free_inodes": usage.f_favail if usage.f_files else None,  # some file systems have no fixed number
        "writable": writable,
    }


def memory() -> dict[str, Any]:
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", read("/proc/meminfo") or "", re.MULTILINE))
    limits = [read(f"/sys/fs/cgroup/{name}") for name in ("memory.max", "memory/memory.limit_in_bytes")]
    numbers = [int(text) for text in limits if text and text.strip().isdigit()]
    total = int(found["MemTotal"]) * 1024
    return {
        "total_bytes": total,
        "available_bytes": int(found["MemAvailable"]) * 1024,
        # Version 1 of control groups says "no limit" by a very large number.
        "limit_bytes": min((limit for limit in numbers if limit < total), default=None),
    }


def cpu() -> dict[str, Any]:
    quota = re.fullmatch(r"(\d+) (\d+)", (read("/sys/fs/cgroup/cpu.max") or "").strip())
    old = [read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    limit = [quota[1], quota[2]] if quota else old
    numbers = [int(text) for text in limit if text.strip().isdigit()]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "quota_cores": numbers[0] / numbers[1] if len(numbers) == 2 else None,
        "load_1min": os.getloadavg()[0],
        "model": (re.findall(r"^model name\s*:\s*(.+)$", read("/proc/cpuinfo") or "", re.MULTILINE) or [None])[0],
    }


def os_name() -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', read("/etc/os-release") or "", re.MULTILINE)
    return match[1] if match else platform.system()


def read(path: str) -> Any:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def collect(job_root: str, limit_s: float) -> dict[str, Any]:
    end = time.monotonic() + limit_s
    running = {name: Program(argv) for name, argv in PROGRAMS.items()}
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def part(name: str, tell: Callable[[], Any]) -> None:
        try:
            found[name] = tell()
        except (UnknownError, OSError, ValueError, KeyError) as error:
            found[name], reasons[name] = None, str(error)

    def said(name: str) -> str:
        return running[name].output(end)

    part("cpu", cpu)
    part("memory", memory)
    part("disk", lambda: disk(job_root))
    part("shm", lambda: disk("/dev/shm"))
    part("cuda", cuda)
    part("holders", lambda: said("holders"))
    part("gpus", lambda: gpus(said("gpus"), found["holders"] or ""))
    part("driver", lambda: driver(said("gpus") if found["gpus"] else ""))
    part("topology", lambda: said("topology") if len(found["gpus"] or []) > 1 else "")
    part("engine", lambda: engine(said("engine")))
    for program in running.values():
        program.kill()
    del found["holders"]  # they stand beside the GPUs
    if found["gpus"] is None:
        reasons.pop("holders", None)
    return {
        **found,
        "reasons": reasons,
        "hostname": platform.node(),
        "os": os_name(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "systemd": Path("/run/systemd/system").is_dir(),
        "jobs": sorted({job for job in map(job_of, processes()) if job}),
    }


if __name__ == "__main__":
    print(json.dumps(collect(sys.argv[1], float(sys.argv[2]))))
