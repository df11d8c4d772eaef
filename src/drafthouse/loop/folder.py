"""A run folder: the resolved run file, the store, and what each step left behind."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from drafthouse.config import differences, load
from drafthouse.errors import ConfigError
from drafthouse.loop.job import JobContext
from drafthouse.loop.settings import DEMO_RUN_FILE, RunSettings
from drafthouse.store import Store
from drafthouse.store.translate import explain

RUN_FILE = "run.yml"
# All that a run puts into its folder: whatever else lies there is not ours to remove.
PARTS = (
    RUN_FILE,
    "facts.json",
    "seconds.json",
    "finished.json",
    "evaluation-*.json",
    "wall-clock.json",
    "report.json",
    "report.html",
    "store",
    "logs",
    "drafters",
    "target",
    "target.*",
    "*.partial",
)
# Settings that decide how fast a step is and not what comes out: they may differ between workers and restarts.
FREE = (
    "threads",
    "workers",
    "target.device",
    "answers.rows",
    "extract.engine*",
    "extract.rows",
    "extract.batch_tokens",
    "extract.pad_multiple",
    "extract.ttl_s",
    "extract.writer_*",
    "extract.shards_in_flight",
    "extract.scratch",
    "extract.disk_*",
    "train.*.log_every",
    "train.*.evaluate_every",
    "train.*.checkpoint_every",
    "train.*.keep_checkpoints",
    "train.*.sinks",
    "train.*.project",
    "evaluate.rows",
)

_ELSEWHERE = "choose another --out"


class RunFolder:
    """Everything of one run under one folder.

    Attributes:
        path: the folder.
        settings: the resolved run file.
        store: object store of corpus and states.
        overrides: `--set` values in which `settings` differ from the folder's own, for further processes.
    """

    def __init__(self, path: Path, settings: RunSettings, overrides: Sequence[str] = (), *, new: bool = False) -> None:
        self.path, self.settings, self.overrides, self._new = path, settings, tuple(overrides), new
        job = JobContext.from_environment()
        # A job's own folder stays behind when it moves, so what its run file leaves open is the job's store.
        elsewhere = settings.store or (job.store_url if job else None)
        self.store = Store.open(elsewhere or str((path / "store").absolute()))

    @classmethod
    def begin(
        cls, path: Path, file: Path | None = None, overrides: Sequence[str] = (), *, anew: bool = False
    ) -> RunFolder:
        """The run in `path`, or a new one of `file` (none: the demo's) and `--set` overrides.

        Nothing is written or removed before `keep`.

        Args:
            anew: take a new one although there is a run; `keep` removes that.

        Raises:
            ConfigError: the run file is wrong, or `path` holds a run of other settings or something that no
                run has put there.
        """
        if path.exists() and not path.is_dir():
            raise ConfigError("this is a file, and a run is a folder", where=str(path), fix=_ELSEWHERE)
        there = (path / RUN_FILE).exists()
        if there and not anew:
            return cls.open(path, file, overrides)
        settings = load(RunSettings, file or DEMO_RUN_FILE, overrides)
        foreign = _foreign(path)
        if foreign is not None and not there:
            raise ConfigError(f"this folder is not a run: it holds '{foreign}'", where=str(path), fix=_ELSEWHERE)
        if there and file is not None and file.resolve() == (path / RUN_FILE).resolve():
            foreign = RUN_FILE  # written by hand, or it would not be given
        if foreign is not None:
            raise ConfigError(
                f"a new run replaces the run in this folder, and '{foreign}' would be lost",
                where=str(path),
                fix=f"{_ELSEWHERE}, or go on with --resume",
            )
        return cls(path, settings, new=True)

    def keep(self) -> None:
        """Make the folder of a new run, in place of the run that was there; an older run stays as it is.

        Raises:
            ConfigError: the folder cannot be made.
            StoreError: its disk is full.
        """
        if not self._new:
            return
        try:
            if (self.path / RUN_FILE).exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"the folder cannot be made ({reason})", where=str(self.path), fix=_ELSEWHERE) from error
        _write_text(self.path / RUN_FILE, yaml.safe_dump(self.settings.model_dump(mode="json"), sort_keys=False))
        self._new = False

    @classmethod
    def open(cls, path: Path, file: Path | None = None, overrides: Sequence[str] = ()) -> RunFolder:
        """The run in `path` as it was begun. `FREE` settings may be overridden, for this process only.

        Raises:
            ConfigError: there is no run, its run file is wrong, or `file` and `overrides` (which count on top
                of the run's own file) mean another run; names the settings that differ.
        """
        run_file = path / RUN_FILE
        if not run_file.exists():
            raise ConfigError(
                "there is no run here",
                where=str(path),
                fix="check --out, or begin one with `drafthouse demo` or `drafthouse corpus build`",
            )
        there = load(RunSettings, run_file)
        if file is None and not overrides:
            return cls(path, there)
        wanted = load(RunSettings, file or run_file, overrides)
        values = wanted.model_dump(mode="json")
        found = {one.partition(":")[0]: one for one in differences(there.model_dump(mode="json"), values)}
        different = [one for key, one in found.items() if not any(fnmatchcase(key, free) for free in FREE)]
        if different:
            raise ConfigError(
                f"this run was begun with other settings ({'; '.join(different[:3])})",
                where=str(run_file),
                fix=f"{_ELSEWHERE}, or delete the folder",
            )
        return cls(path, wanted, [f"{key}={json.dumps(_at(values, key))}" for key in found])

    def target_path(self) -> Path:
        """Where a target trained from scratch lies."""
        return self.path / "target"

    def drafter_path(self, name: str) -> Path:
        """Training folder of one drafter: metrics.jsonl, checkpoints/, drafter/."""
        return self.path / "drafters" / name

    def read(self, name: str) -> dict[str, Any] | None:
        """The JSON result that a step left, or None.

        Raises:
            ConfigError: it is not JSON: something else has written there.
        """
        file = self.path / f"{name}.json"
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            raise ConfigError(
                "this result is damaged", where=str(file), fix="delete it and run its step again"
            ) from None
        return found

    def write(self, name: str, result: dict[str, Any]) -> None:
        """Keep the result of a step; it appears at once and whole."""
        _write_text(self.path / f"{name}.json", json.dumps(result, indent=1) + "\n")

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the seconds of a step to seconds.json. A step that is resumed adds up; one that has ended before
        and only finds everything done does not."""
        began = time.perf_counter()
        finished = self.read("finished") or {"steps": []}
        try:
            yield
        finally:
            if step not in finished["steps"]:
                seconds = self.read("seconds") or {}
                seconds[step] = round(seconds.get(step, 0.0) + time.perf_counter() - began, 2)
                self.write("seconds", seconds)
        if step not in finished["steps"]:
            self.write("finished", {"steps": [*finished["steps"], step]})


def _foreign(path: Path) -> str | None:
    """Name of something in the folder that no run has put there; of a folder without a run, anything."""
    if not path.exists():
        return None
    known = PARTS if (path / RUN_FILE).exists() else (f"{RUN_FILE}.partial",)
    names = sorted(entry.name for entry in path.iterdir())
    return next((name for name in names if not any(fnmatchcase(name, part) for part in known)), None)


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _write_text(file: Path, text: str) -> None:
    partial = file.with_name(file.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise explain(error, str(file)) from error
