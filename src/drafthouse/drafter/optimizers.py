"""Optimisers: AdamW for everything, or Muon for the matrices with AdamW for the norm weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from drafthouse.config import Settings


class OptimizerSettings(Settings):
    """Which optimiser, and its rates."""

    kind: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: Muon on matrices, AdamW on norm weights"
    )
    lr: float = Field(default=6e-4, gt=0.0, description="AdamW's learning rate")
    muon_lr: float | None = Field(
        default=None, gt=0.0, description="Muon's learning rate; none: the same as lr"
    )
    weight_decay: float = Field(default=0.01, ge=0.0, description="decoupled, on matrices only")
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0, description="Muon's momentum (Nesterov)")
    clip: float = Field(default=1.0, gt=0.0, description="largest norm of the whole gradient")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.muon_lr is not None and self.kind != "muon":
            raise ValueError("muon_lr is set but kind is not 'muon'")
        return self


class Muon(torch.optim.Muon):
    """torch's Muon, orthogonalising in fp32 where the device has no fast bf16 matrix product.

    The library's Newton-Schulz iteration runs in bf16, which on CPUs without AMX or AVX512-BF16 costs some
    twenty times as much as fp32. State, hyper-parameters and update rule are the library's.
    """

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
        # match_rms_adamw: an update with the RMS that AdamW's would have, so both share one learning rate.
        scale = 0.2 * max(parameter.shape) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Nearest (semi-)orthogonal matrix, roughly, by quintic Newton-Schulz (Jordan et al., "Muon", 2024)."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def build_optimizers(model: nn.Module, settings: OptimizerSettings) -> dict[str, torch.optim.Optimizer]:
    """Optimisers by name; each group carries `base_lr`, which the schedule multiplies.

    Matrices decay, norm weights do not.
    """
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
    built: dict[str, torch.optim.Optimizer] = {}
    if settings.kind == "adamw":
        groups.insert(0, {"params": matrices, "weight_decay": settings.weight_decay})
    else:
        rate = settings.muon_lr or settings.lr
        built["muon"] = Muon(
            matrices,
            lr=rate,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    betas = (settings.beta1, settings.beta2)
    built["adamw"] = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, fused=True)
    for optimizer in built.values():
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return built


def set_rate(optimizers: dict[str, torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` x its base."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor


def optimizer_tensors(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimisers' state as named tensors, `<optimizer>/<parameter>/<key>`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{kind}/{names[parameter]}/{key}": value
        for kind, optimizer in optimizers.items()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizers(
    model: nn.Module, optimizers: dict[str, torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
    """Put the tensors of `optimizer_tensors` back."""
    parameters = dict(model.named_parameters())
    for path, value in tensors.items():
        kind, name, key = path.split("/")
        parameter = parameters[name]
        # `step` counters are scalars that stay on the CPU unless the optimiser says otherwise.
        optimizers[kind].state[parameter][key] = value.to(parameter.device) if value.dim() else value
