"""A run folder: the resolved run file, the store, and what each step left behind."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from drafthouse.config import differences, load
from drafthouse.errors import ConfigError
from drafthouse.loop.settings import DEMO_RUN_FILE, RunSettings
from drafthouse.store import Store

RUN_FILE = "run.yml"


class RunFolder:
    """Everything of one run under one folder.

    Attributes:
        path: the folder.
        settings: the resolved run file.
        store: object store of corpus and states.
    """

    def __init__(self, path: Path, settings: RunSettings) -> None:
        self.path, self.settings = path, settings
        self.store = Store.open(settings.store or str((path / "store").absolute()))

    @classmethod
    def open(cls, path: Path, file: Path | None = None, overrides: Sequence[str] = ()) -> RunFolder:
        """The run in `path`, begun with `file` and `--set` overrides if it is not there yet.

        Raises:
            ConfigError: the run file is wrong, or the folder holds a run of other settings.
        """
        run_file = path / RUN_FILE
        if not run_file.exists():
            settings = load(RunSettings, file or DEMO_RUN_FILE, overrides)
            path.mkdir(parents=True, exist_ok=True)
            _write_text(run_file, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
            return cls(path, settings)
        there = load(RunSettings, run_file)
        if file is not None or overrides:
            wanted = load(RunSettings, file or DEMO_RUN_FILE, overrides)
            different = differences(there.model_dump(mode="json"), wanted.model_dump(mode="json"))
            if different:
                raise ConfigError(
                    f"this run was begun with other settings ({'; '.join(different[:3])})",
                    where=str(run_file),
                    fix="choose another --out, or delete the folder",
                )
        return cls(path, there)

    @classmethod
    def check(cls, file: Path | None, overrides: Sequence[str]) -> None:
        """Raise ConfigError for a wrong run file, before anything is removed for it."""
        load(RunSettings, file or DEMO_RUN_FILE, overrides)

    @classmethod
    def clear(cls, path: Path) -> None:
        """Remove an earlier run in `path`, and nothing that is not a run.

        Raises:
            ConfigError: the folder holds something else.
        """
        if not path.exists() or not any(path.iterdir()):
            return
        if not (path / RUN_FILE).exists():
            raise ConfigError("this folder is not a run", where=str(path), fix="choose another --out")
        shutil.rmtree(path)

    def target_path(self) -> Path:
        """Where a target trained from scratch lies."""
        return self.path / "target"

    def drafter_path(self, name: str) -> Path:
        """Training folder of one drafter: metrics.jsonl, checkpoints/, drafter/."""
        return self.path / "drafters" / name

    def read(self, name: str) -> dict[str, Any] | None:
        """The JSON result that a step left, or None."""
        file = self.path / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def write(self, name: str, result: dict[str, Any]) -> None:
        """Keep the result of a step; it appears at once and whole."""
        _write_text(self.path / f"{name}.json", json.dumps(result, indent=1) + "\n")

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the seconds of a step to seconds.json; a step that is resumed adds up."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = self.read("seconds") or {}
            seconds[step] = round(seconds.get(step, 0.0) + time.perf_counter() - began, 2)
            self.write("seconds", seconds)


def _write_text(file: Path, text: str) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
