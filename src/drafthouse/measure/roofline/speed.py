"""What this machine's memory, arithmetic and PCI Express link really reach, measured with torch in a second or two.

Decoding reads weights once in long streams, so the reading rate is what counts; a reduction over a buffer that no
cache can hold is such a stream. The best of several rounds is taken: a rate is meant, not an average of what else the
machine did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIB = 1024**2
_CPU_BUFFER = 256 * MIB
_GPU_BUFFER = 2048 * MIB
_ROUNDS = 8
_ROUND_SECONDS = 0.5


def read_gb_s(device: torch.device, buffer_bytes: int | None = None) -> float:
    """GB/s at which a buffer in the device's memory is read (float32 sum).

    Args:
        buffer_bytes: at least some times the last-level cache; by default 256 MiB on a CPU, 2 GiB on a GPU.
    """
    import torch

    wanted = buffer_bytes or (_GPU_BUFFER if device.type == "cuda" else _CPU_BUFFER)
    buffer = torch.ones(wanted // 4, dtype=torch.float32, device=device)
    return buffer.numel() * 4 / _best_seconds(buffer.sum, device) / 1e9


def copy_gb_s(device: torch.device, buffer_bytes: int | None = None) -> float:
    """GB/s of a copy within the device's memory, bytes read and bytes written both counted."""
    import torch

    wanted = buffer_bytes or (_GPU_BUFFER if device.type == "cuda" else _CPU_BUFFER)
    source = torch.ones(wanted // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _best_seconds(lambda: target.copy_(source), device) / 1e9


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """TFLOP/s of a square matrix product; `size` is 8192 on a GPU and 512 on a CPU by default."""
    import torch

    side = size or (8192 if device.type == "cuda" else 512)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / _best_seconds(lambda: left @ right, device) / 1e12


def keep_link_busy(device: torch.device, seconds: float) -> float:
    """Copy pinned host memory to a GPU for so long; GB/s of the best copy. The link leaves its idle state for it."""
    import torch

    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        took = _seconds(lambda: target.copy_(host, non_blocking=True), device)
        best = max(best, host.numel() / took / 1e9)
    return best


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of some rounds; at least one, and none after half a second."""
    work()  # the first call allocates and chooses its kernel
    best, end = float("inf"), time.monotonic() + _ROUND_SECONDS
    for _ in range(_ROUNDS):
        best = min(best, _seconds(work, device))
        if time.monotonic() > end:
            break
    return best


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, its work on the GPU included; buffers are so large that a launch's microseconds do not count."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return max(time.perf_counter() - began, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
