"""What the path into the store costs, as ratios of wall times in one run: who takes turns, median of N rounds.

Objects go into a SeaweedFS server on this machine (and into a directory) against a plain copy to the same disk and
against curl's single request to the same server; leases against one bare create-only put.

python benchmarks/store_path.py                  # leaves benchmarks/results/store_path.json
python benchmarks/store_path.py --quick --out /tmp/rows.json
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))
from rows import Rows
from tests.fixtures_s3 import ACCESS_KEY, SECRET_KEY, serve

from drafthouse.store import Board, Store

SEED = 0


class Turns:
    """Wall seconds of several works that take turns, so that a busy machine is busy for all of them."""

    def __init__(self, rounds: int, before: Callable[[], object] | None = None, **works: Callable[[], object]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in works}
        for number in range(rounds + 1):
            for name, work in works.items():
                if before is not None:
                    before()
                os.sync()  # or the next one's fsync would wait for what this one has left
                began = time.perf_counter()
                work()
                if number:  # the first round warms connections, volumes and caches
                    self.seconds[name].append(time.perf_counter() - began)

    def add(self, rows: Rows, label: str, ours: str, peer: str, peer_name: str, unit: str, amount: float) -> None:
        """One row: `amount` a second (or, for "ms…", milliseconds an amount) and how many times faster than the peer:
        the median of the rounds' ratios, with the smallest and the largest beside the peer's name."""
        mine, theirs = self.seconds[ours], self.seconds[peer]
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        middle = statistics.median(mine)
        value = middle / amount * 1e3 if unit.startswith("ms") else amount / middle
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds, load {load:.1f} a core"
        rows.add(label, value, unit, peer=f"{peer_name} ({spread})", ratio=statistics.median(ratios))


def _run(*words: str | Path) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True)


def transfers(rows: Rows, folder: Path, endpoint: str, rounds: int, mib: int) -> None:
    """One large object, there and back."""
    source, copy = folder / "source", folder / "copy"
    source.write_bytes(random.Random(SEED).randbytes(mib * 2**20))
    bucket = Store.open(f"s3://bench/objects?endpoint={endpoint}&region=us-east-1")
    bucket.probe()
    disk = Store.open(str(folder / "store"))
    signed = ("--aws-sigv4", "aws:amz:us-east-1:s3", "--user", f"{ACCESS_KEY}:{SECRET_KEY}")
    curl = ("curl", "-sS", "--fail", *signed, "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD")

    def clear() -> None:
        # Nothing is written over: data objects have names of their own, and freeing a file's blocks costs time.
        disk.delete("ours")
        bucket.delete("ours")
        copy.unlink(missing_ok=True)

    there = Turns(
        rounds,
        clear,
        s3=lambda: bucket.upload("ours", source),
        disk=lambda: disk.upload("ours", source),
        curl=lambda: _run(*curl, "-T", source, f"{endpoint}/bench/objects/{secrets.token_hex(4)}"),
        dd=lambda: _run("dd", f"if={source}", f"of={copy}", "bs=8M", "conv=fsync"),
    )
    megabytes = mib * 2**20 / 1e6
    there.add(rows, "upload into SeaweedFS", "s3", "dd", "dd conv=fsync, same disk", "MB/s", megabytes)
    there.add(rows, "upload into SeaweedFS", "s3", "curl", "curl -T, same server", "MB/s", megabytes)
    there.add(rows, "upload into a directory (fsync)", "disk", "dd", "dd conv=fsync, same disk", "MB/s", megabytes)

    bucket.upload("ours", source)
    disk.upload("ours", source)
    back = Turns(
        rounds,
        lambda: copy.unlink(missing_ok=True),
        s3=lambda: bucket.download("ours", copy),
        disk=lambda: disk.download("ours", copy),
        curl=lambda: _run(*curl, "-o", copy, f"{endpoint}/bench/objects/ours"),
        dd=lambda: _run("dd", f"if={source}", f"of={copy}", "bs=8M"),
    )
    back.add(rows, "download from SeaweedFS", "s3", "curl", "curl, same server", "MB/s", megabytes)
    back.add(rows, "download from SeaweedFS", "s3", "dd", "dd, same disk", "MB/s", megabytes)
    back.add(rows, "download from a directory", "disk", "dd", "dd, same disk", "MB/s", megabytes)
    assert copy.read_bytes() == source.read_bytes()


def leases(rows: Rows, store: Store, label: str, rounds: int, shards: int) -> None:
    """All store requests of a shard but its data: claim, heartbeat, what commit checks, marker."""
    names = [f"shard-{number:04d}" for number in range(shards)]

    def protocol() -> None:
        board = Board(store, secrets.token_hex(8))
        for name in names:
            lease = board.claim([name], "bench")
            assert lease is not None
            board.heartbeat(lease, {})
            board.objects.put(board.data_key(lease), b"")
            assert board.commit(lease, size=0, sha256="", tokens=0, extra={})

    def bare() -> None:
        prefix = secrets.token_hex(8)
        for name in names:
            assert store.create(f"bare/{prefix}/{name}", name.encode())

    turns = Turns(rounds, protocol=protocol, bare=bare)
    turns.add(rows, f"lease overhead, {label}", "protocol", "bare", "one create-only put", "ms/shard", shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; for tests")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "store_path.json")
    chosen = parser.parse_args()
    rounds, mib, shards = (1, 32, 5) if chosen.quick else (5, 128, 50)
    rows = Rows(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serve(folder) as endpoint:
            transfers(rows, folder, endpoint, rounds, mib)
            leases(rows, Store.open(str(folder / "leases")), "directory", rounds, shards)
            leases(rows, Store.open(f"s3://bench/l?endpoint={endpoint}&region=us-east-1"), "SeaweedFS", rounds, shards)
    rows.write(chosen.out)


if __name__ == "__main__":
    main()
