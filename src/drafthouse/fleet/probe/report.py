"""What a node said of itself, typed. None is what it could not tell; `reasons` says why."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

GIB = 2**30


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Holder(_Part):
    """A process that computes on a GPU. `job`: the one of ours that it belongs to."""

    pid: int | None
    name: str
    memory_mib: int | None
    job: str | None


class Gpu(_Part):
    """One GPU as nvidia-smi describes it."""

    index: int
    uuid: str
    name: str
    bus_id: str
    memory_mib: int | None
    used_mib: int | None
    utilization_percent: int | None
    temperature_c: int | None
    power_w: float | None
    pcie_generation: int | None
    pcie_generation_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    holders: tuple[Holder, ...]


class Cpu(_Part):
    """`cores` that this account may use, `quota_cores` of a container's control group."""

    cores: int
    quota_cores: float | None
    load_1min: float
    model: str | None


class Memory(_Part):
    """Main memory; `limit_bytes` of a container's control group."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None

    @property
    def free_bytes(self) -> int:
        """What a job may hope for."""
        return self.available_bytes if self.limit_bytes is None else min(self.available_bytes, self.limit_bytes)


class Disk(_Part):
    """The file system on which `path` lies, or will lie."""

    path: str
    total_bytes: int
    free_bytes: int
    free_inodes: int | None
    writable: bool


class Engine(_Part):
    """The Docker Engine; `nvidia`: whether containers can be given GPUs."""

    version: str
    nvidia: bool
    root: str | None
    free_bytes: int | None


class Clock(_Part):
    """The node's clock minus this machine's, known to within `bound_s` (half of the round trip)."""

    offset_s: float
    bound_s: float


class Report(_Part):
    """One node.

    Attributes:
        node: its name in the inventory.
        driver, cuda: version of the NVIDIA driver, and the newest CUDA that it runs.
        paths: what lies between two GPUs in the words of `nvidia-smi topo -m`, by their indices ("0-1": "NV4").
        disk: where the job folders are.
        systemd: whether it is pid 1.
        jobs: those of ours that have processes there.
        reasons: part -> why it is None.
    """

    node: str
    hostname: str
    os: str
    kernel: str
    architecture: str
    python: str
    systemd: bool
    cpu: Cpu | None
    memory: Memory | None
    gpus: tuple[Gpu, ...] | None
    driver: str | None
    cuda: str | None
    paths: dict[str, str]
    disk: Disk | None
    shm: Disk | None
    engine: Engine | None
    clock: Clock | None
    jobs: tuple[str, ...]
    reasons: dict[str, str]
