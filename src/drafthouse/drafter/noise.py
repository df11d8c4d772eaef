"""Gaussian noise on tap states during training: off by default, constant, or annealed to nothing along a half
cosine."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from drafthouse.config import Settings


class NoiseSettings(Settings):
    """Noise relative to each token's own magnitude, so that one sigma suits taps of every depth."""

    kind: Literal["none", "constant", "cosine"] = Field(
        default="none", description="constant: sigma throughout; cosine: from sigma to 0 over the run"
    )
    sigma: float = Field(
        default=0.05, ge=0.0, description="standard deviation as a share of the RMS of the token's tap state"
    )


def noise_level(settings: NoiseSettings, step: int, steps: int) -> float:
    """Standard deviation (relative) at `step` (0-based) of `steps`."""
    if settings.kind == "none":
        return 0.0
    if settings.kind == "constant":
        return settings.sigma
    return settings.sigma * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps - 1))))


def add_noise(taps: Tensor, level: float, generator: torch.Generator) -> Tensor:
    """`taps` [rows, length, K, hidden] plus level x RMS over hidden (per token and tap) x N(0, 1).

    Padding (all-zero states) stays zero.
    """
    if level == 0.0:
        return taps
    # Where the generator lives: a quarter of a gigabyte of states needs more numbers than a CPU draws in a second.
    drawn = torch.empty(taps.shape, device=generator.device).normal_(generator=generator).to(taps.device)
    states = taps.float()
    scale = states.square().mean(-1, keepdim=True).sqrt_().mul_(level)
    return (states + drawn.mul_(scale)).to(taps.dtype)
