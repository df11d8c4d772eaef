"""What a sweep found: the measured points as typed data, as JSON for the roofline, and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from drafthouse.config import Settings, validate
from drafthouse.errors import ConfigError
from drafthouse.serve.sweep_plan import SweepError

Row = tuple[str, ...]
COLUMNS = (
    "context",
    "requests at once",
    "tokens/s",
    "tokens/s a request",
    "TTFT ms, p50 / p90 / p99",
    "inter-token ms, p50 / p90 / p99",
    "acceptance",
    "failed",
)


class Percentiles(Settings):
    """Milliseconds over the requests of a point."""

    p50: float = Field(ge=0)
    p90: float = Field(ge=0)
    p99: float = Field(ge=0)


class Measured(Settings):
    """What a load generator says about one point.

    Attributes:
        asked: requests that were to be answered.
        failed: those of them that were not, or not to their end.
        tokens_per_s: output tokens of all requests together, prefill included; 0 where nothing was answered.
        ttft_ms: from sending a request to its first token.
        inter_token_ms: mean time between the tokens of one answer after the first. Drafts arrive several at once,
            so single gaps say nothing.
        input_tokens, output_tokens: mean of a request, as the server counted them.
        reason: the first error, where there were any.
        made_by: the generator and its version.
    """

    asked: int = Field(ge=0)
    failed: int = Field(ge=0)
    tokens_per_s: float = Field(0, ge=0)
    ttft_ms: Percentiles | None = None
    inter_token_ms: Percentiles | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    reason: str | None = None
    made_by: str | None = None


class Point(Settings):
    """One point: where it stands, what was measured, and tokens per verify pass by the engine's own counters."""

    context: int
    concurrency: int
    measured: Measured
    acceptance: float | None = None
    acceptance_source: str | None = None
    seconds: float = Field(ge=0)

    @property
    def complete(self) -> bool:
        """True when every request was answered: a rate over the survivors of a broken run means nothing."""
        return self.measured.failed == 0 and self.measured.asked > 0 and self.measured.inter_token_ms is not None

    @property
    def step_ms(self) -> float | None:
        """Time of a decode step: a step yields `acceptance` tokens of a request. None without drafts' counters."""
        if self.acceptance is None or self.measured.inter_token_ms is None:
            return None
        return self.measured.inter_token_ms.p50 * self.acceptance

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of one request after its first token, the median request."""
        between = self.measured.inter_token_ms
        return 1000 / between.p50 if between is not None and between.p50 else None


class Sweep(Settings):
    """A whole sweep.

    Attributes:
        settings: what it was made with; a sweep is continued under the same ones only.
    """

    settings: dict[str, Any]
    points: tuple[Point, ...]

    @property
    def broken(self) -> list[Point]:
        """Points with failed requests."""
        return [point for point in self.points if not point.complete]

    def as_dict(self) -> dict[str, Any]:
        """JSON whose `points` are what `drafthouse roofline --sweep` reads; broken ones stand apart."""
        return {
            "settings": self.settings,
            "points": [_flat(point) for point in self.points if point.complete],
            "broken": [_flat(point) for point in self.broken],
        }


def _flat(point: Point) -> dict[str, Any]:
    measured = point.measured.model_dump(mode="json")
    step = {"step_ms": point.step_ms} if point.step_ms is not None else {}
    return point.model_dump(mode="json", exclude={"measured"}) | measured | step


def read_sweep(path: Path) -> Sweep:
    """Read what `as_dict` wrote.

    Raises:
        SweepError: not such a file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        points = [_point(entry) for entry in (*data["points"], *data["broken"])]
        return validate(Sweep, {"settings": data["settings"], "points": points}, str(path))
    except OSError as error:
        raise SweepError(f"cannot be read ({error.strerror})", where=str(path), fix="check the path") from None
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError):
        raise SweepError("is not the result of a sweep", where=str(path), fix="make the sweep again") from None


def _point(flat: dict[str, Any]) -> dict[str, Any]:
    measured = {key: value for key, value in flat.items() if key in Measured.model_fields}
    rest = {key: value for key, value in flat.items() if key in Point.model_fields}
    return {**rest, "measured": measured}


def rows(points: Sequence[Point]) -> list[Row]:
    """The table of a sweep, a row a point."""
    return [
        (
            f"{point.context:,}",
            str(point.concurrency),
            f"{point.measured.tokens_per_s:.1f}",
            "–" if point.decode_tokens_per_s is None else f"{point.decode_tokens_per_s:.1f}",
            _three(point.measured.ttft_ms),
            _three(point.measured.inter_token_ms),
            "–" if point.acceptance is None else f"{point.acceptance:.2f}",
            f"{point.measured.failed} of {point.measured.asked}",
        )
        for point in sorted(points, key=lambda one: (one.context, one.concurrency))
    ]


def _three(times: Percentiles | None) -> str:
    return "–" if times is None else " / ".join(f"{value:.1f}" for value in (times.p50, times.p90, times.p99))


def markdown(points: Sequence[Point]) -> str:
    """The table for a document."""
    lines = [COLUMNS, ("---:",) * len(COLUMNS), *rows(points)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def aligned(points: Sequence[Point]) -> str:
    """The table for a terminal."""
    lines = [COLUMNS, *rows(points)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
