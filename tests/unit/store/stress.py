"""Eight workers on one run, killed and paused at random.

``python -m tests.unit.store.stress URL FOLDER SHARDS TTL SEED``

Workers die by SIGKILL from outside and by their own hand at the worst moments (between upload and marker, between
marker and return), and some fall asleep (SIGSTOP) past their lease and wake up as zombies. Those that died are
replaced, as a supervisor would. Ends when a worker has found nothing left and everybody has ended; prints a summary
as JSON. Every win that a worker was told of is a line ``shard sha256`` in FOLDER/wins.

Workers are forked: they start in milliseconds. The parent never touches the store, because the client's threads
would not survive the fork.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from drafthouse.errors import StoreError
from drafthouse.store import Board, Lease, Store

WORKERS = 8
DISTURBANCES = 24
FAILURES = 40  # more than that is no bad luck
_BIG = 9 * 2**20  # in parts, where the store knows parts


def content_of(lease: Lease, number: int) -> bytes:
    """What this lease's holder makes: different for every lease, so that a mixture shows."""
    size = _BIG if number == 0 else 20_000 + 997 * number
    return hashlib.shake_128(lease.token.encode()).digest(size)


@dataclass
class Worker:
    """One life of a worker."""

    url: str
    folder: Path
    shards: list[str]
    ttl_s: float
    dice: random.Random

    def run(self) -> int:
        board = Board(Store.open(self.url), "run", ttl_s=self.ttl_s)
        order = self.shards[:]
        self.dice.shuffle(order)
        while remaining := board.remaining(order):
            lease = board.claim(remaining, f"w{os.getpid()}")
            if lease is None:
                time.sleep(self.ttl_s / 10)
            else:
                self._make(board, lease)
        return 0

    def _make(self, board: Board, lease: Lease) -> None:
        self._fate()
        content = content_of(lease, self.shards.index(lease.shard))
        path = self.folder / f"{lease.shard}-{lease.epoch}"
        path.write_bytes(content)
        board.heartbeat(lease, {})
        time.sleep(self.dice.uniform(0.02, 0.1))
        board.objects.upload(board.data_key(lease), path)
        self._fate()
        digest = hashlib.sha256(content).hexdigest()
        won = board.commit(lease, size=len(content), sha256=digest, tokens=1, extra={})
        self._fate()
        if won:
            with (self.folder / "wins").open("a") as file:
                file.write(f"{lease.shard} {digest}\n")
        path.unlink()

    def _fate(self) -> None:
        drawn = self.dice.random()
        if drawn < 0.06:
            os.kill(os.getpid(), signal.SIGKILL)
        elif drawn < 0.10:
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Supervisor:
    """Keeps eight workers alive, and disturbs them until enough has happened."""

    url: str
    folder: Path
    shards: list[str]
    ttl_s: float
    seed: int
    counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        dice = random.Random(self.seed)
        living = {self._spawn() for _ in range(WORKERS)}
        asleep: dict[int, float] = {}
        parent, finished = os.getppid(), False
        while living:
            time.sleep(0.02)
            finished = finished or os.getppid() != parent  # nobody waits for this any more
            while (found := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
                pid, status = found
                if os.WIFSTOPPED(status):
                    asleep[pid] = time.monotonic() + 1.5 * self.ttl_s + 1
                    self.counts["paused"] += 1
                    continue
                living.discard(pid)
                asleep.pop(pid, None)
                code = os.waitstatus_to_exitcode(status)
                self.counts[{0: "ended", -signal.SIGKILL: "killed"}.get(code, "failed")] += 1
                finished = finished or code == 0
                if not finished and self.counts["failed"] < FAILURES:
                    living.add(self._spawn())
                if not living:
                    break
            for pid, when in list(asleep.items()):
                if finished or time.monotonic() > when:
                    os.kill(pid, signal.SIGCONT)
                    del asleep[pid]
            awake = sorted(living - asleep.keys())
            if not finished and awake and self.counts["disturbed"] < DISTURBANCES and dice.random() < 0.15:
                self.counts["disturbed"] += 1
                os.kill(dice.choice(awake), dice.choice((signal.SIGKILL, signal.SIGSTOP)))

    def _spawn(self) -> int:
        self.counts["spawned"] += 1
        pid = os.fork()
        if pid:
            return pid
        dice = random.Random(self.seed * 1000 + self.counts["spawned"])
        try:
            code = Worker(self.url, self.folder, self.shards, self.ttl_s, dice).run()
        except StoreError as error:
            print(error, file=sys.stderr, flush=True)
            code = 2
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            code = 3
        os._exit(code)


def main(url: str, folder: str, shards: str, ttl: str, seed: str) -> None:
    names = [f"s{number:02d}" for number in range(int(shards))]
    supervisor = Supervisor(url, Path(folder), names, float(ttl), int(seed))
    supervisor.run()
    print(json.dumps(supervisor.counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
