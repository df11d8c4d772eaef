"""Training checkpoints: a folder of plain files, valid once its manifest is there and true.

    step-00000400/weights.safetensors    fp32 parameters
    step-00000400/training.safetensors   optimiser state and the global RNG state
    step-00000400/state.json             step, tokens, data position, loss window
    step-00000400/manifest.json          written last: step, specification, size and sha256 of each file above

Nothing is pickled. A folder whose manifest is missing or does not match its files was cut short and is passed
over for the next older one.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthouse.drafter.durable import sha256_of, sync, write_file
from drafthouse.errors import DrafterError

SCHEMA = 1
WEIGHTS, TRAINING, STATE, MANIFEST = (
    "weights.safetensors",
    "training.safetensors",
    "state.json",
    "manifest.json",
)
FILES = (WEIGHTS, TRAINING, STATE, MANIFEST)

_log = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """Where a run stands.

    Attributes:
        step: completed optimiser steps.
        tokens: target tokens read so far.
        position: micro-batches consumed; where the reader goes on.
        losses: the loss of the last steps, oldest first.
    """

    step: int = 0
    tokens: int = 0
    position: int = 0
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """One verified checkpoint, read into memory.

    Attributes:
        path: its folder.
        spec: what the run was (settings, config, data), as given to `save`.
        state: where it stood.
        weights, training: named tensors.
    """

    path: Path
    spec: dict[str, Any]
    state: TrainingState
    weights: dict[str, Tensor]
    training: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds the `step-*` folders; made when needed.
        keep: how many complete ones to keep.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(
        self,
        spec: Mapping[str, Any],
        state: TrainingState,
        weights: Mapping[str, Tensor],
        training: Mapping[str, Tensor],
    ) -> Path:
        """Write one checkpoint, then drop the oldest beyond `keep`.

        Raises:
            DrafterError: the disk is full or not writable; older checkpoints are untouched.
        """
        path = self.place(state.step)
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            save_file({name: t.detach().contiguous() for name, t in weights.items()}, path / WEIGHTS)
            save_file({name: t.detach().contiguous() for name, t in training.items()}, path / TRAINING)
            (path / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
            files = {}
            for name in (WEIGHTS, TRAINING, STATE):
                sync(path / name)
                files[name] = {"size": (path / name).stat().st_size, "sha256": sha256_of(path / name)}
            manifest = {"schema": SCHEMA, "step": state.step, "spec": dict(spec), "files": files}
            write_file(path / MANIFEST, json.dumps(manifest, indent=1).encode())
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise DrafterError(
                f"the checkpoint cannot be written ({error})",
                where=str(path),
                fix="make room and start again",
            ) from error
        self._drop_old(path)
        return path

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; None when none was ever committed.

        Folders that are passed over for it are named in a warning on the log. One without a manifest was never
        committed (the process ended while writing it), so it does not stand in the way of a fresh start.

        Raises:
            DrafterError: checkpoints were committed but none verifies.
        """
        problems = {}
        found = None
        for path in reversed(self.folders()):
            problem = verify(path)
            if problem is None:
                found = path
                break
            problems[path] = problem
        committed = [f"{path.name}: {problem}" for path, problem in problems.items() if (path / MANIFEST).exists()]
        if found is None and committed:
            raise DrafterError(
                f"no checkpoint is whole ({'; '.join(committed)})",
                where=str(self.folder),
                fix="delete the folder to start anew",
            )
        for path, problem in problems.items():
            _log.warning("checkpoint %s is passed over: %s", path, problem)
        return None if found is None else _read(found)

    def folders(self) -> list[Path]:
        """All that claim to be checkpoints, oldest step first; `verify` tells whether one is."""
        return sorted(path for path in self.folder.glob("step-*") if path.is_dir())

    def place(self, step: int) -> Path:
        """Where the checkpoint of `step` lies, or would lie."""
        return self.folder / f"step-{step:08d}"

    def drop(self, path: Path) -> None:
        """Remove one of `folders`."""
        # Without its manifest a folder is no checkpoint, whenever the removal is interrupted.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def _drop_old(self, saved: Path) -> None:
        # What is beyond the step that was just saved was passed over when the run resumed: it counts for nothing.
        whole = [path for path in self.folders() if (path / MANIFEST).exists()]
        counting = [path for path in whole if path <= saved]
        for path in [*counting[: -self.keep], *whole[len(counting) :]]:
            self.drop(path)


def verify(path: Path) -> str | None:
    """What is wrong with the checkpoint in `path`; None when every file is as its manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["schema"] != SCHEMA:
            return f"its schema is {manifest['schema']}, this program reads {SCHEMA}"
        for name in (WEIGHTS, TRAINING, STATE):
            size = (path / name).stat().st_size
            if size != files[name]["size"]:
                return f"{name} has {size} bytes, not {files[name]['size']}: it was cut short"
            if sha256_of(path / name) != files[name]["sha256"]:
                return f"{name} does not have the sha256 of its manifest"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError):
        return "its manifest is damaged"
    return None


def _read(path: Path) -> Checkpoint:
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    state = TrainingState(**json.loads((path / STATE).read_text(encoding="utf-8")))
    return Checkpoint(path, manifest["spec"], state, load_file(path / WEIGHTS), load_file(path / TRAINING))
