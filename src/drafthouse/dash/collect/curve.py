"""The rows of a metrics.jsonl, read once each, as curves by step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard

from drafthouse.dash.collect.numbers import number, whole
from drafthouse.dash.collect.series import series
from drafthouse.dash.model import EvaluationView, Series

NAMES = {
    "loss": ("loss", "nats"),
    "loss_mean": ("mean loss", "nats"),
    "lr": ("learning rate", ""),
    "tokens_per_s": ("tokens/s", "tokens/s"),
    "mean_streak": ("mean streak", "tokens"),
    "expected_streak": ("expected streak", "tokens"),
    "noise": ("noise", ""),
    "grad_norm": ("gradient norm", ""),
    "mfu": ("MFU", "share"),
    "kl": ("KL", "nats"),
    "entropy": ("entropy", "nats"),
    "gpu_memory_gib": ("GPU memory", "GiB"),
    "gpu_utilization_percent": ("GPU utilisation", "%"),
    "gpu_temperature_c": ("GPU temperature", "°C"),
    "gpu_power_w": ("GPU power", "W"),
}
"""Columns that are drawn: name in a row -> title and unit. See `drafter.trainer` and `drafter.metrics`."""
ACCURACY, ALL_SLOTS, ACCEPTANCE = "accuracy", "accuracy, all slots", "acceptance length"
PACE_ROWS = 20
_TAIL = 256  # bytes at the end of what was read, which have to be there again


@dataclass
class _Column:
    steps: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, step: float, value: Any) -> None:
        self.steps.append(step)
        self.values.append(float(value) if _is_number(value) else None)


class Curve:
    """Grows with a file to which rows are appended; one that was written anew is read anew.

    Attributes:
        read: bytes of whole lines that were read.
        latest: the last row of a step, as it stands there.
        evaluations: in their order.
        odd: whole lines that are no rows: how many, and the number of the first.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.read = 0
        self.latest: dict[str, Any] = {}
        self.odd, self._lines = (0, 0), 0
        self.evaluations: list[EvaluationView] = []
        self._tail = b""
        self._columns: dict[tuple[str, str], _Column] = {}
        self._paces: list[tuple[float, float]] = []

    def feed(self, data: bytes, offset: int = 0) -> bool:
        """Take in `data`, which lies at `offset` of the file: all of it (0), or from `resume_at` on. False when it does
        not go on where the last call ended: then the whole file has to be fed."""
        end = offset + len(data)
        seen = data[max(0, self.read - len(self._tail) - offset) : self.read - offset] if end >= self.read else b""
        if seen != self._tail:
            self._begin()
            if offset:
                return False
        whole = data[self.read - offset : data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._row(line)
        if whole:
            self.read += len(whole)
            self._tail = (self._tail + whole)[-_TAIL:]
        return True

    @property
    def resume_at(self) -> int:
        """Where a further reading has to begin, so that `feed` can see that it is the same file."""
        return self.read - len(self._tail)

    @property
    def accuracy(self) -> tuple[float, ...]:
        """By slot, of the last row."""
        values = self.latest.get(ACCURACY)
        return tuple(float(value) for value in values if _is_number(value)) if isinstance(values, list) else ()

    def steps_per_s(self) -> float | None:
        """Over the last rows of one process."""
        rows = self._paces[-PACE_ROWS:]
        while len(rows) > 1 and any(b[1] <= a[1] for a, b in pairwise(rows)):
            rows = rows[1:]  # a process that was started anew counts its seconds from 0
        if len(rows) < 2:
            return None
        return (rows[-1][0] - rows[0][0]) / (rows[-1][1] - rows[0][1])

    def flat(self) -> dict[str, float]:
        """The numbers of the last row by name; of lists by name and place."""
        return {name: float(value) for name, value in _flat(self.latest, "") if _is_number(value)}

    def shown(self) -> tuple[Series, ...]:
        """All curves, in the order in which rows name them."""
        order = {title: place for place, title in enumerate([*NAMES.values(), (ALL_SLOTS, "share")])}
        columns = sorted(self._columns.items(), key=lambda item: order.get(item[0], len(order)))
        return tuple(series(title, unit, "step", column.steps, column.values) for (title, unit), column in columns)

    def _row(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step = whole(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            step = None
        self._lines += 1
        if step is None:
            self.odd = (self.odd[0] + 1, self.odd[1] or self._lines)
            return
        if isinstance(row.get("evaluation"), dict):
            self._evaluation(step, row["evaluation"])
            return
        self.latest = row
        for name, title in NAMES.items():
            if name in row:
                self._add(title, step, row[name])
        values = row.get(ACCURACY)
        if isinstance(values, list) and values:
            numbers = [float(value) for value in values if _is_number(value)]
            self._add((ALL_SLOTS, "share"), step, sum(numbers) / len(numbers) if numbers else None)
            for slot, value in enumerate(values, 1):
                self._add((f"{ACCURACY} slot {slot}", "share"), step, value)
        if _is_number(row.get("seconds")):
            self._paces = [*self._paces[-PACE_ROWS:], (float(step), float(row["seconds"]))]

    def _evaluation(self, step: int, found: Mapping[str, Any]) -> None:
        chain, tree = _length(found, "chain"), _length(found, "tree")
        if chain is None and _is_number(found.get("acceptance")):
            chain = float(found["acceptance"])
        self.evaluations.append(EvaluationView(step=step, chain=chain, tree=tree))
        self._add((ACCEPTANCE, "tokens/pass"), step, chain if tree is None else tree)

    def _add(self, title: tuple[str, str], step: float, value: Any) -> None:
        self._columns.setdefault(title, _Column()).add(step, value)


def _length(found: Mapping[str, Any], mode: str) -> float | None:
    """Of one decoding mode: a number, or statistics with their mean over all tokens."""
    value = found.get(mode)
    if isinstance(value, dict):
        value = value.get("micro")
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> TypeGuard[int | float]:
    return number(value) is not None


def _flat(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [pair for key, one in value.items() for pair in _flat(one, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list):
        return [pair for place, one in enumerate(value, 1) for pair in _flat(one, f"{name}[{place}]")]
    return [(name, value)]
