"""What NVIDIA's management library says of the GPUs of this machine (nvidia-ml-py).

Without the driver's library there is nothing to read, and that is no error.
https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MIB = 2**20
_lock = threading.Lock()
_library: Any = None


@dataclass(frozen=True)
class GpuReading:
    """One GPU now. None is what it does not tell (an instance of a split GPU knows no load of its own)."""

    index: int | None
    uuid: str
    name: str
    memory_mib: float | None
    used_mib: float | None
    utilization_percent: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_gpus() -> list[GpuReading]:
    """All GPUs of this machine, by index."""
    nvml = _nvml()
    if nvml is None:
        return []
    count = _told(nvml, nvml.nvmlDeviceGetCount) or 0
    handles = [_told(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    return [_reading(nvml, handle) for handle in handles if handle is not None]


def read_gpu(uuid: str) -> GpuReading | None:
    """The GPU with this UUID ("GPU-…", or "MIG-…" of an instance); None when nobody can tell."""
    nvml = _nvml()
    handle = None if nvml is None else _told(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid)
    return None if handle is None else _reading(nvml, handle)


def uuid_of(device: torch.device) -> str | None:
    """The UUID of a CUDA device as NVML knows it, whatever CUDA_VISIBLE_DEVICES says; None of other devices."""
    if device.type != "cuda":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _reading(nvml: Any, handle: Any) -> GpuReading:
    def told(read: Callable[..., Any], *more: Any) -> Any:
        return _told(nvml, read, handle, *more)

    memory = told(nvml.nvmlDeviceGetMemoryInfo)
    load = told(nvml.nvmlDeviceGetUtilizationRates)
    power, limit = told(nvml.nvmlDeviceGetPowerUsage), told(nvml.nvmlDeviceGetEnforcedPowerLimit)
    degrees = told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    return GpuReading(
        index=told(nvml.nvmlDeviceGetIndex),
        uuid=told(nvml.nvmlDeviceGetUUID) or "",
        name=told(nvml.nvmlDeviceGetName) or "unknown",
        memory_mib=None if memory is None else memory.total / _MIB,
        used_mib=None if memory is None else memory.used / _MIB,
        utilization_percent=None if load is None else float(load.gpu),
        temperature_c=None if degrees is None else float(degrees),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
    )


def _told(nvml: Any, read: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return None


def _nvml() -> Any:
    """The library, opened once for the process; None when it is not there."""
    global _library
    with _lock:
        if _library is None:
            try:
                found: Any = importlib.import_module("pynvml")
            except ImportError:
                return None
            try:
                found.nvmlInit()
            except found.NVMLError:
                return None  # no driver yet: asked again the next time
            _library = found
        return _library
