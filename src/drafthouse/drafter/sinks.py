"""Where the metrics of a run go besides metrics.jsonl: W&B, TensorBoard, trackio.

None of them is a dependency, and none may stop a training run: what is not installed, not keyed or fails later is named
once in a warning and left alone from then on.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

SinkName = Literal["wandb", "tensorboard", "trackio"]

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """A place for rows of numbers."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class _Tracker:
    """W&B, and trackio which speaks its language."""

    def __init__(self, module: str, project: str, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._module: Any = importlib.import_module(module)
        arguments: dict[str, Any] = {"project": project, "name": name, "config": dict(settings)}
        if module == "wandb":
            keyed = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")
            # Without a key W&B would ask on the terminal; offline files can be sent later with `wandb sync`.
            arguments |= {"dir": str(folder), "mode": None if keyed else "offline"}
        self._run = self._module.init(**arguments)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """All sinks of a run; each fails for itself.

    Args:
        names: which.
        project, run: how trackers file it.
        folder: for what is kept in files.
        settings: of the run, for trackers that show them.
    """

    def __init__(
        self, names: Sequence[SinkName], *, project: str, run: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        self._sinks: dict[str, Sink] = {}
        for name in names:

            def make(name: SinkName = name) -> Sink:
                if name == "tensorboard":
                    return _TensorBoard(folder / "tensorboard")
                return _Tracker(name, project, run, folder, settings)

            opened = self._try(name, make)
            if opened is not None:
                self._sinks[name] = opened

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Hand on the numbers of a row, those inside of its mappings and lists as `name/key`."""
        values = flat(row)
        for name, sink in list(self._sinks.items()):
            self._try(name, lambda sink=sink: sink.write(step, values))  # type: ignore[misc]

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # a tracker is never worth a training run
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            _log.warning("metrics do not go to %s: %s", name, reason)
            self._sinks.pop(name, None)
            return None


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite and infinite numbers of a nested row, by path."""
    found: dict[str, float] = {}
    for key, value in row.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{path}/")
        elif isinstance(value, list | tuple):
            found |= flat({str(index): item for index, item in enumerate(value)}, f"{path}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[path] = float(value)
    return found
