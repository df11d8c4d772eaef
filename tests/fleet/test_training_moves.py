"""A training that loses its node: it goes on elsewhere from the newest whole checkpoint, to the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafthouse.fleet.gates import train_progress
from drafthouse.store import Store
from tests.command_line import drafthouse
from tests.fixtures_s3 import s3_url
from tests.fleet.faults import losses, undisturbed
from tests.fleet.operator import STEPS, Operator, SealedRun, sealed_run, standing_still
from tests.patience import until

pytestmark = [pytest.mark.faults, pytest.mark.s3, pytest.mark.slow]


@pytest.fixture
def run(fleet_s3: str, tmp_path: Path) -> SealedRun:
    found = sealed_run(tmp_path, s3_url(fleet_s3))
    outcome = drafthouse("states", "extract", "--out", str(found.folder))
    assert outcome.code == 0, outcome
    return found


def test_a_training_that_is_cut_off_and_recovered_ends_with_the_same_losses(
    operator: Operator, run: SealedRun, tmp_path: Path
) -> None:
    operator.write_job(
        "train",
        kind="train",
        node="node1",
        recipe="ours",
        command=["drafthouse", "drafter", "train", "ours", "--out", "run"],
        files={"run/run.yml": operator.bring(run.file)},
        store=run.store,
    )
    store = Store.open(run.store)
    zombie = operator.fleet["node1"]

    def steps() -> float:
        return (train_progress(store, "ours", 1) or {}).get("step", 0)

    with standing_still(zombie, "drafter train", steps, "a step"):
        deployed = operator.fab("deploy", "--job", "train")
        assert "step" in deployed["evidence"]
        zombie.cut()
    # The node goes on and cannot be reached: a zombie, which is fenced off before anybody else begins.
    recovered = operator.fab("recover", "--from", "node1", "--to", "node2")[0]
    assert recovered["outcome"] == "done", recovered
    before, after = train_progress(store, "ours", 1), train_progress(store, "ours", 2)
    assert before is not None
    assert after is not None
    assert recovered["redone"]["steps"] == max(0, before["step"] - (after.get("resumed_from") or 0))

    # It comes back: its trainer sees the fence and ends, and is not started again.
    zombie.join()
    until(lambda: not _training(operator, "node1"), "the zombie's end")
    until(lambda: (train_progress(store, "ours", 2) or {}).get("finished"), "the end of the training", seconds=300)
    assert not _training(operator, "node1")
    units = operator.fab("status")["nodes"]["node1"]["units"]
    zombies = [(unit["state"], unit["exit"]) for unit in units if unit["unit"] == "drafthouse-train-e1"]
    assert zombies == [("exited", 76)]

    expected = undisturbed(run, tmp_path / "alone")
    assert len(expected) == STEPS
    assert losses(store.get("drafters/ours/metrics/2.jsonl").decode()) == expected


def _training(operator: Operator, node: str) -> list[str]:
    return [line for line in operator.fleet[node].pids().values() if "drafter train" in line]
