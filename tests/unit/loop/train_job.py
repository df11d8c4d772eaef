"""A job's training over the doubles, as a process: `python -m tests.unit.loop.train_job URL FOLDER BATCH GO`.

Who it is stands in the environment, as the fleet sets it. In front of batch BATCH it stands still until there is a file
GO, so that it is hit between two steps. It prints its result as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from drafthouse.drafter import TrainResult
from drafthouse.drafter.trainer import TrainSettings
from drafthouse.errors import DrafthouseError
from drafthouse.loop.job import FenceWatch, JobContext
from drafthouse.loop.training import train_kept
from drafthouse.store import Store
from tests.unit.drafter.doubles import Head, Source, tiny_config

RECIPE = "ours"
SETTINGS = TrainSettings.model_validate(
    {
        "steps": 24,
        "rows": 4,
        "anchors": 6,
        "seed": 3,
        "log_every": 1,
        "checkpoint_every": 5,
        "evaluate_every": 10,
        "optimizer": {"kind": "muon", "lr": 2e-3},
        "loss": {"weights": "streak", "soft_weight": 0.5},
        "noise": {"kind": "cosine", "sigma": 0.1},
    }
)


def work(
    store: Store | None,
    folder: Path,
    *,
    watch: FenceWatch | None = None,
    source: Source | None = None,
    settings: TrainSettings = SETTINGS,
) -> TrainResult:
    """One call of the training, in this process."""
    made = source or source_of(0.0)
    return train_kept(
        made,
        made.head,
        made.config,
        settings,
        folder,
        RECIPE,
        store=store,
        watch=watch,
        evaluate=lambda model, step: {"acceptance": float(model.fc.weight.detach().sum())},
    )


def source_of(pause: float, kind: type[Source] = Source) -> Source:
    config = tiny_config()
    return kind(config, Head(config.vocab_size, config.hidden_size), pause=pause)


def main(url: str, folder: str, batch: str, go: str) -> int:
    torch.set_num_threads(1)
    store, job = Store.open(url), JobContext.from_environment()
    print("started", flush=True)
    try:
        watch = job.watch(store) if job else None
        source = source_of(0.0)
        source.held_at, source.go = int(batch), Path(go)
        result = work(store, Path(folder), watch=watch, source=source)
    except DrafthouseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    said: dict[str, Any] = {name: getattr(result, name) for name in ("steps", "loss", "resumed_from", "stopped")}
    print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
