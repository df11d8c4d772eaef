"""The demo's kill: always in the middle of a shard, so that the shard is done again by somebody else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from drafthouse.loop.children import Child
from drafthouse.loop.demo import kill_over_a_shard
from drafthouse.store import Board, Store
from tests.patience import until

SHARDS = [f"shard-{number:03d}" for number in range(200)]
# Half of its time it is between the upload and the next claim.
WORKER = """
import sys, time
from drafthouse.store import Board, Store
url, name, pause = sys.argv[1:]
board = Board(Store.open(url), "run")
names = [f"shard-{number:03d}" for number in range(200)]
while True:
    lease = board.claim(board.remaining(names), name)
    if lease is None:
        break
    time.sleep(float(pause))
    board.objects.put(board.data_key(lease), bytes(1 << 16))
    time.sleep(float(pause))
    board.commit(lease, size=1 << 16, sha256="0", tokens=1, extra={})
"""


class Worker(Child):
    """A worker without a model, which does a shard in a moment."""

    def __init__(self, name: str, url: str, pause: float) -> None:
        self.name, self.killed = name, False
        self.process = subprocess.Popen([sys.executable, "-c", WORKER, url, name, str(pause)])

    def through(self) -> str | None:
        return None if self.process.poll() is None else "the worker was through before"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


@pytest.mark.parametrize("pause", [0.02, 0.1])
def test_what_is_killed_was_in_the_middle_of_a_shard(store: Store, tmp_path: Path, pause: float) -> None:
    board = Board(store, "run")
    for turn in range(3):
        worker = Worker(f"w{turn}", str(tmp_path / "store"), pause)
        try:
            until(
                partial(kill_over_a_shard, [worker], board, SHARDS),
                "a moment in the middle of a shard",
                every=0,
                unless=worker.through,
            )
            assert worker.process.poll() == -signal.SIGKILL
        finally:
            worker.kill()
        held = [name for name, state in board.states(SHARDS).items() if state.worker == worker.name]
        undone = [name for name in held if board.done(name) is None]
        assert len(undone) == 1, "another one has to do it again"
        assert board.objects.list(f"data/{undone[0]}") == []
        assert len(board.remaining(SHARDS)) > 0


def test_who_holds_nothing_is_left_alone(store: Store, tmp_path: Path) -> None:
    board = Board(store, "run")
    for name in SHARDS:
        assert board.claim([name], "somebody") is not None
    worker = Worker("idle", str(tmp_path / "store"), 0.0)
    assert kill_over_a_shard([worker], board, SHARDS) is None
    assert worker.process.wait(240) == 0, "it ends by itself: there is nothing to claim"


def test_a_frozen_process_stands_still_until_it_is_thawed(tmp_path: Path) -> None:
    script = "import itertools, sys, threading, time\n"
    script += "for n in itertools.count(): open(sys.argv[1], 'w').write(str(n))"
    worker = Worker.__new__(Worker)
    worker.process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "count")])
    try:
        until((tmp_path / "count").exists, "the count")
        worker.freeze()
        before = (tmp_path / "count").read_text()
        time.sleep(0.2)
        assert (tmp_path / "count").read_text() == before
        worker.thaw()
        until(lambda: (tmp_path / "count").read_text() not in ("", before), "the next number")
        worker.process.kill()
        worker.process.wait()
        worker.freeze()
        assert not worker.running, "and one that has ended is no obstacle"
    finally:
        worker.process.kill()
        worker.process.wait()
