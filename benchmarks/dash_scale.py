"""What the page costs at scale: 200 nodes of 8 GPUs, a run of 10,000 shards, 200 workers that live.

The store is a directory, and with --s3 a SeaweedFS server on this machine. Between two rounds of the collector some
workers speak, some shards are finished and some are begun, as in two seconds of a real run. Most rounds list markers
and words only; one in about ten, at this size, lists the leases again, and has a row of its own. Wall times: the median
of the rounds; their range, and the CPU time of this process, which a busy machine disturbs least, stand beside it. With
--web the heaviest pages are rendered too.

python benchmarks/dash_scale.py --s3 --web     # leaves benchmarks/results/dash_scale.json
python benchmarks/dash_scale.py --quick --out /tmp/rows.json
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))
from rows import Rows
from tests.fixtures_s3 import serve

from drafthouse.dash.collect.extraction import RunSource
from drafthouse.dash.collector import Collector
from drafthouse.dash.prometheus import exposition
from drafthouse.dash.settings import DashSettings
from drafthouse.store import Board, Done, Lease, Store
from drafthouse.store.body import to_body
from drafthouse.store.keys import numbered

SEED = 0
BAR_MS = 300.0
NAMES = ["NVIDIA H200"] * 8


@dataclass
class Scale:
    """How large, and how many rounds are timed. A round sees `spoken` workers and `moved` shards that are new."""

    shards: int
    workers: int
    rounds: int
    spoken: int
    moved: int


class World:
    """A run whose workers are played: their objects are written as they would write them."""

    def __init__(self, store: Store, scale: Scale) -> None:
        self.scale, self.board = scale, Board(store, "states")
        self.shards = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(scale.shards)]
        self._free = iter(self.shards)
        self._leases: list[Lease] = []
        self._speaker = itertools.cycle(range(scale.workers))
        self.board.bind({"shards": scale.shards, "target": "0" * 64, "schema_version": 1})
        done = scale.shards * 9 // 10
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(self._finish, list(pool.map(self._begin, range(done)))))
            self._leases = list(pool.map(self._begin, range(scale.workers)))
            list(pool.map(self._speak, range(scale.workers)))

    def go_on(self) -> None:
        """Two seconds of the run."""
        for _ in range(self.scale.moved):
            self._finish(self._leases.pop(0))
            self._leases.append(self._begin(len(self._leases)))
        for _ in range(self.scale.spoken):
            self._speak(next(self._speaker))

    def _begin(self, number: int) -> Lease:
        epoch = 2 if number % 50 == 0 else 1
        worker = f"node-{number % self.scale.workers:03d}-e1-77"
        shard = next(self._free)
        for each in range(1, epoch + 1):
            lease = Lease(shard, each, worker, f"{number:032x}")
            self.board.objects.put(f"lease/{shard}/{numbered(each)}", to_body(asdict(lease)))
            self.board.heartbeat(lease, {"shard": shard, "tokens": 0, "device": "cuda:0"})
        return lease

    def _finish(self, lease: Lease) -> None:
        marker = Done(
            lease.shard,
            self.board.data_key(lease),
            1 << 28,
            "0" * 64,
            65_536,
            lease.worker,
            lease.epoch,
            lease.token,
            {"samples": 64},
        )
        self.board.objects.put(f"done/{lease.shard}", to_body(asdict(marker)))

    def _speak(self, number: int) -> None:
        node = f"node-{number:03d}"
        gpus = [
            {
                "index": index,
                "uuid": f"GPU-{number:04x}-{index}",
                "name": name,
                "memory_mib": 143_771.0,
                "used_mib": 100_000.0 + index,
                "utilization_percent": 97.0,
                "temperature_c": 61.0,
                "power_w": 650.0 + index,
                "power_limit_w": 700.0,
            }
            for index, name in enumerate(NAMES)
        ]
        held = {lease.shard: 4096 for lease in self._leases if lease.worker.startswith(node)}
        about = {"node": node, "job": "extract", "device": "cuda:0", "ttl_s": 600.0, "waiting": None, "shards": 45}
        self.board.present(f"{node}-e1-77", {**about, "tokens": 0, "held": held, "gpus": gpus})


@dataclass
class Times:
    """Milliseconds of several calls: by the clock on the wall, and of this process's CPU."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def of(self, work: Callable[[], Any]) -> Any:
        """Call it once more; its result."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.cpu.append(1e3 * (time.process_time() - cpu))
        self.wall.append(1e3 * (time.perf_counter() - wall))
        return result

    def add(self, rows: Rows, name: str, size: str, bar: float | None) -> None:
        """One row, against the bar."""
        middle, cpu = statistics.median(self.wall), statistics.median(self.cpu)
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        told = f"{min(self.wall):.0f} to {max(self.wall):.0f} ms, CPU {cpu:.0f} ms, load {load:.1f} a core"
        peer = f"{BAR_MS:g} ms ({told}; {size})"
        rows.add(name, middle, "ms", peer=peer, ratio=BAR_MS / middle, bar=bar, details={"cpu_ms": round(cpu, 2)})


def measure(rows: Rows, url: str, label: str, scale: Scale, *, web: bool) -> None:
    """All rows of one store."""
    size = f"{scale.workers} nodes, {scale.shards} shards, {label}"
    world = World(Store.open(url), scale)
    collector = Collector(DashSettings(stores=(url,)))
    first, light, whole, shown, page = Times(), Times(), Times(), Times(), Times()
    first.of(collector.refresh_now)
    source = next(one for one in collector._sources.all.values() if isinstance(one, RunSource))
    for number in range(scale.rounds):
        world.go_on()
        light.of(collector.refresh_now)
        shown.of(collector.snapshot)
        page.of(lambda: exposition(collector.snapshot()))
        if number % 3 == 2:
            world.go_on()
            source._leases_due = 0.0
            whole.of(collector.refresh_now)
    snapshot = collector.snapshot()
    run = snapshot.extractions[0]
    assert len(snapshot.nodes) == scale.workers, "every worker's node is seen"
    assert sum(worker.alive for worker in run.workers) == scale.workers
    assert run.done == scale.shards * 9 // 10 + (scale.rounds + len(whole.wall)) * scale.moved
    assert len(run.grid) == scale.shards
    first.add(rows, f"first round, {label}", size, None)
    light.add(rows, f"one round, {label}", size, 1.0)
    whole.add(rows, f"one round that lists leases, {label}", size, None)
    shown.add(rows, f"snapshot(), {label}", size, 1.0)
    page.add(rows, f"/metrics, {label}", size, 1.0)
    for path, times in pages(world, collector, scale.rounds).items() if web else ():
        times.add(rows, f"page {path}, {label}", size, 1.0)


def pages(world: World, collector: Collector, rounds: int) -> dict[str, Times]:
    """Every heavy view, as a browser asks for it when something has changed."""
    from drafthouse.dash.web import create_app

    client = create_app(collector.snapshot, collector.settings).test_client()
    taken: dict[str, Times] = {}
    for _ in range(rounds):
        world.go_on()
        collector.refresh_now()
        for path in ("/", "/fleet", "/extraction", "/extraction/states", "/api/snapshot"):
            answer = taken.setdefault(path, Times()).of(partial(client.get, path))
            assert answer.status_code == 200, f"{path}: {answer.status_code}"
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; for tests")
    parser.add_argument("--s3", action="store_true", help="a SeaweedFS server as well")
    parser.add_argument("--web", action="store_true", help="the pages as well")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "dash_scale.json")
    chosen = parser.parse_args()
    scale = Scale(500, 20, 3, 3, 1) if chosen.quick else Scale(10_000, 200, 15, 30, 5)
    rows = Rows(SEED)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        measure(rows, str(folder / "store"), "directory", scale, web=chosen.web)
        if chosen.s3:
            endpoint = stack.enter_context(serve(folder))
            url = f"s3://bench/page?endpoint={endpoint}&region=us-east-1"
            measure(rows, url, "SeaweedFS", scale, web=False)
    rows.write(chosen.out)


if __name__ == "__main__":
    main()
