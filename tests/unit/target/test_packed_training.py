"""Training on packed rows: it learns, ends when it should, and writes what the small target's training writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthouse.config import validate
from drafthouse.errors import ConfigError, TargetError
from drafthouse.target import Target
from drafthouse.target.flat import FlatTexts
from drafthouse.target.packed_training import PackedTraining, rate_factor, train_packed
from drafthouse.target.tiny import TinyShape, held_out_accuracy
from tests.unit.target import short_run

SHAPE = TinyShape(hidden_size=32, intermediate_size=48, head_dim=16, linear_head_dim=16)
TRAINING = PackedTraining(steps=12, rows=4, width=256, warmup_steps=2, seed=3, log_every=4)


def run(out: Path, training: PackedTraining = TRAINING, **others: Any) -> dict[str, Any]:
    samples = short_run.samples(60)
    held = {"some": samples[50:55], "others": samples[55:], "none": []}
    return train_packed(FlatTexts.of(samples[:50]), held, short_run.tokenizer(), out, SHAPE, training, **others)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("packed") / "target"
    rows: list[dict[str, Any]] = []
    return {"out": out, "rows": rows, "report": run(out, provenance={"data_sha256": "abc"}, on_log=rows.append)}


def test_it_learns_and_says_so(finished: dict[str, Any]) -> None:
    rows, report = finished["rows"], finished["report"]
    assert [row["step"] for row in rows] == [1, 4, 8, 12]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert report["curve"] == rows
    assert report["steps"] == report["training"]["steps"] == 12
    assert report["tokens"] == rows[-1]["tokens"]
    assert report["tokens"] / (12 * 4 * 256) > 0.9
    assert set(report["held_out_kinds"]) == {"some", "others"}


def test_held_out_is_over_the_answers_of_all_kinds(finished: dict[str, Any]) -> None:
    model = Target.load(finished["out"]).model
    together = held_out_accuracy(model, short_run.samples(60)[50:], 0, "cpu")
    assert finished["report"]["held_out"] == pytest.approx(together, abs=1e-4)
    own = [kind["assistant_loss"] for kind in finished["report"]["held_out_kinds"].values()]
    assert min(own) < together["assistant_loss"] < max(own)


def test_what_was_judged_is_what_loads(finished: dict[str, Any]) -> None:
    target = Target.load(finished["out"])
    assert target.parameters == finished["report"]["parameters"]
    assert target.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    kept = json.loads((finished["out"] / "training.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(finished["report"]))
    assert kept["data_sha256"] == "abc"


def test_the_same_seed_gives_the_same_weights(finished: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path / "again")
    run(tmp_path / "other", TRAINING.model_copy(update={"seed": 4}))
    first, again, other = (Target.load(path).identity for path in (finished["out"], *sorted(tmp_path.iterdir())))
    assert first == again
    assert first != other


def test_a_time_ends_it_and_precision_is_as_before(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    training = TRAINING.model_copy(update={"steps": None, "seconds": 0.5, "log_every": 1})
    report = run(tmp_path / "target", training)
    assert report["steps"] >= 2
    assert 0.5 <= report["seconds"] < 5
    assert report["curve"][-1]["rate"] <= 1.0
    assert torch.get_float32_matmul_precision() == before


def test_the_rate_warms_up_by_steps_and_falls_by_the_share_spent() -> None:
    training = PackedTraining(seconds=100.0, warmup_steps=10, decay_fraction=0.25)
    assert rate_factor(4, training.spent(4, 1.0), training) == pytest.approx(0.5)
    assert [rate_factor(500, training.spent(500, at), training) for at in (20.0, 75.0)] == [1.0, 1.0]
    assert rate_factor(500, training.spent(500, 90.0), training) == pytest.approx(0.4)
    assert rate_factor(500, training.spent(500, 101.0), training) == 0.0
    counted = PackedTraining(steps=100, warmup_steps=0, decay_fraction=0.5)
    assert rate_factor(75, counted.spent(75, 1e9), counted) == pytest.approx(0.5)


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(TargetError, match="no trained small target and would be replaced"):
        run(tmp_path)
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "years of work"


@pytest.mark.parametrize("values", [{}, {"steps": 3, "seconds": 1.0}])
def test_either_steps_or_seconds_end_it(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give either steps or seconds"):
        validate(PackedTraining, values, "training")


def test_rows_are_whole_chunks() -> None:
    with pytest.raises(ConfigError, match="multiple of 64"):
        validate(PackedTraining, {"steps": 1, "width": 100}, "training")
