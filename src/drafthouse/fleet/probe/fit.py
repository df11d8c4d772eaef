"""Whether a job would fit a node; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from drafthouse.fleet.jobs import Job
from drafthouse.fleet.probe.peers import Reach
from drafthouse.fleet.probe.report import GIB, Gpu, Report

LEAST_PYTHON = "3.9"
S3_SKEW_S = 300.0
"""S3 refuses requests that are 15 minutes off (RequestTimeTooSkewed); a third of it leaves room for drift."""
HIDDEN_USE = 0.05
"""Of a GPU's memory: what driver and display take without any process is less."""


@dataclass(frozen=True)
class Finding:
    """What does not fit: `what` is concerned, what the node has, what the job needs, and what can be done."""

    what: str
    have: str
    need: str
    fix: str

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.have} where {self.need} is needed; {self.fix}"


def misfits(job: Job, report: Report, reaches: Sequence[Reach] = ()) -> list[Finding]:
    """Why `job` would not run on the node of `report`; empty when nothing speaks against it.

    Args:
        reaches: what was tried between the job's peers (`peers.of_job`).
    """
    checks = (_runtime, _gpus, _versions, _space, _clock)
    return [finding for check in checks for finding in check(job, report)] + list(_peers(job, report, reaches))


def _runtime(job: Job, report: Report) -> Iterator[Finding]:
    if job.image is None:
        if _version(report.python) < _version(LEAST_PYTHON):
            yield Finding("Python", report.python, f"{LEAST_PYTHON} or newer", "install a newer python3 on the node")
    elif report.engine is None:
        have = f"none ({report.reasons.get('engine', 'unknown')})"
        yield Finding("Docker Engine", have, "one", "install it (role container_engine), or use a job with `venv`")
    elif job.gpus and not report.engine.nvidia:
        have = f"{report.engine.version} without it"
        yield Finding("NVIDIA container toolkit", have, "it", "install it (role container_engine)")


def _gpus(job: Job, report: Report) -> Iterator[Finding]:
    if not job.gpus:
        return
    if report.gpus is None:
        have = f"unknown ({report.reasons.get('gpus', 'not told')})"
        yield Finding("GPUs", have, _wanted(job), "install the driver, or choose another node")
        return
    listed = sorted(report.gpus, key=lambda gpu: gpu.index)
    chosen, missing = _choose(job, listed)
    if missing:
        have = ", ".join(f"{gpu.index} {gpu.name}" for gpu in listed) or "none"
        yield Finding("GPUs", have, missing, "choose another node, or other GPUs")
    for gpu in chosen:
        yield from _one_gpu(job, report, gpu)


def _one_gpu(job: Job, report: Report, gpu: Gpu) -> Iterator[Finding]:
    strangers = [holder for holder in gpu.holders if holder.job != job.name]
    for holder in strangers:
        whose = f" of job {holder.job}" if holder.job else ""
        have = f"held by {holder.name} (pid {holder.pid}{whose})"
        yield Finding(f"GPU {gpu.index}", have, "a free one", "stop what runs there, or choose other GPUs")
    total, used = gpu.memory_mib, gpu.used_mib
    if total is None:
        return
    # Where processes are hidden (a rented container), ours can only be told by its being there.
    mine = job.name in report.jobs
    if not gpu.holders and not mine and used is not None and used > HIDDEN_USE * total:
        have = f"{used / 1024:.1f} GiB in use by processes that cannot be seen from there"
        yield Finding(f"GPU {gpu.index}", have, "a free one", "find out who uses it (nvidia-smi on its host)")
    need = job.needs.gpu_memory_gib
    if need is not None:
        others = sum(holder.memory_mib or 0 for holder in strangers)
        free = (total - others) / 1024
        if free < need:
            have = f"{free:.1f} GiB" + (f" of {total / 1024:.1f} GiB" if others else "")
            yield Finding(f"memory of GPU {gpu.index}", have, f"{need:g} GiB", "choose a larger GPU")


