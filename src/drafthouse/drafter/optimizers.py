"""Optimisers: AdamW for everything, or Muon for the matrices with AdamW for the norm weights."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from drafthouse.config import Settings
from drafthouse.drafter.parallel import like, whole
from drafthouse.muon import Muon


class OptimizerSettings(Settings):
    """Which optimiser, and its rates."""

    kind: Literal["adamw", "muon"] = Field(default="adamw", description="muon: Muon on matrices, AdamW on norm weights")
    lr: float = Field(default=6e-4, gt=0.0, description="AdamW's learning rate")
    muon_lr: float | None = Field(default=None, gt=0.0, description="Muon's learning rate; none: the same as lr")
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
    """The optimisers' state as named, whole tensors, `<optimizer>/<parameter>/<key>`; every rank must ask."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{kind}/{names[parameter]}/{key}": whole(value)
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
        # All of it, `step` counters too: the fused AdamW reads them on the parameter's own device.
        optimizers[kind].state[parameter][key] = like(value, parameter)
