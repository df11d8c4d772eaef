"""A worker process over the doubles: ``python -m tests.doubles.extract_worker URL RUN TTL PAUSE [BATCH GO]``.

It prints a line for each shard that it committed and, at the end, its summary. PAUSE seconds pass in every batch. In
batch BATCH (from 0; three make a shard) it stands still until there is a file GO, so that it is hit in the middle.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from drafthouse.errors import DrafthouseError
from drafthouse.states import ExtractSettings, run_worker
from drafthouse.store import Store
from tests.doubles.extraction import MemoryCorpus, TinyTaps


def main(url: str, run: str, ttl: str, pause: str, batch: str = "-1", go: str = "") -> int:
    torch.set_num_threads(1)
    target = TinyTaps()
    batches = itertools.count()

    def before(_: Tensor) -> None:
        time.sleep(float(pause))
        if next(batches) == int(batch):
            while not Path(go).exists():
                time.sleep(0.01)

    target.before = before
    settings = ExtractSettings(layer_ids=(0, 2), rows=2, ttl_s=float(ttl))

    def report(done: object) -> None:
        print(f"done {getattr(done, 'shard', '')}", flush=True)

    print("started", flush=True)
    try:
        summary = run_worker(Store.open(url), run, MemoryCorpus(shards=6), target, settings, on_shard=report)
    except DrafthouseError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(dataclasses.asdict(summary)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
