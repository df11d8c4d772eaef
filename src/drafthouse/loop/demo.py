"""The whole loop on one machine, one step after another, with a worker killed on purpose on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafthouse.corpus import CorpusReader
from drafthouse.drafter.metrics import read_metrics
from drafthouse.loop import steps
from drafthouse.loop.children import Child, Children
from drafthouse.loop.folder import RunFolder
from drafthouse.loop.report import make_report
from drafthouse.measure import collect_machine
from drafthouse.progress import Progress, Task
from drafthouse.states import StatesReader
from drafthouse.store import Board
from drafthouse.target import Target

EXTRACT_POLL_S = 0.1
"""A small run has few moments in which half of its shards are done and one is worked on."""


@dataclass
class Demo:
    """One run of the loop in a run folder; calling it again goes on where an interrupted one stopped."""

    run: RunFolder
    progress: Progress
    facts: dict[str, Any] = field(default_factory=dict)

    def go(self) -> tuple[dict[str, Any], Path]:
        """Run every step that is not done yet; returns the report and the path of its page."""
        run, scratch = self.run, self.run.settings.target.from_scratch
        # What cannot work is refused before an earlier run is removed and minutes are spent.
        target = None if scratch else self._target()
        run.keep()
        self.facts = run.read("facts") or {
            "machine": collect_machine(),
            "command": " ".join(["drafthouse", *sys.argv[1:]]),
        }
        run.write("facts", self.facts)
        if target is None:
            with run.timed("target"):
                steps.train_target(run, self.progress)
                target = self._target()
        with run.timed("corpus"):
            steps.build_corpus(run, target, self.progress)
        with run.timed("generate"):
            self._answers()
            steps.answering(run).seal(target)
        with run.timed("extract"):
            self._extract()
        with run.timed("train"):
            self._train()
        with run.timed("evaluate"):
            self._evaluate()
            steps.wall_clock(run, target)  # alone on the machine, unlike the evaluations
        with run.timed("report"), self.progress.task("report", 1) as task:
            json_path, page = make_report(run, target, self.facts)
            task.advance()
        return json.loads(json_path.read_text(encoding="utf-8")), page

    def _target(self) -> Target:
        target = steps.load_target(self.run)
        steps.check_fit(self.run, target)
        return target

    def _children(self) -> Children:
        return Children(self.run.path / "logs")

    def _keep_peak(self, children: Children) -> None:
        self.facts["peak_memory_bytes"] = max(self.facts.get("peak_memory_bytes", 0), children.peak_bytes)
        self.run.write("facts", self.facts)

    def _answers(self) -> None:
        names = CorpusReader(self.run.store, steps.CORPUS).shard_names
        board = Board(self.run.store, steps.ANSWERS)
        with self._children() as children, self.progress.task("answers of the target", len(names)) as task:
            shown = _Shown(task)
            if board.remaining(names):
                for number in range(self.run.settings.workers):
                    worker = f"answerer-{number}"
                    children.start(worker, "corpus", "answer", *self._out(), "--worker", worker)
            children.wait(lambda: shown.upto(len(names) - len(board.remaining(names))))
            self._keep_peak(children)

    def _extract(self) -> None:
        """Extraction by several workers, one of which is killed over a shard when half of the shards are done."""
        names = CorpusReader(self.run.store, steps.ANSWERS).shard_names
        board = Board(self.run.store, steps.STATES, ttl_s=self.run.settings.extract.ttl_s)
        with self._children() as children, self.progress.task("hidden states", len(names)) as task:
            shown = _Shown(task)
            workers: list[Child] = []
            if board.remaining(names):
                for number in range(self.run.settings.workers):
                    worker = f"extractor-{number}"
                    workers.append(children.start(worker, "states", "extract", *self._out(), "--worker", worker))

            def watch() -> None:
                committed = len(names) - len(board.remaining(names))
                shown.upto(committed)
                running = [worker for worker in workers if worker.running]
                if "killed_worker" in self.facts or len(running) < 2 or not len(names) // 2 <= committed < len(names):
                    return
                victim = kill_over_a_shard(running, board, names)
                if victim is not None:
                    self.facts["killed_worker"] = victim.name
                    self.run.write("facts", self.facts)
                    shown.note(f"{victim.name} killed on purpose")

            children.wait(watch, poll_s=EXTRACT_POLL_S)
            self._keep_peak(children)
        StatesReader(self.run.store, steps.STATES).verify()

    def _train(self) -> None:
        with self._children() as children:
            names = list(self.run.settings.train)
            total = sum(recipe.steps for recipe in self.run.settings.train.values())
            with self.progress.task(f"train {' and '.join(names)}", total) as task:
                shown = _Shown(task)
                for name in names:
                    if not (self.run.drafter_path(name) / "drafter").exists():
                        children.start(f"train-{name}", "drafter", "train", name, *self._out())

                def watch() -> None:
                    last = {name: self._last_logged(name) for name in names}
                    shown.upto(sum(row["step"] for row in last.values()))
                    shown.note("  ".join(f"{name} {row['loss']:.2f}" for name, row in last.items() if row["step"]))

                children.wait(watch)
            self._keep_peak(children)

    def _last_logged(self, name: str) -> dict[str, Any]:
        file = self.run.drafter_path(name) / "metrics.jsonl"
        rows = [row for row in read_metrics(file) if "loss" in row] if file.exists() else []
        return rows[-1] if rows else {"step": 0, "loss": 0.0}

    def _evaluate(self) -> None:
        names = list(self.run.settings.train)
        with self._children() as children, self.progress.task("evaluate", len(names)) as task:
            shown = _Shown(task)
            for name in names:
                if self.run.read(f"evaluation-{name}") is None:
                    children.start(f"evaluate-{name}", "evaluate", *self._out(), "--drafter", name)
            children.wait(lambda: shown.upto(sum(bool(self.run.read(f"evaluation-{name}")) for name in names)))
            self._keep_peak(children)

    def _out(self) -> list[str]:
        overrides = [word for one in self.run.overrides for word in ("--set", one)]
        return ["--out", str(self.run.path), "--json", *overrides]


def kill_over_a_shard(workers: Sequence[Child], board: Board, names: Sequence[str]) -> Child | None:
    """Kill the first of `workers` that is in the middle of a shard, so that another one has to do it again; None when
    all of them are between two shards just now.

    A worker that was seen with a lease may have committed its shard by the time the signal comes. So it is frozen
    first, looked at once more, and thawed unless it holds a shard of which nothing is uploaded yet.
    """
    for worker in workers:
        if not _held(worker, board, names):
            continue
        worker.freeze()
        held = _held(worker, board, names)
        if held and not any(_uploaded(board, shard) for shard in held):
            worker.kill()
            return worker
        worker.thaw()
    return None


def _held(worker: Child, board: Board, names: Sequence[str]) -> list[str]:
    states = board.states(names).items()
    return [shard for shard, state in states if state.status == "leased" and state.worker == worker.name]


def _uploaded(board: Board, shard: str) -> bool:
    """Whether any data of a shard is there, also half-written."""
    folder = board.objects.local_path(f"data/{shard}")
    if folder is None:
        return bool(board.objects.list(f"data/{shard}"))
    return folder.is_dir() and any(folder.iterdir())


class _Shown:
    """How far a bar has moved, for sources that tell a total."""

    def __init__(self, task: Task) -> None:
        self._task, self._at = task, 0

    def upto(self, count: int) -> None:
        self._task.advance(count - self._at)
        self._at = count

    def note(self, text: str) -> None:
        self._task.advance(0, text)
