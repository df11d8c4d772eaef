"""Muon over stacks of equal matrices: a layer's matrices have the shapes of the next layer's.

torch's Muon orthogonalises one matrix after another, some thirty kernels each; for a small model on a GPU these take
longer than its products. Stacked, eight layers cost what one does. The update rule is that of `drafthouse.muon`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS, _STEPS, _EPS = (3.4445, -4.775, 2.0315), 5, 1e-7


class StackedMuon(torch.optim.Optimizer):
    """Muon for matrices of a model that is trained as a whole: every parameter has a gradient at every step."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._stacks: dict[torch.Size, list[Tensor]] = {}
        self._momenta: dict[torch.Size, Tensor] = {}
        for parameter in self.param_groups[0]["params"]:
            self._stacks.setdefault(parameter.shape, []).append(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for shape, parameters in self._stacks.items():
            gradient = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
            if shape not in self._momenta:
                self._momenta[shape] = torch.zeros_like(gradient)
            buffer = self._momenta[shape].lerp_(gradient, 1 - group["momentum"])
            update = orthogonalised(gradient.lerp(buffer, group["momentum"])).to(gradient.dtype)
            # The update has the RMS that AdamW's would have.
            rate = -group["lr"] * 0.2 * max(shape) ** 0.5
            torch._foreach_add_(parameters, list(update.unbind()), alpha=rate)


def orthogonalised(stack: Tensor) -> Tensor:
    """Roughly the nearest semi-orthogonal matrices of `[count, rows, columns]`; in bfloat16 on accelerators."""
    a, b, c = _COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack if stack.device.type == "cpu" else stack.bfloat16()
    x = x.transpose(1, 2) if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(_EPS)
    for _ in range(_STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x
