"""The benchmark of the page at scale runs, at a size that fits a test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("dash_scale", FOLDER / "dash_scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "dash_scale", module)
    spec.loader.exec_module(module)
    return module


def test_a_small_fleet_is_measured(benchmark: ModuleType, tmp_path: Path) -> None:
    rows = benchmark.Rows(0)
    benchmark.measure(rows, str(tmp_path / "store"), "directory", benchmark.Scale(300, 12, 3, 3, 1), web=True)
    by_name = {row["name"]: row for row in rows.rows}
    assert {"one round, directory", "/metrics, directory", "page /extraction/states, directory"} <= by_name.keys()
    assert by_name["snapshot(), directory"]["value"] < 5, "milliseconds: nothing is waited for"
    assert all(row["details"]["cpu_ms"] >= 0 for row in rows.rows)
