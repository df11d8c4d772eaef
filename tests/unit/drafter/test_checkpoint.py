"""Checkpoints: the newest whole one wins, whatever was cut short."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from drafthouse.drafter import checkpoint as module
from drafthouse.drafter.checkpoint import (
    MANIFEST,
    STATE,
    WEIGHTS,
    Checkpoints,
    TrainingState,
    verify,
)
from drafthouse.errors import DrafterError

SPEC = {"train": {"seed": 1}}


def save(checkpoints: Checkpoints, step: int) -> Path:
    state = TrainingState(step=step, tokens=100 * step, position=2 * step, losses=[0.1 + 0.2, 1 / 3])
    weights = {"fc.weight": torch.full((3, 2), float(step)), "view": torch.arange(6).view(2, 3).T}
    return checkpoints.save(SPEC, state, weights, {"rng": torch.get_rng_state()})


def test_round_trip_is_exact_and_holds_no_pickle(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.newest() is None
    path = save(checkpoints, 7)
    found = checkpoints.newest()
    assert found is not None
    assert found.spec == SPEC
    assert found.state == TrainingState(step=7, tokens=700, position=14, losses=[0.1 + 0.2, 1 / 3])
    assert torch.equal(found.weights["view"], torch.arange(6).view(2, 3).T)
    assert torch.equal(found.training["rng"], torch.get_rng_state())
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".json", ".safetensors", ".safetensors"]


def test_old_ones_are_dropped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        save(checkpoints, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]


def test_what_was_passed_over_does_not_push_out_what_counts(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 90)
    (checkpoints.place(90) / WEIGHTS).write_bytes(b"half")
    save(checkpoints, 15)
    assert [p.name for p in checkpoints.folders()] == ["step-00000015"]
    found = checkpoints.newest()
    assert found is not None
    assert found.state.step == 15


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda p: (p / MANIFEST).write_text("{"), "its manifest is damaged"),
        (lambda p: (p / MANIFEST).write_text("[]"), "its manifest is damaged"),
        (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-9]), "it was cut short"),
        (lambda p: (p / WEIGHTS).unlink(), "weights.safetensors is missing"),
        (
            lambda p: (p / STATE).write_text((p / STATE).read_text().replace("0", "1")),
            "state.json does not have the sha256",
        ),
    ],
)
def test_a_damaged_one_is_passed_over_by_name(
    tmp_path: Path, damage: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 10)
    newest = save(checkpoints, 20)
    assert callable(damage)
    damage(newest)
    with caplog.at_level(logging.WARNING):
        found = checkpoints.newest()
    assert found is not None
    assert found.state.step == 10
    assert "step-00000020 is passed over" in caplog.text
    assert words in caplog.text
    # With no other left there is nothing to go on with, and starting anew in silence would lose the run.
    damage_all = next(p for p in tmp_path.iterdir() if p.name.endswith("10"))
    damage(damage_all)
    if "manifest.json is missing" in words:  # never committed: nothing is lost by starting anew
        assert checkpoints.newest() is None
        return
    with pytest.raises(DrafterError, match=rf"no checkpoint is whole .*{words}.*delete the folder"):
        checkpoints.newest()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save(Checkpoints(tmp_path), 3)
    data = bytearray((path / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (path / WEIGHTS).write_bytes(data)
    assert verify(path) == "weights.safetensors does not have the sha256 of its manifest"


def test_a_checkpoint_of_a_later_schema_is_not_guessed_at(tmp_path: Path) -> None:
    path = save(Checkpoints(tmp_path), 3)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"schema": 99}))
    assert verify(path) == "its schema is 99, this program reads 1"


def test_a_torn_folder_is_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    torn = tmp_path / "step-00000004"
    torn.mkdir()
    (torn / WEIGHTS).write_bytes(b"half")
    save(checkpoints, 4)
    found = checkpoints.newest()
    assert found is not None
    assert found.state.step == 4


def test_a_full_disk_keeps_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(DrafterError, match=r"No space left on device.*make room"):
        save(checkpoints, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
