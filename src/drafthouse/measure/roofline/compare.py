"""A measured step, or a whole sweep, beside its bound: what share of the hardware is used, and which lever is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafthouse.measure import units
from drafthouse.measure.roofline.errors import RooflineError
from drafthouse.measure.roofline.hardware import Hardware
from drafthouse.measure.roofline.serving import Serving
from drafthouse.measure.roofline.shapes import Config
from drafthouse.measure.roofline.step import Roofline, roofline

# Streaming kernels sustain 85 to 93 % of a data sheet's bandwidth; above the first of these a step has little left.
NEAR = 0.85
# A bound from a data sheet can be passed by rounding, not by more.
IMPOSSIBLE = 1.02


@dataclass(frozen=True)
class Comparison:
    """A measured time of a step beside the bound of the same step."""

    roofline: Roofline
    measured_ms: float

    @property
    def share(self) -> float:
        """Of what the hardware can do."""
        return self.roofline.step_ms / self.measured_ms

    @property
    def tokens_per_s(self) -> float:
        return self.roofline.tokens_per_s(self.roofline.acceptance, self.measured_ms)

    @property
    def gain_of_a_tenth(self) -> float:
        """Tokens a second that 0.1 more of acceptance length bring at the measured speed."""
        return self.roofline.tokens_per_s(0.1, self.measured_ms)

    @property
    def headline(self) -> str:
        """How near the bound is."""
        facts = f"a step takes {self.measured_ms:.1f} ms and {self.roofline.step_ms:.1f} ms is the least"
        if self.share > IMPOSSIBLE:
            return f"This is {units.percent(self.share)} of what the hardware can do, which cannot be: {facts}."
        return f"You are at {units.percent(self.share)} of what this hardware can do: {facts}."

    @property
    def advice(self) -> str:
        """Which lever is left."""
        bound = self.roofline
        if self.share > IMPOSSIBLE:
            return (
                "Check that the time is of a step and not of a token, and that hardware, context and types are those"
                " of the run."
            )
        if self.share < NEAR:
            missing = self.measured_ms - bound.step_ms
            link = ", the path of the all-reduce" if bound.serving.tensor_parallel > 1 else ""
            return (
                f"{missing:.1f} ms of a step are not needed by bytes or FLOPs. Look there first: kernel launches and"
                f" graphs, the kernels of attention and recurrent state{link}, the host."
            )
        if bound.serving.draft == "none":
            return f"The lever left is speculation: a round costs little more than a step (bound by {bound.bound})."
        if bound.acceptance >= bound.longest:
            return "Every draft is taken to be accepted; give the acceptance length to see what more of it brings."
        return f"The lever left is acceptance length: 0.1 more of it is {self.gain_of_a_tenth:.1f} tokens/s more."

    @property
    def sentence(self) -> str:
        return f"{self.headline} {self.advice}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "measured_ms": self.measured_ms,
            "share_of_bound": self.share,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_for_0.1_acceptance": self.gain_of_a_tenth,
            "sentence": self.sentence,
            "by_acceptance": self.roofline.table(self.measured_ms),
        }


def compare(bound: Roofline, measured_ms: float) -> Comparison:
    """Set the measured time of one step beside its bound.

    Raises:
        RooflineError: a time that is not positive.
    """
    if not measured_ms > 0:
        raise RooflineError(f"{measured_ms} ms is no time of a step", where="measured_ms", fix="give one above 0")
    return Comparison(bound, measured_ms)


def compare_sweep(
    model: Config,
    hardware: Hardware,
    serving: Serving,
    points: Sequence[Mapping[str, Any]],
    *,
    draft: Config | None = None,
) -> list[Comparison]:
    """Set every point of a sweep beside the bound of its own batch, context and acceptance length.

    Args:
        points: each with `concurrency` (requests), `context` (tokens), `tokens_per_s` (all requests together) or
            `step_ms`, and `acceptance`; what a point leaves out is taken from `serving`.

    Raises:
        RooflineError: a point without a measurement, or with an impossible one; the sentence names the point.
    """
    found = []
    for place, point in enumerate(points):
        where = f"point {place} of the sweep"
        try:
            changed = {
                "batch": int(point.get("concurrency") or serving.batch),
                "context": int(point.get("context") or serving.context),
                "acceptance": float(point["acceptance"]) if point.get("acceptance") else serving.acceptance,
            }
            rate, step_ms = point.get("tokens_per_s"), point.get("step_ms")
            measured = None if rate is None and step_ms is None else float(step_ms or 0) or float(rate or 0)
        except (TypeError, ValueError) as error:
            raise RooflineError(f"holds what is no number ({error})", where=where, fix="correct it") from None
        if not measured:
            raise RooflineError("has neither tokens_per_s nor step_ms", where=where, fix="give one above 0")
        bound = roofline(model, hardware, serving.model_dump() | changed, draft=draft)
        found.append(compare(bound, measured if step_ms else bound.serving.batch * bound.acceptance / measured * 1000))
    return found
