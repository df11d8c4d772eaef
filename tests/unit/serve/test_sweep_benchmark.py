"""benchmarks/serving_sweep.py: two sweeps become ratios, and sweeps that cannot be compared are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafthouse.serve.sweep_result import Sweep
from tests.unit.serve.test_sweep import point

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "serving_sweep.py"
SETTINGS: dict[str, Any] = {"load": {"seed": 17, "output_tokens": 256}, "generator": "aiperf"}


def compare(folder: Path, drafting: Sweep, plain: Sweep) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), "--out", str(folder / "rows.json")]
    for name, sweep in (("drafting", drafting), ("plain", plain)):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(sweep.as_dict()), encoding="utf-8")
        words += [f"--{name}", str(path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_ratios_of_the_points_that_both_have(tmp_path: Path) -> None:
    drafting = Sweep(settings=SETTINGS, points=(point(1), point(10), point(20)))
    slow = point(1, acceptance=None).model_dump()
    slow["measured"]["tokens_per_s"] /= 2
    plain = Sweep.model_validate({"settings": SETTINGS, "points": [slow, point(10, failed=1).model_dump()]})
    done = compare(tmp_path, drafting, plain)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["name"].partition(":")[0] for row in rows] == ["throughput", "decode"]
    assert [row["ratio"] for row in rows] == [2.0, 1.0]
    assert rows[0]["name"] == "throughput: 1 at once, 1024 tokens, acceptance 3.00"


@pytest.mark.parametrize(
    ("settings", "points", "said"),
    [
        ({**SETTINGS, "generator": "guidellm"}, (point(1),), "generator: guidellm → aiperf"),
        (SETTINGS, (point(2),), "no complete point in common"),
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, settings: dict[str, Any], points: Any, said: str) -> None:
    done = compare(tmp_path, Sweep(settings=SETTINGS, points=(point(1),)), Sweep(settings=settings, points=points))
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "rows.json").exists()
