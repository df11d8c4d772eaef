"""The DFlash drafter: a small block-diffusion model that foresees the target's next tokens from its hidden
states."""

from __future__ import annotations

from drafthouse.drafter.config import DrafterConfig, DrafterShape, default_target_layer_ids
from drafthouse.drafter.export import load_drafter, save_drafter
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.drafter.trainer import TrainResult, TrainSettings, train

__all__ = [
    "DFlashDrafter",
    "DrafterConfig",
    "DrafterShape",
    "TrainResult",
    "TrainSettings",
    "default_target_layer_ids",
    "load_drafter",
    "save_drafter",
    "train",
]
