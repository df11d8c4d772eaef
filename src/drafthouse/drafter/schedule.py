"""Learning-rate factor as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from drafthouse.config import Settings


class ScheduleSettings(Settings):
    """Warm-up, then cosine, or warm-up, stable, decay (WSD)."""

    kind: Literal["cosine", "wsd"] = Field(default="cosine", description="shape after the warm-up")
    warmup: float = Field(default=0.04, ge=0.0, lt=1.0, description="share of the steps that the rate rises, linearly")
    decay: float = Field(
        default=0.2, gt=0.0, le=1.0, description="wsd: share of the steps, at the end, that the rate falls"
    )
    final: float = Field(default=0.0, ge=0.0, le=1.0, description="factor that the rate arrives at after the last step")


def rate_factor(settings: ScheduleSettings, step: int, steps: int) -> float:
    """Factor on the base learning rate at `step` (0-based) of `steps`.

    Cosine falls from 1 to `final` over everything after the warm-up; WSD stays at 1 and falls linearly over
    the last `decay` share (MiniCPM, arXiv 2404.06395).
    """
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.kind == "cosine":
        share = (step - warmup) / (steps - warmup)
        return settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * share))
    falling = max(1, round(settings.decay * steps))
    share = (step - (steps - falling)) / falling
    return 1.0 - (1 - settings.final) * min(1.0, max(0.0, share))
