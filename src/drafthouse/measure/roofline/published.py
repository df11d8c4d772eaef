"""Published figures of this model family beside the roofline's own, so that a reader sees how far to trust it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml
from pydantic import Field

from drafthouse.config import Settings, validate
from drafthouse.measure.roofline.profile import drafter_config, model_config
from drafthouse.measure.roofline.step import Roofline, roofline

MODEL, DRAFTER = "Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash"
_SHORT_CONTEXT = 1024


class _Figure(Settings):
    what: str
    quantity: str
    unit: str
    published: float = Field(gt=0)
    kind: Literal["calculated", "measured"]
    source: str
    hardware: str
    serving: dict[str, Any]
    tolerance: float = Field(0.0, ge=0)
    why: str


class _Figures(Settings):
    sources: dict[str, str]
    figures: tuple[_Figure, ...]


@dataclass(frozen=True)
class Check:
    """One published figure and ours for the same thing.

    Attributes:
        kind: "calculated": somebody's arithmetic, which ours must meet within `tolerance`; "measured": somebody's
            run, which must not be faster than ours.
        why: what the rest between the two is.
    """

    what: str
    hardware: str
    unit: str
    published: float
    ours: float
    kind: Literal["calculated", "measured"]
    tolerance: float
    why: str
    source: str

    @property
    def deviation(self) -> float:
        """Ours against the published figure, 0 when equal."""
        return self.ours / self.published - 1

    @property
    def holds(self) -> bool:
        if self.kind == "measured":
            return self.ours >= self.published
        return abs(self.deviation) <= self.tolerance


def checks() -> list[Check]:
    """All published figures of `published.yml` with ours."""
    file = resources.files(__package__).joinpath("published.yml").read_text(encoding="utf-8")
    data = validate(_Figures, yaml.safe_load(file), "published.yml")
    model, drafter = model_config(MODEL)[0], drafter_config(DRAFTER)
    found = []
    for figure in data.figures:
        bound = roofline(model, figure.hardware, figure.serving, draft=drafter)
        ranks = bound.serving.tensor_parallel
        found.append(
            Check(
                what=figure.what,
                hardware=bound.hardware.title if ranks == 1 else f"{ranks}× {bound.hardware.title}",
                unit=figure.unit,
                published=figure.published,
                ours=_QUANTITIES[figure.quantity](bound),
                kind=figure.kind,
                tolerance=figure.tolerance,
                why=figure.why,
                source=data.sources[figure.source],
            )
        )
    return found


def _step_growth(bound: Roofline) -> float:
    """Of the step's time, against the same with a short context."""
    short = bound.serving.model_dump() | {"context": _SHORT_CONTEXT}
    drafter = drafter_config(DRAFTER) if bound.draft else None
    return bound.step_ms / roofline(model_config(MODEL)[0], bound.hardware, short, draft=drafter).step_ms


def _state_mib(bound: Roofline) -> float:
    """Plain decoding reads and writes one state."""
    return bound.part_bytes("recurrent_state") / 2 / 2**20


def _kv_kib(bound: Roofline) -> float:
    """Plain decoding reads the context's tokens and writes one."""
    return bound.part_bytes("attention_cache") / (bound.serving.context + 1) / 2**10


def _gflop_per_row(bound: Roofline) -> float:
    flops = sum(component.flops for component in bound.components if component.part == "weights")
    return flops / (bound.serving.batch * bound.width) / 1e9


_QUANTITIES: Mapping[str, Callable[[Roofline], float]] = {
    "weights_gb": lambda bound: bound.part_bytes("weights") / 1e9,
    "weights_ms": lambda bound: bound.weights_ms,
    "weights_share": lambda bound: bound.shares["weights"],
    "step_ms": lambda bound: bound.step_ms,
    "step_growth": _step_growth,
    "draft_ms": lambda bound: bound.part_ms("draft"),
    "state_ms": lambda bound: bound.part_ms("recurrent_state"),
    "state_mib": _state_mib,
    "kv_kib": _kv_kib,
    "gflop_per_row": _gflop_per_row,
    "ridge_rows": lambda bound: bound.ridge_rows,
    "tokens_per_s": lambda bound: bound.bound_tokens_per_s,
}