def _choose(job: Job, listed: list[Gpu]) -> tuple[list[Gpu], str]:
    """The GPUs that a runtime would give the job, and in words what it cannot give."""
    if isinstance(job.gpus, int):
        return listed[: job.gpus], _wanted(job) if len(listed) < job.gpus else ""
    by_name = {name: gpu for gpu in listed for name in (str(gpu.index), gpu.uuid)}
    # A part of a GPU (MIG) is in no list of GPUs: the engine or CUDA will tell.
    missing = [name for name in job.gpus if name not in by_name and not name.startswith("MIG-")]
    return [by_name[name] for name in job.gpus if name in by_name], ", ".join(missing)


def _wanted(job: Job) -> str:
    return str(job.gpus) if isinstance(job.gpus, int) else ", ".join(job.gpus)


def _versions(job: Job, report: Report) -> Iterator[Finding]:
    engine = report.engine.version if report.engine else None
    for what, part, have, need, fix in (
        ("NVIDIA driver", "driver", report.driver, job.needs.driver, "update it (role nvidia_driver)"),
        ("CUDA of the driver", "cuda", report.cuda, job.needs.cuda, "update the driver (role nvidia_driver)"),
        ("Python", "python", report.python, job.needs.python, "install a newer python3 on the node"),
        ("Docker Engine", "engine", engine, job.needs.engine, "update it (role container_engine)"),
    ):
        if need is None:
            continue
        if have is None:
            if part != "engine" or job.image is None:  # told already
                yield Finding(what, f"unknown ({report.reasons.get(part, 'not told')})", need, fix)
        elif _version(have) < _version(need):
            yield Finding(what, have, f"{need} or newer", fix)


def _space(job: Job, report: Report) -> Iterator[Finding]:
    needs, disk, shm, memory = job.needs, report.disk, report.shm, report.memory
    root = disk.path if disk else "the job folder"
    if disk is not None and not disk.writable:
        yield Finding(root, "not writable", "a writable folder", "set `job_root` of the node to another folder")
    # A container with its own /dev/shm does not use the node's.
    shm_need = None if job.image is not None and job.shm_gib is not None else needs.shm_gib
    free_disk, free_memory = disk.free_bytes if disk else None, memory.free_bytes if memory else None
    for what, part, have, need, fix in (
        (f"free disk at {root}", "disk", free_disk, needs.disk_gib, "free some space"),
        ("/dev/shm", "shm", shm.total_bytes if shm else None, shm_need, "enlarge it, or set `shm_gib`"),
        ("free memory", "memory", free_memory, needs.memory_gib, "stop what runs there"),
    ):
        if need is None:
            continue
        if have is None:
            yield Finding(what, f"unknown ({report.reasons.get(part, 'not told')})", f"{need:g} GiB", fix)
        elif have < need * GIB:
            yield Finding(what, f"{have / GIB:.1f} GiB", f"{need:g} GiB", fix)


def _clock(job: Job, report: Report) -> Iterator[Finding]:
    clock = report.clock
    if clock is None or job.store is None or not job.store.startswith("s3://"):
        return
    off = abs(clock.offset_s) - clock.bound_s
    if off > S3_SKEW_S:
        have = f"{clock.offset_s:+.0f} s off"
        yield Finding("clock", have, f"at most {S3_SKEW_S:.0f} s", "set it (chrony): S3 refuses requests that are off")


def _peers(job: Job, report: Report, reaches: Sequence[Reach]) -> Iterator[Finding]:
    tried: Callable[[str], bool] = {name for one in reaches for name in (one.source, one.target)}.__contains__
    for name, port in job.needs.peers.items():
        if name != report.node and not tried(name):
            yield Finding(f"{name}:{port}", "not tried", "a connection both ways", "try it with `fab probe --job`")
    for one in reaches:
        if not one.arrives:
            have = f"no connection ({one.reason})"
            fix = "open the port, join both by a VPN, or choose other nodes"
            yield Finding(f"{one.source} to {one.target}:{one.port}", have, "a connection", fix)


def _version(text: str) -> tuple[int, ...]:
    """ "580.126.09" -> (580, 126, 9); what is no number ends it ("20.10.24+dfsg1")."""
    numbers: list[int] = []
    for word in text.split("."):
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        if digits:
            numbers.append(int(digits))
        if digits != word:
            break
    return tuple(numbers)
