"""A worker process over the doubles: ``python -m tests.doubles.extract_worker URL RUN TTL PAUSE``.

It prints a line for each shard that it committed and, at the end, its summary. PAUSE seconds pass in every
batch, so that it can be killed in the middle.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import torch

from drafthouse.errors import DrafthouseError
from drafthouse.states import ExtractSettings, run_worker
from drafthouse.store import Store
from tests.doubles.extraction import MemoryCorpus, TinyTaps


def main(url: str, run: str, ttl: str, pause: str) -> int:
    torch.set_num_threads(1)
    target = TinyTaps()
    target.before = lambda _: time.sleep(float(pause))
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
