from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from drafthouse.errors import ConfigError
from drafthouse.loop import steps
from drafthouse.loop.folder import RunFolder
from drafthouse.loop.report import assemble, make_report, summary, verdict
from drafthouse.store import Board
from drafthouse.target import Target
from tests.command_line import drafthouse, files_of
from tests.loop_run import SHARDS, Walked


class TestVerdict:
    LENGTHS = {"ours": {"chain": 3.0, "tree": 3.5}, "baseline": {"chain": 2.0, "tree": 2.5}}  # noqa: RUF012

    def test_a_win(self) -> None:
        said = verdict(self.LENGTHS, {"chain": 9, "tree": 9}, 9)
        assert "accepts 3.00 tokens a target pass as a chain and 3.50 as a tree, 50% more than the baseline" in said
        assert said.endswith("(2.00 and 2.50); every greedy text is the target's own, token for token.")

    def test_a_loss_is_said(self) -> None:
        lost = {"ours": self.LENGTHS["baseline"], "baseline": self.LENGTHS["ours"]}
        assert "33% fewer than the baseline recipe" in verdict(lost, {"chain": 9, "tree": 9}, 9)

    def test_a_text_that_differs_is_said(self) -> None:
        said = verdict(self.LENGTHS, {"chain": 9, "tree": 7}, 9)
        assert said.endswith("; but 2 of 9 greedy texts differ from the target's own.")


class TestAssemble:
    def test_without_demo_nobody_was_killed(self, walked: Walked) -> None:
        report = json.loads((walked.path / "report.json").read_text(encoding="utf-8"))
        assert report["command"] == "drafthouse report"
        assert report["shards"]["killed_worker"] is None
        assert (report["shards"]["committed"], report["shards"]["redone"]) == (SHARDS, 0)
        assert "peak_memory_bytes" not in report

    def test_content(self, walked: Walked) -> None:
        report = json.loads((walked.path / "report.json").read_text(encoding="utf-8"))
        assert report["name"] == "small"
        assert report["seeds"] == {"corpus": 0, "answers": 0, "probe": 1, "train.baseline": 0, "train.ours": 0}
        assert report["corpus"]["digest"] == walked.results["seal"]["digest"]
        assert report["target"]["name"] == "embedded small hybrid"
        ours = report["training"]["ours"]
        assert [point["step"] for point in ours["curve"]] == [1, 4, 8, 12]
        assert "acceptance" in ours["curve"][-1]
        assert (len(ours["slot_accuracy"]), ours["taps"]) == (3, [0, 2])
        assert ours["recipe"]["noise kind"] == "cosine"
        assert {key for sample in report["samples"] for key in sample["runs"]} == {
            "baseline/chain",
            "baseline/tree",
            "ours/chain",
            "ours/tree",
        }

    def test_one_text_that_differs_is_not_identical(self, run: Path, target: Target) -> None:
        folder = RunFolder.open(run)
        found = folder.read("evaluation-baseline")
        assert found is not None
        found["identical"]["tree"] -= 1
        folder.write("evaluation-baseline", found)
        report = assemble(folder, target, {})
        assert report["greedy_identical"] is False
        assert report["identical"] == {"prompts": 4, "chain": 4, "tree": 3}
        assert "1 of 4 greedy texts differ" in report["verdict"]

    def test_a_shard_that_is_gone_is_lost(self, run: Path, target: Target) -> None:
        """Counted from what a reader sees, whatever workers have said."""
        folder = RunFolder.open(run)
        marker = Board(folder.store, steps.STATES).all_done()[0]
        (run / "store/runs/states/done" / marker.shard).unlink()
        shards = assemble(folder, target, {})["shards"]
        assert (shards["expected"], shards["committed"], shards["lost"], shards["duplicated"]) == (
            SHARDS,
            SHARDS - 1,
            1,
            0,
        )
        assert marker.shard not in {row["shard"] for row in shards["table"]}

    def test_a_shard_that_counts_twice_is_duplicated(self, run: Path, target: Target) -> None:
        folder = RunFolder.open(run)
        states = run / "store/runs/states"
        marker = Board(folder.store, steps.STATES).all_done()[0]
        twin = "f" * 64
        shutil.copytree(states / "data" / marker.shard, states / "data" / twin)
        done = (states / "done" / marker.shard).read_text(encoding="utf-8").replace(marker.shard, twin)
        (states / "done" / twin).write_text(done, encoding="utf-8")
        assert assemble(folder, target, {})["shards"]["duplicated"] == 1


class TestMakeReport:
    def test_a_step_that_is_missing(self, run: Path, target: Target) -> None:
        (run / "evaluation-ours.json").unlink()
        before = files_of(run)
        with pytest.raises(ConfigError, match=r"there is no evaluation-ours.json yet; run `drafthouse evaluate` first"):
            make_report(RunFolder.open(run), target, {})
        assert files_of(run) == before

    def test_the_verb_keeps_what_the_demo_knew(self, run: Path) -> None:
        folder = RunFolder.open(run)
        facts = {"command": "drafthouse demo", "killed_worker": "extractor-0", "peak_memory_bytes": 7}
        folder.write("facts", facts)
        drafthouse("report", "--out", run, "--json").result["page"]
        report = json.loads((run / "report.json").read_text(encoding="utf-8"))
        assert (report["command"], report["peak_memory_bytes"]) == ("drafthouse demo", 7)
        assert report["shards"]["killed_worker"] == "extractor-0"

    def test_summary(self, walked: Walked) -> None:
        report = json.loads((walked.path / "report.json").read_text(encoding="utf-8"))
        short = summary(report)
        assert "table" not in short["shards"]
        assert set(short) == {
            *("acceptance_length", "greedy_identical", "seconds", "verdict", "shards", "target", "torch_threads"),
        }
