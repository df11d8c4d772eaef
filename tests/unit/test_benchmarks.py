"""The benchmark script runs, and every result that is kept has the same rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
KEYS = {"name", "value", "unit", "peer", "ratio", "bar", "met", "machine", "versions", "seed", "command", "date"}


def check(path: Path) -> list[dict[str, object]]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert rows
    for row in rows:
        assert set(row) - {"details"} == KEYS  # what plots need beyond the figure
        if row["value"] is None:  # a bar that is open says why
            assert (row["ratio"], row["met"]) == (None, None)
            assert row["details"]["why"]
            continue
        assert row["ratio"] > 0
        assert row["value"] > 0
        assert row["met"] is (None if row["bar"] is None else row["ratio"] >= row["bar"])
    return list(rows)


def test_the_rooms_are_measured_against_their_peers(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = [sys.executable, str(FOLDER / "cpu_rooms.py"), "--quick", "--out", str(out)]
    subprocess.run(words, check=True, capture_output=True, timeout=200)
    names = {str(row["name"]).partition(":")[0] for row in check(out)}
    assert names == {"states", "decode", "drafter", "Muon in float32 on a CPU"}
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.name)
def test_results_that_are_kept_have_these_rows(path: Path) -> None:
    check(path)
