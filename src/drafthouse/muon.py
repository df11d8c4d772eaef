"""Muon for hidden matrices (Jordan et al., 2024): torch's own, made usable on CPUs.

The small target and the drafters train with it; it stands here because neither room may import the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Muon):
    """torch's Muon, orthogonalising in float32 on a CPU.

    The library's Newton-Schulz iteration runs in bfloat16, which on CPUs without AMX or AVX512-BF16 costs some
    fifteen times as much as float32 (benchmarks/cpu_rooms.py). State, hyper-parameters and update rule are the
    library's. The update has the RMS that AdamW's would have (`match_rms_adamw`), so that rates are comparable
    between shapes.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; on accelerators the library's own."""
        if any(p.device.type != "cpu" for group in self.param_groups for p in group["params"]):
            result: float | None = super().step(closure)  # type: ignore[no-untyped-call]
            return result
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = orthogonalise(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        scale = 0.2 * max(parameter.shape) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix `[rows, columns]`, by a quintic Newton-Schulz iteration."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
