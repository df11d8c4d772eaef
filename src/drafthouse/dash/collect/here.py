"""This machine: its GPUs, and run folders on its disks."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from drafthouse.dash.collect.source import Source
from drafthouse.dash.model import GpuView, NodeView
from drafthouse.gpu import read_gpus

PACE_S = 5.0


class HereSource(Source):
    """The GPUs of the machine that shows the page; without any it is no node of interest."""

    def __init__(self, pace_s: float) -> None:
        super().__init__("GPUs of this machine", max(PACE_S, pace_s))
        self._name = socket.gethostname()
        self._view: NodeView | None = None

    def view(self) -> NodeView | None:
        """The machine as a node; None without GPUs."""
        return self._view

    def look(self) -> None:
        found, now = read_gpus(), datetime.now(UTC)
        if found:
            gpus = tuple(
                GpuView.model_validate({**gpu.as_dict(), "index": gpu.index or 0, "source": "local", "at": now})
                for gpu in found
            )
            self._view = NodeView(name=self._name, state="answers", last_seen=now, gpus=gpus)


class RunFolderSource(Source):
    """A run folder: where its store is, and which drafters it trains.

    Attributes:
        store: URL of its store; None before the folder could be read.
        steps: recipe -> steps of its training.
    """

    def __init__(self, path: Path, pace_s: float) -> None:
        super().__init__(f"run folder {path}", max(PACE_S, pace_s))
        self.path = path
        self.store: str | None = None
        self.steps: Mapping[str, int] = {}

    def look(self) -> None:
        if self.store is not None:
            return  # a run's settings never change
        from drafthouse.loop.folder import RunFolder  # brings torch, which the rest of the page does not need

        run = RunFolder.open(self.path)
        self.steps = {name: settings.steps for name, settings in run.settings.train.items()}
        self.store = run.settings.store or str((self.path / "store").absolute())

    def metrics(self, recipe: str) -> Path:
        """Where a training of it writes its rows."""
        return self.path / "drafters" / recipe / "metrics.jsonl"
