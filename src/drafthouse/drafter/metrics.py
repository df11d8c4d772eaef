"""What a training step says about itself: sums that add up over micro-batches, and the JSON lines file they
go to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class SlotSums:
    """Sums over blocks. Slot axis: slots 1..B-1. fp32 on the device of the loss.

    Attributes:
        blocks: blocks with at least one label.
        labels, correct, weight: [slots]; labels that count, those whose argmax is right, their weights.
        cross_entropy, divergence, entropy: nats, summed over labels.
        streak: accepted run of each block under greedy drafting on the data's own text (without the bonus
            token).
        expected_streak: the same in expectation, sum over k of prod_{i<=k} q_i(label).
    """

    blocks: Tensor
    labels: Tensor
    correct: Tensor
    weight: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    entropy: Tensor
    streak: Tensor
    expected_streak: Tensor

    @classmethod
    def zeros(cls, slots: int, device: torch.device | str = "cpu") -> SlotSums:
        by_slot = {"labels", "correct", "weight"}
        return cls(**{f.name: torch.zeros(slots if f.name in by_slot else (), device=device) for f in fields(cls)})

    def __add__(self, other: SlotSums) -> SlotSums:
        return SlotSums(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def flat(self) -> Tensor:
        """All sums as one vector, in the order of the fields."""
        return torch.cat([getattr(self, f.name).reshape(-1) for f in fields(self)])

    @classmethod
    def from_flat(cls, values: Tensor, slots: int) -> SlotSums:
        """The inverse of `flat`."""
        shapes = {f.name: getattr(cls.zeros(slots), f.name).shape for f in fields(cls)}
        parts = torch.split(values, [shape.numel() for shape in shapes.values()])
        return cls(**{name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)})

    def summary(self) -> dict[str, float | list[float]]:
        """Means: accuracy by slot, cross_entropy, kl, entropy (nats a label), mean_streak, expected_streak
        (tokens a block), weight by slot (mean over labels). Terms that were not summed are left out."""
        labels = self.labels.clamp_min(1)
        total, blocks = self.labels.sum().clamp_min(1), self.blocks.clamp_min(1)
        out: dict[str, float | list[float]] = {
            "accuracy": (self.correct / labels).tolist(),
            "slot_weight": (self.weight / labels).tolist(),
            "mean_streak": float(self.streak / blocks),
            "expected_streak": float(self.expected_streak / blocks),
            "cross_entropy": float(self.cross_entropy / total),
            "blocks": int(self.blocks),
        }
        if float(self.divergence) != 0.0:
            out["kl"] = float(self.divergence / total)
        if float(self.entropy) != 0.0:
            out["entropy"] = float(self.entropy / total)
        return out


class MetricsLog:
    """Appends one JSON object a line. Opening it at a step drops what a killed run wrote beyond that step."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        kept = [line for line in _lines(path) if _step(line) is not None and (_step(line) or 0) <= resume_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row and hand it to the operating system, so that a reader sees whole lines only.

        JSON has no NaN: what is not finite becomes null, so that an odd evaluation cannot end a run.
        """
        self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _step(line: str) -> int | None:
    """The step of a row; None for a line that a kill cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics.jsonl, in order; evaluations are rows with the key `evaluation`."""
    return [json.loads(line) for line in _lines(path) if _step(line) is not None]
