"""`drafthouse demo` for real, in processes: killed from outside while it works, resumed, looked at from all sides."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafthouse.config import load
from drafthouse.corpus import CorpusReader
from drafthouse.loop.settings import RunSettings
from drafthouse.measure.report_schema import parse_report
from drafthouse.store import Board, Store
from tests.command_line import drafthouse, files_of
from tests.loop_run import RUN_FILE, SHARDS, Walked
from tests.patience import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first test waits for the whole demo, on machines that may be busy
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds children in /proc"),
]
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Demo:
    """A demo that was killed among its answering workers and then resumed to its end.

    Attributes:
        path: the run folder.
        children: how many processes it had started.
        left: those of them that had not ended soon after.
        answered: shards that were answered when it was killed.
        code, out, err: of the demo that went on.
    """

    path: Path
    children: int
    left: set[int]
    answered: int
    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "report.json").read_text(encoding="utf-8"))
        return found

    def read(self, name: str) -> Any:
        return json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))


def start(*words: str | Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "drafthouse.cli", "demo", *map(str, words), "--json"]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children_of(parent: int) -> set[int]:
    return {pid for pid, (ppid, _) in processes().items() if ppid == parent}


def processes() -> dict[int, tuple[int, str]]:
    """Parent and state (Z: ended, and nobody has asked) of every process."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        found[int(stat.parent.name)] = (int(parent), state)
    return found


