"""Rows of a result file: what was measured, against whom, where, and how to do it again."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drafthouse.measure import collect_machine


def race(repeats: int, *works: Callable[[], Any]) -> list[float]:
    """Smallest CPU seconds of one call of each, all threads: what a busy machine disturbs least.

    They take turns, so that a machine that slows down or speeds up does so for all of them.
    """
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for index, work in enumerate(works):
            began = time.process_time()
            work()
            best[index] = min(best[index], time.process_time() - began)
    return best


class Rows:
    """Collects rows `{name, value, unit, peer, ratio, bar, met, machine, versions, seed, command, date}`."""

    def __init__(self, seed: int) -> None:
        machine = collect_machine()
        self._common = {
            "versions": machine.pop("versions"),
            "machine": machine,
            "seed": seed,
            "command": " ".join(["python", *(word for word in sys.argv if not word.startswith("/"))]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        peer: str,
        ratio: float,
        bar: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        """One figure; `ratio` is how many times better than the peer, `bar` the ratio that was aimed at, `details`
        what plots need beyond it.

        Raises:
            ValueError: a figure that cannot have been measured (negative or not finite).
        """
        if not (0 <= value < math.inf and 0 <= ratio < math.inf):
            raise ValueError(f"{name}: {value} {unit}, {ratio} times {peer}: no such thing can be measured")
        row = {
            "name": name,
            "value": round(value, 4) if abs(value) >= 1 else float(f"{value:.4g}"),
            "unit": unit,
            "peer": peer,
            "ratio": round(ratio, 3),
            "bar": bar,
            "met": None if bar is None else ratio >= bar,
        }
        self.rows.append(row | self._common | ({} if details is None else {"details": details}))
        print(f"{name:<44} {value:>12.4g} {unit:<18} {ratio:>6.2f}x {peer}")

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")
