"""What the training device says of itself: memory, load, temperature, power."""

from __future__ import annotations

from collections.abc import Callable

import torch

GIB = 2**30


class Gauge:
    """Reads one device; what it cannot tell (a CPU, a machine without NVML) is left out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._readings: dict[str, Callable[[], float]] = {}
        if device.type == "cuda":
            cuda = torch.cuda
            self._readings = {
                "gpu_memory_gib": lambda: cuda.memory_allocated(device) / GIB,
                "gpu_memory_peak_gib": lambda: cuda.max_memory_allocated(device) / GIB,
                "gpu_utilization_percent": lambda: float(cuda.utilization(device)),
                "gpu_temperature_c": lambda: float(cuda.temperature(device)),
                "gpu_power_w": lambda: cuda.power_draw(device) / 1000,
            }

    def read(self) -> dict[str, float]:
        """One reading, by name with unit."""
        found: dict[str, float] = {}
        for name, reading in list(self._readings.items()):
            try:
                found[name] = reading()
            except Exception:  # NVML: the module, the library or the right to ask is missing; it will stay so
                del self._readings[name]
        return found