def alive(pids: set[int]) -> set[int]:
    running = processes()
    return {pid for pid in pids if running.get(pid, (0, "Z"))[1] != "Z"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    run, file = folder / "run", folder / "small.yml"
    file.write_text(RUN_FILE, encoding="utf-8")
    first = start("--out", run, "--file", file)
    leases = run / "store/runs/answers/lease"
    until(
        lambda: any(leases.glob("*/*")),
        "a lease",
        PATIENCE_S,
        unless=lambda: first.poll() is not None and first.communicate()[1],
    )
    children = children_of(first.pid)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    with suppress(AssertionError):  # a test says so
        until(lambda: not alive(children), "the end of its children", seconds=60)
    left = alive(children)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    answered = len(list((run / "store/runs/answers/done").glob("*")))
    second = start("--resume", "--out", run)
    out, err = second.communicate(timeout=PATIENCE_S)
    return Demo(run, len(children), left, answered, second.returncode, out, err)


class TestKilledFromOutside:
    def test_its_children_end_with_it(self, demo: Demo) -> None:
        assert demo.children == 2
        assert demo.left == set()

    def test_it_was_in_the_middle_and_goes_on_to_the_end(self, demo: Demo) -> None:
        assert demo.answered < SHARDS
        assert (demo.code, demo.err) == (0, "")
        assert (demo.path / "report.html").is_file()

    def test_shards_that_were_held_are_taken_over(self, demo: Demo) -> None:
        epochs = [marker.epoch for marker in Board(Store.open(str(demo.path / "store")), "answers").all_done()]
        assert len(epochs) == SHARDS
        assert max(epochs) > 1


class TestReport:
    def test_keys(self, demo: Demo) -> None:
        report = demo.report
        for drafter in ("baseline", "ours"):
            for mode in ("chain", "tree"):
                assert report["acceptance_length"][drafter][mode] >= 1.0
            assert report["acceptance_length"][drafter]["tree"] >= report["acceptance_length"][drafter]["chain"]
        assert report["greedy_identical"] is True
        steps = ("corpus", "generate", "extract", "train", "evaluate")
        assert all(report["seconds"][step] > 0 for step in steps)
        assert report["seconds"]["total"] == pytest.approx(sum(report["seconds"][step] for step in steps), abs=0.1)
        parse_report(report)

    def test_shards(self, demo: Demo) -> None:
        shards = demo.report["shards"]
        assert {key: shards[key] for key in ("expected", "committed", "lost", "duplicated")} == {
            "expected": SHARDS,
            "committed": SHARDS,
            "lost": 0,
            "duplicated": 0,
        }
        killed = shards["killed_worker"]
        assert killed in {"extractor-0", "extractor-1"}
        redone = [row for row in shards["table"] if row["redone"]]
        assert len(redone) == shards["redone"] >= 1
        assert killed not in {row["worker"] for row in redone}
        assert sum(row["samples"] for row in shards["table"]) == 48

    def test_summary_on_standard_output(self, demo: Demo) -> None:
        said = json.loads(demo.out)
        report = demo.report
        assert said["acceptance_length"] == report["acceptance_length"]
        assert said["shards"]["redone"] == report["shards"]["redone"]
        assert "table" not in said["shards"]

    def test_the_page_needs_nothing_from_elsewhere(self, demo: Demo) -> None:
        page = (demo.path / "report.html").read_text(encoding="utf-8")
        sources = re.findall(r"""(?:src|href|srcset|action|data)\s*=\s*["']?([^"'\s>]+)""", page)
        sources += re.findall(r"""url\(\s*["']?([^"')]+)""", page)
        assert {source for source in sources if not source.startswith(("#", "data:"))} == {"report.json"}
        assert "@import" not in page
        assert "<script" not in page
        assert demo.report["shards"]["killed_worker"] in page

    def test_command_and_machine_are_of_the_first_start(self, demo: Demo) -> None:
        assert "--file" in demo.report["command"]
        assert demo.report["command"].startswith("drafthouse demo ")
        assert demo.report["peak_memory_bytes"] > 100 * 2**20


class TestFolder:
    def test_run_file_is_what_was_resolved(self, demo: Demo) -> None:
        written = yaml.safe_load((demo.path / "run.yml").read_text(encoding="utf-8"))
        settings = load(RunSettings, demo.path / "run.yml")
        assert written == settings.model_dump(mode="json") == demo.report["config"]
        assert demo.report["config_digest"] == settings.digest()
        assert written["corpus"]["samples"] == 48
        assert written["train"]["ours"]["loss"]["weights"] == "streak"

    def test_logs(self, demo: Demo) -> None:
        names = {path.stem for path in (demo.path / "logs").glob("*.log")}
        assert names == {
            *("answerer-0", "answerer-1", "extractor-0", "extractor-1"),
            *("train-baseline", "train-ours", "evaluate-baseline", "evaluate-ours"),
        }
        assert json.loads((demo.path / "logs/train-ours.log").read_text(encoding="utf-8"))["steps"] == 12
        killed = demo.report["shards"]["killed_worker"]
        assert (demo.path / f"logs/{killed}.log").read_bytes() == b"", "it was killed before it could say anything"

    def test_nothing_half_written_is_left(self, demo: Demo) -> None:
        names = [name for name in files_of(demo.path) if re.search(r"\.partial|\.tmp|\.new/|\.old/|#\d", name)]
        assert names == []
        data = {path.parent.name for path in (demo.path / "store/runs/states/data").glob("*/*")}
        assert len(data) == SHARDS


class TestDeathChangesNothing:
    """The run of one worker in one process, against several workers of which some were killed."""

    def test_the_sealed_corpus(self, demo: Demo, walked: Walked) -> None:
        one, many = (CorpusReader(Store.open(str(path / "store")), "answers") for path in (walked.path, demo.path))
        assert {marker.worker for marker in Board(Store.open(str(demo.path / "store")), "answers").all_done()} == {
            "answerer-0",
            "answerer-1",
        }
        assert many.manifest.digest == one.manifest.digest
        assert files_of(demo.path / "store/answers") == files_of(walked.path / "store/answers")

    def test_hidden_states(self, demo: Demo, walked: Walked) -> None:
        one, many = (Board(Store.open(str(path / "store")), "states").all_done() for path in (walked.path, demo.path))
        assert [(marker.shard, marker.sha256) for marker in many] == [(marker.shard, marker.sha256) for marker in one]

    @pytest.mark.parametrize("name", ["baseline", "ours"])
    def test_drafters_and_what_they_accept(self, name: str, demo: Demo, walked: Walked) -> None:
        one, many = (files_of(path / "drafters" / name / "drafter") for path in (walked.path, demo.path))
        assert many == one
        before, after = (
            json.loads((path / f"evaluation-{name}.json").read_text()) for path in (walked.path, demo.path)
        )
        del before["seconds"], after["seconds"]
        assert after == before


@dataclass(frozen=True)
class Before:
    """The run as it was before it was resumed although complete."""

    files: dict[str, str]
    report: dict[str, Any]
    logs: dict[str, int]


def logs_of(demo: Demo) -> dict[str, int]:
    """When the processes of the run last said something, or began to."""
    return {path.name: path.stat().st_mtime_ns for path in (demo.path / "logs").iterdir()}


@pytest.fixture(scope="module")
def again(demo: Demo) -> Before:
    before = Before(files_of(demo.path), demo.report, logs_of(demo))
    assert drafthouse("demo", "--resume", "--out", demo.path, "--json").result["shards"]["committed"] == SHARDS
    return before


class TestAgain:
    """Last in this file: it writes into the run."""

    def test_nothing_is_done_twice(self, demo: Demo, again: Before) -> None:
        def kept(files: dict[str, str]) -> dict[str, str]:
            changing = ("report.json", "report.html", ".clock")
            return {name: sha256 for name, sha256 in files.items() if not name.endswith(changing)}

        assert kept(files_of(demo.path)) == kept(again.files)
        assert logs_of(demo) == again.logs, "no process was started"
        report = demo.report
        assert report.keys() == again.report.keys()
        assert [key for key in report if report[key] != again.report[key]] == ["created", "seconds"]

    def test_time_that_was_spent_is_not_counted_again(self, demo: Demo, again: Before) -> None:
        seconds = demo.report["seconds"]
        assert {key: value for key, value in seconds.items() if key != "total"} == demo.read("seconds")
        assert {key: seconds[key] for key in again.report["seconds"] if key != "total"} == {
            key: value for key, value in again.report["seconds"].items() if key != "total"
        }

    def test_free_settings_may_change_and_reach_the_processes(self, demo: Demo) -> None:
        (demo.path / "evaluation-ours.json").unlink()
        ended = drafthouse("demo", "--resume", "--out", demo.path, "--set", "evaluate.rows=3", "--set", "threads=1")
        assert (ended.code, ended.err.splitlines()[-1]) == (0, "report: done")
        assert re.search(r"redone after extractor-\d was killed", ended.out)
        assert demo.report["greedy_identical"] is True
        assert demo.report["config"]["evaluate"]["rows"] == 3
        assert load(RunSettings, demo.path / "run.yml").evaluate.rows == 8

    def test_other_settings_are_refused_by_name(self, demo: Demo) -> None:
        said = drafthouse("demo", "--resume", "--out", demo.path, "--set", "corpus.samples=64").sentence
        assert said == (
            f"{demo.path}/run.yml: this run was begun with other settings (corpus.samples: 48 → 64);"
            " choose another --out, or delete the folder"
        )
