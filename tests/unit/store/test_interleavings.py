"""Workers, zombies, crashes and janitors in many interleavings of single store requests.

At every moment the done-markers that exist must be the first ones and point to complete data; in the end
every shard is done once, with one data object. Hypothesis looks for an order of events that breaks this, and
one family of orders (a worker that falls silent, its heir, a janitor) is tried completely.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drafthouse.store import Board, Store
from tests.doubles.stores import Clock, ClockStore, Hook, Stepper

TTL = 100.0


class World:
    """One run in one store, whoever works on it."""

    def __init__(self, shards: list[str]) -> None:
        self.shards = shards
        self.clock = Clock()
        self.store = Store.open(f"memory://{secrets.token_hex(8)}")
        self.first_markers: dict[str, bytes] = {}
        self.wins = dict.fromkeys(shards, 0)

    def board(self, hook: Hook | None = None) -> Board:
        return Board(ClockStore.over(self.store, self.clock, hook), "run", ttl_s=TTL)

    def worker(self, name: str) -> Stepper:
        return Stepper(lambda hook: self.work(self.board(hook), name))

    def janitor(self) -> Stepper:
        return Stepper(lambda hook: self.board(hook).janitor())

    def work(self, board: Board, name: str) -> None:
        """What an extraction worker does, as far as the store sees it."""
        while (lease := board.claim(self.shards, name)) is not None:
            board.heartbeat(lease, {})
            content = f"{lease.shard} by {name}".encode()
            board.objects.put(board.data_key(lease), content)
            digest = hashlib.sha256(content).hexdigest()
            if board.commit(lease, size=len(content), sha256=digest, tokens=1, extra={}):
                self.wins[lease.shard] += 1

    def check(self) -> None:
        """Markers are the first ones, and point to complete data."""
        for info in self.store.list("runs/run/done"):
            body = self.store.get(info.key)
            assert self.first_markers.setdefault(info.key, body) == body, "a marker was overwritten"
            marker = json.loads(body)
            data = self.store.get(f"runs/run/{marker['key']}")
            assert hashlib.sha256(data).hexdigest() == marker["sha256"]

    def check_end(self, still_running: list[Stepper]) -> None:
        """A healthy worker finishes what is left, zombies wake up, a janitor cleans: everything is there
        once."""
        self.clock.advance(TTL + 1)
        self.work(self.board(), "last")
        for zombie in still_running:
            zombie.run()
            assert zombie.error is None, zombie.log
            self.check()
        self.clock.advance(TTL + 1)
        board = self.board()
        board.janitor()
        self.check()
        assert [marker.shard for marker in board.all_done()] == self.shards
        kept = [info.key for info in board.objects.list("data")]
        assert kept == sorted(marker.key for marker in board.all_done()), "exactly one data object a shard"
        assert all(count <= 1 for count in self.wins.values()), "one shard was won twice"


class Runs(RuleBasedStateMachine):
    """Any order of events."""

    @initialize()
    def begin(self) -> None:
        self.world = World(["a", "b"])
        self.running: list[Stepper] = []
        self.started = 0

    @precondition(lambda self: len(self.running) < 3)
    @rule(run_to=st.sampled_from(["", "create lease", "put data", "head data", "create done"]))
    def start_worker(self, run_to: str) -> None:
        self.started += 1
        self.running.append(self.world.worker(f"w{self.started}"))
        self.running[-1].run_to(run_to)
        self._collect()

    @precondition(lambda self: len(self.running) < 3)
    @rule(run_to=st.sampled_from(["", "list data", "get done", "delete"]))
    def start_janitor(self, run_to: str) -> None:
        self.running.append(self.world.janitor())
        self.running[-1].run_to(run_to)
        self._collect()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), steps=st.integers(1, 8))
    def go_on(self, which: int, steps: int) -> None:
        for _ in range(steps):
            self.running[which % len(self.running)].step()
            self.world.check()
        self._collect()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def go_on_to_the_end(self, which: int) -> None:
        self.running[which % len(self.running)].run()
        self._collect()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def die(self, which: int) -> None:
        self.running[which % len(self.running)].crash()
        self._collect()

    @rule(seconds=st.sampled_from([TTL / 2, TTL + 1]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @invariant()
    def markers_are_first_and_point_to_complete_data(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.check_end(self.running)
            finally:  # a failure must not leave threads behind that wait for ever
                for worker in self.running:
                    worker.crash()

    def _collect(self) -> None:
        for worker in self.running:
            assert worker.error is None, worker.log
        self.running = [worker for worker in self.running if not worker.finished]


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def _requests_of_a_worker() -> int:
    worker = World(["a"]).worker("w")
    worker.run()
    return len(worker.log)


@pytest.mark.parametrize("dies", [False, True])
def test_a_silent_worker_its_heir_and_a_janitor(dies: bool) -> None:
    """The first worker makes i requests and falls silent past its lease, the heir makes j, a janitor runs;
    then the first one wakes up (or is dead) and the heir goes on. All i and j."""
    requests = _requests_of_a_worker()
    assert requests > 10
    for i, j in product(range(requests), range(requests + 1)):
        world = World(["a"])
        silent = world.worker("silent")
        for _ in range(i):
            silent.step()
        world.clock.advance(TTL + 1)
        heir = world.worker("heir")
        for _ in range(j):
            heir.step()
        world.board().janitor()
        world.check()
        if dies:
            silent.crash()
        for worker in (silent, heir):
            worker.run()
            assert worker.error is None, worker.log
            world.check()
        world.check_end([])
