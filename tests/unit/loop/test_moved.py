"""Jobs on a second node: a run file and the job's environment are all that it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from drafthouse.drafter.metrics import read_metrics
from drafthouse.errors import ConfigError
from drafthouse.fleet.runtime import supervisor
from drafthouse.fleet.runtime.protocol import Launch
from drafthouse.loop import steps
from drafthouse.loop.folder import RunFolder
from drafthouse.progress import Silent
from drafthouse.store import Fence, Store
from drafthouse.target import Target
from tests.command_line import drafthouse, files_of
from tests.loop_run import RUN_FILE, Walked
from tests.patience import until

Enter = Callable[[str, int], Path]


@pytest.fixture
def store(run: Path) -> Store:
    """The store of a run whose drafters are not trained yet, as far as anyone can see who has only the store."""
    return Store.open(str(run / "store"))


@pytest.fixture
def enter(store: Store, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Become a life of the job on a node: returns its run folder, which holds nothing but the run file."""

    def be(node: str, epoch: int) -> Path:
        values = {"JOB": "a-job", "EPOCH": str(epoch), "NODE": node, "JOB_STORE": str(run / "store")}
        for name, value in values.items():
            monkeypatch.setenv(f"DRAFTHOUSE_{name}", value)
        folder = tmp_path / node
        folder.mkdir(exist_ok=True)
        (folder / "run.yml").write_text(RUN_FILE, encoding="utf-8")
        return folder

    return be


def progress(store: Store, epoch: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(f"drafters/ours/progress/{epoch}"))
    return found


def test_training(store: Store, enter: Enter, walked: Walked, target: Target) -> None:
    node = enter("node-a", 1)
    trained = drafthouse("drafter", "train", "ours", "--out", node, "--json").result
    assert (trained["steps"], trained["stopped"], trained["resumed_from"]) == (12, "finished", None)
    mine, theirs = (folder / "drafters/ours" for folder in (node, walked.path))
    assert files_of(mine / "drafter") == files_of(theirs / "drafter")
    said = progress(store, 1)
    assert (said["job"], said["node"], said["finished"]) == ("a-job", "node-a", True)
    assert said["worker"] == f"node-a-e1-{os.getpid()}"

    other = enter("node-b", 2)
    Fence(store, "a-job").raise_to(2, {})
    again = drafthouse("drafter", "train", "ours", "--out", other, "--json").result
    assert (again["steps"], again["resumed_from"], again["seconds"]) == (12, 12, 0.0)
    assert again["loss"] == pytest.approx(trained["loss"])
    rows = [read_metrics(folder / "drafters/ours/metrics.jsonl") for folder in (node, other)]
    assert rows[0] == rows[1]
    assert progress(store, 2)["resumed_from"] == 12

    third = RunFolder.open(enter("node-c", 2))
    found = steps.load_trained(third, target, "ours")
    assert found.config == steps.drafter_config(third, target)
    with pytest.raises(ConfigError, match="the drafter 'baseline' is not trained yet"):
        steps.load_trained(third, target, "baseline")


def test_extraction_is_named_after_the_node(enter: Enter) -> None:
    summary = drafthouse("states", "extract", "--out", enter("ct129", 4), "--json").result
    assert summary["worker"] == f"ct129-e4-{os.getpid()}"
    assert (summary["shards"], summary["interrupted"]) == (0, False)


@pytest.mark.parametrize("verb", [("drafter", "train", "ours"), ("states", "extract"), ("corpus", "answer")])
def test_a_life_that_is_over_ends_with_its_own_exit_status(store: Store, enter: Enter, verb: tuple[str, ...]) -> None:
    node = enter("zombie", 1)
    Fence(store, "a-job").raise_to(2, {})
    for name in ("states", "answers"):
        for info in store.list(f"runs/{name}/done")[:1]:
            store.delete(f"{info.key}")
    before = {info.key for info in store.list()}
    ended = drafthouse(*verb, "--out", node, "--json")
    assert ended.code == 76
    assert ended.err.startswith("error: ")
    assert "epoch 1 of this job is over: epoch 2 was declared" in ended.err
    assert {info.key for info in store.list()} == before


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nodes run Linux")
def test_a_life_that_is_over_is_not_started_again_below_torchrun(store: Store, enter: Enter, tmp_path: Path) -> None:
    """torchrun, as the shipped extraction is started, makes exit status 1 of a worker's 76."""
    node = enter("zombie", 1)
    Fence(store, "a-job").raise_to(2, {})
    for info in store.list("runs/states/done")[:1]:
        store.delete(info.key)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch = Launch(
        job="a-job",
        epoch=1,
        argv=(*launcher, "-m", "drafthouse.cli", "states", "extract", "--out", str(node)),
        env={name: value for name, value in os.environ.items() if name.startswith(("DRAFTHOUSE_", "OMP_"))},
        restart="on-failure",
        retries=1,
    )
    root = tmp_path / "root"

    def ask(verb: str, *words: str, request: str = "") -> dict[str, Any]:
        argv = [sys.executable, supervisor.__file__, verb, str(root), launch.unit, *words]
        done = subprocess.run(argv, input=request, capture_output=True, text=True, timeout=240, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    ask("start", request=json.dumps(asdict(launch)))
    try:
        until(lambda: ask("status")["state"] == "exited", "the unit's end", seconds=240, every=0.5)
        found = ask("status")
    finally:
        ask("stop", "0")
    log = (root / "units" / launch.unit / "log").read_text(encoding="utf-8")
    assert (found["state"], found["exit"], found["restarts"]) == ("exited", 76, 0), log
    assert "epoch 1 of this job is over: epoch 2 was declared" in log
    assert "ChildFailedError" in log, "it was torchrun that ended, with a status of its own"


def test_nonsense_in_the_environment_is_one_sentence(enter: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    node = enter("node", 1)
    monkeypatch.setenv("DRAFTHOUSE_EPOCH", "first")
    said = drafthouse("drafter", "train", "ours", "--out", node, "--json").sentence
    assert said.startswith("the environment: DRAFTHOUSE_EPOCH='first' is not an epoch")


class TestWithoutAJob:
    def test_a_local_run_keeps_nothing_elsewhere(self, run: Path, store: Store, target: Target) -> None:
        steps.train_drafter(RunFolder.open(run), target, "ours", Silent())
        assert store.list("drafters") == []

    def test_unless_it_is_asked_to(self, run: Path, store: Store, target: Target) -> None:
        steps.train_drafter(RunFolder.open(run), target, "ours", Silent(), mirror=True)
        assert progress(store, 0)["finished"]
        assert {info.key.split("/")[2] for info in store.list("drafters")} == {
            "checkpoints",
            "drafter",
            "metrics",
            "progress",
        }
