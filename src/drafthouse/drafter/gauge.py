"""What the training device says of itself: memory, load, temperature, power."""

from __future__ import annotations

import torch

from drafthouse.gpu import read_gpu, uuid_of

GIB = 2**30


class Gauge:
    """Reads one device; what it cannot tell (a CPU, a machine without NVML) is left out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._uuid = uuid_of(device)

    def read(self) -> dict[str, float]:
        """One reading, by name with unit."""
        if self._uuid is None:
            return {}
        found: dict[str, float | None] = {
            "gpu_memory_gib": torch.cuda.memory_allocated(self.device) / GIB,
            "gpu_memory_peak_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
        }
        told = read_gpu(self._uuid)
        if told is not None:
            found |= {
                "gpu_utilization_percent": told.utilization_percent,
                "gpu_temperature_c": told.temperature_c,
                "gpu_power_w": told.power_w,
            }
        return {name: value for name, value in found.items() if value is not None}
