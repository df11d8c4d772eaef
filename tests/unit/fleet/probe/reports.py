"""Reports and jobs to judge."""

from __future__ import annotations

from typing import Any

from drafthouse.fleet.jobs import Job
from drafthouse.fleet.probe.report import GIB, Clock, Cpu, Disk, Engine, Gpu, Holder, Memory, Report

DIGEST = "sha256:" + "0" * 64


def gpu(index: int = 0, *holders: Holder, total: int | None = 49140, used: int | None = 300) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA RTX A6000",
        bus_id=f"00000000:0{index}:00.0",
        memory_mib=total,
        used_mib=used,
        utilization_percent=0,
        temperature_c=31,
        power_w=21.5,
        pcie_generation=1,
        pcie_generation_max=4,
        pcie_width=16,
        pcie_width_max=16,
        holders=holders,
    )


def holder(job: str | None = None, memory: int | None = 30000) -> Holder:
    return Holder(pid=4711, name="python", memory_mib=memory, job=job)


def disk(path: str, gib: float, writable: bool = True) -> Disk:
    size = int(gib * GIB)
    return Disk(path=path, total_bytes=size, free_bytes=size, free_inodes=1000, writable=writable)


def report(**changes: Any) -> Report:
    """A node that lacks nothing."""
    values: dict[str, Any] = {
        "node": "new",
        "hostname": "new",
        "os": "Debian GNU/Linux 12",
        "kernel": "6.1.0",
        "architecture": "x86_64",
        "python": "3.11.2",
        "systemd": True,
        "cpu": Cpu(cores=16, quota_cores=None, load_1min=0.2, model="EPYC"),
        "memory": Memory(total_bytes=128 * GIB, available_bytes=120 * GIB, limit_bytes=None),
        "gpus": (gpu(0), gpu(1)),
        "driver": "580.126.09",
        "cuda": "13.0",
        "paths": {"0-1": "NV4"},
        "disk": disk("/srv/drafthouse", 500),
        "shm": disk("/dev/shm", 64),
        "engine": Engine(version="24.0.5", nvidia=True, root="/var/lib/docker", free_bytes=100 * GIB),
        "clock": Clock(offset_s=0.01, bound_s=0.02),
        "jobs": (),
        "reasons": {},
    }
    return Report(**{**values, **changes})


def job(**changes: Any) -> Job:
    """A training job that asks for much, in a container."""
    values: dict[str, Any] = {
        "name": "a",
        "kind": "command",
        "image": DIGEST,
        "command": ["true"],
        "gpus": 2,
        "store": "s3://bucket/fleet",
        "needs": {
            "disk_gib": 100,
            "shm_gib": 16,
            "memory_gib": 64,
            "gpu_memory_gib": 40,
            "driver": "580.65",
            "cuda": "12.8",
            "python": "3.9",
            "engine": "20.10",
        },
    }
    changed = {**values, **changes}
    return Job.model_validate({key: value for key, value in changed.items() if value is not None})
