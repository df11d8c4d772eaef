"""A training run as a process of its own: `python -m tests.unit.drafter.train_process <out_dir> [<batch> <go>]`.

In front of that batch it stands still until there is a file <go>.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from drafthouse.drafter.trainer import TrainSettings, train
from tests.unit.drafter.doubles import Head, Source, tiny_config

SETTINGS = TrainSettings.model_validate(
    {
        "steps": 24,
        "rows": 4,
        "anchors": 6,
        "accumulate": 2,
        "seed": 3,
        "log_every": 1,
        "checkpoint_every": 5,
        "optimizer": {"kind": "muon", "lr": 2e-3},
        "loss": {"weights": "streak", "soft_weight": 0.5},
        "noise": {"kind": "cosine", "sigma": 0.1},
    }
)


def main(out_dir: Path, batch: int = -1, go: Path = Path()) -> dict[str, Any]:
    config = tiny_config()
    head = Head(config.vocab_size, config.hidden_size)
    source = Source(config, head)
    source.held_at, source.go = batch, go
    result = train(source, head, config, SETTINGS, out_dir)
    return {"resumed_from": result.resumed_from, "steps": result.steps, "loss": result.loss}


if __name__ == "__main__":
    words = sys.argv[1:]
    print(json.dumps(main(Path(words[0]), int(words[1]), Path(words[2])) if words[1:] else main(Path(words[0]))))
