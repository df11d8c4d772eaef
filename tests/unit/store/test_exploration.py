"""Leases, locks and fences in every order of single store requests, with a crash between any two of them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthouse.errors import StoreError
from drafthouse.store import Board, Fence, FencedError, Lease, Lock, ObjectInfo, ObjectMissingError, Store
from tests.unit.store.explorer import BEGIN, ModelStore, Note, Program, State, alone, explore

TTL = timedelta(seconds=100)
LONGER = TTL + timedelta(seconds=1)


class Runs:
    """What must hold for workers on the shards of one run."""

    def __init__(self, shards: list[str], kind: type[Board] = Board) -> None:
        self.shards, self.kind = shards, kind
        self._healed: dict[frozenset[object], set[str]] = {}

    def worker(self, name: str) -> Program:
        """An extraction worker, as far as the store sees it; notes every shard that it is told to have won."""

        def work(store: Store, note: Note) -> None:
            board = self._board(store)
            while (lease := board.claim(self.shards, name)) is not None:
                board.heartbeat(lease, {})
                content = lease.token.encode()
                board.objects.put(board.data_key(lease), content)
                digest = hashlib.sha256(content).hexdigest()
                if board.commit(lease, size=len(content), sha256=digest, tokens=1, extra={}):
                    note(lease.shard)

        return work

    def janitor(self, store: Store, note: Note) -> None:
        self._board(store).janitor()

    def check(self, before: State, after: State) -> None:
        """Markers stay as they are and point to complete data; nobody wins twice; and if everybody died now, one
        healthy worker and a janitor would leave every shard there once."""
        markers = self._markers(after)
        assert self._markers(before).items() <= markers.items(), "a marker was changed"
        data = {key: body for key, body, _ in after.objects}
        for body in markers.values():
            marker = json.loads(body)
            found = data.get(f"runs/run/{marker['key']}")
            assert found is not None, "a marker's data is gone"
            assert hashlib.sha256(found).hexdigest() == marker["sha256"], "a marker's data is somebody else's"
        wins = Counter(after.notes)
        wins.update(self._heal(after))
        assert all(count <= 1 for count in wins.values()), "one shard was won twice"

    def _heal(self, state: State) -> set[str]:
        if state.objects not in self._healed:
            tape = state.tape()
            tape.now += LONGER
            store = ModelStore.over(tape)
            won = alone(store, "last", self.worker("last"))
            tape.now += LONGER
            alone(store, "broom", self.janitor)
            board = self._board(store)
            markers = [board.done(shard) for shard in self.shards]
            kept = [info.key for info in board.objects.list("data")]
            assert kept == [marker.key for marker in markers if marker], "exactly one data object a shard"
            assert len(kept) == len(self.shards)
            self._healed[state.objects] = set(won)
        return self._healed[state.objects]

    def _board(self, store: Store) -> Board:
        return self.kind(store, "run", ttl_s=TTL.total_seconds())

    def _markers(self, state: State) -> dict[str, bytes]:
        return {key: body for key, body, _ in state.objects if key.startswith("runs/run/done/")}


@pytest.mark.parametrize(("shards", "ticks", "states"), [(["a"], 1, 3000), (["a", "b"], 0, 2500)])
def test_two_workers(shards: list[str], ticks: int, states: int) -> None:
    """With one shard, a worker may besides fall silent past its lease, at any moment, and wake up at any other."""
    runs = Runs(shards)
    workers = {name: runs.worker(name) for name in ("w1", "w2")}
    assert explore(workers, runs.check, ticks=ticks, tick=LONGER) > states


def test_a_worker_its_heir_and_a_janitor() -> None:
    """The first worker is silent past its lease from the beginning; a janitor runs at any moment."""
    runs = Runs(["a"])
    store = ModelStore.over(State(frozenset(), BEGIN, (), 0).tape())
    lease = runs._board(store).claim(["a"], "silent")
    assert lease is not None

    def wake(store: Store, note: Note) -> None:
        board, content = runs._board(store), lease.token.encode()
        board.objects.put(board.data_key(lease), content)
        digest = hashlib.sha256(content).hexdigest()
        if board.commit(lease, size=len(content), sha256=digest, tokens=1, extra={}):
            note("a")

    early = {key: (body, when - LONGER) for key, (body, when) in store.tape.objects.items()}
    programs = {"silent": wake, "heir": runs.worker("heir"), "janitor": runs.janitor}
    assert explore(programs, runs.check, start=early) > 500


class Overwriting(Board):
    """A wrong protocol: the last marker wins."""

    def commit(self, lease: Lease, *, size: int, sha256: str, tokens: int, extra: object) -> bool:
        marker = {**lease.__dict__, "key": self.data_key(lease), "size": size, "sha256": sha256, "tokens": tokens}
        self.objects.put(f"done/{lease.shard}", json.dumps(marker).encode())
        return True


class Greedy(Board):
    """A wrong protocol: the janitor removes whatever is not marked yet."""

    def janitor(self, *, dry_run: bool = False) -> list[str]:
        for info in self.objects.list("data"):
            if self.objects.head(f"done/{info.key.split('/')[1]}") is None:
                self.objects.delete(info.key)
        return []


class Trusting(Board):
    """A wrong protocol: whoever finds a stale lease thinks that it is the only one, and writes under its name."""

    def data_key(self, lease: Lease) -> str:
        return f"data/{lease.shard}/data.safetensors"


@pytest.mark.parametrize(
    ("wrong", "found"),
    [(Overwriting, "a marker was changed"), (Greedy, "exactly one data object"), (Trusting, "data is somebody else's")],
)
def test_wrong_protocols_are_found(wrong: type[Board], found: str) -> None:
    runs = Runs(["a"], wrong)
    programs = {"w1": runs.worker("w1"), "other": runs.janitor if wrong is Greedy else runs.worker("w2")}
    with pytest.raises((AssertionError, StoreError), match=found):
        explore(programs, runs.check, ticks=1, tick=LONGER)


_KEYS = st.sampled_from(["a", "a/b", "a/b/c", "ab", "b/a"])
_REQUESTS = st.one_of(
    st.tuples(st.sampled_from(["get", "head", "delete", "list"]), _KEYS),
    st.tuples(st.sampled_from(["put", "create"]), _KEYS, st.sampled_from([b"", b"x", b"yy"])),
)


@settings(deadline=None)
@given(st.lists(_REQUESTS, max_size=20))
def test_the_model_of_a_store_answers_as_a_store_does(requests: list[tuple[str, ...]]) -> None:
    real = Store.open(f"memory://{secrets.token_hex(8)}/prefix")
    model = State(frozenset(), BEGIN, (), 0).store().child("prefix")

    def ask(store: Store, name: str, *arguments: object) -> object:
        try:
            answer = getattr(store, name)(*arguments)
        except ObjectMissingError:
            return "missing"
        found = answer if isinstance(answer, list) else [answer]
        return [(each.key, each.size) if isinstance(each, ObjectInfo) else each for each in found]

    for request in requests:
        assert ask(model, *request) == ask(real, *request), request
    assert ask(model, "list") == ask(real, "list")


def _operator(name: str) -> Program:
    def operate(store: Store, note: Note) -> None:
        try:
            with Lock(store, "deploy").acquire(name, "deploy") as held:
                store.put(f"inside/{held.turn}", b"")
                store.delete(f"inside/{held.turn}")
                note("done")
        except StoreError as error:
            note("broken" if "was broken by" in str(error) else "refused")

    return operate


def _breaker(store: Store, note: Note) -> None:
    if Lock(store, "deploy").breaks("it looked dead", "ben") is not None:
        note("broke")


def _check_lock(before: State, after: State) -> None:
    """One turn at a time; a turn begins after the one before it has ended; whoever is inside holds it; and if
    everybody died now, breaking would set the lock free."""
    keys, earlier = ({key for key, _, _ in state.objects} for state in (after, before))
    taken, ended = (
        {int(key.rpartition("/")[2]) for key in keys if key.startswith(f"{kind}/")} for kind in ("lock", "unlock")
    )
    assert ended <= taken
    assert len(taken - ended) <= 1
    for turn in taken - {1}:
        if f"lock/deploy/{turn:06d}" not in earlier:
            assert f"unlock/deploy/{turn - 1:06d}" in earlier
    inside = {int(key.rpartition("/")[2]) for key in keys if key.startswith("inside/")}
    assert len(inside - ended) <= 1
    store = after.store()
    alone(store, "broom", _breaker)
    assert alone(store, "last", _operator("last")) == ["done"]


@pytest.mark.parametrize("breakers", [0, 1])
def test_operators_and_their_lock(breakers: int) -> None:
    programs = {name: _operator(name) for name in ("anna", "ben", "cleo")[: 3 - breakers]}
    if breakers:
        programs["breaker"] = _breaker

    def check(before: State, after: State) -> None:
        _check_lock(before, after)
        if all(life.ended for life in after.lives):
            assert after.store().list("inside") == []
            assert Lock(after.store(), "deploy").holder() is None
            assert "done" in after.notes or "broken" in after.notes
            assert after.notes.count("broken") == after.notes.count("broke")

    assert explore(programs, check) > 900


def _mover(*epochs: int) -> Program:
    def move(store: Store, note: Note) -> None:
        for epoch in epochs:
            if Fence(store, "train").raise_to(epoch, {}):
                note(f"declared {epoch}")

    return move


def _old_trainer(store: Store, note: Note) -> None:
    fence = Fence(store, "train")
    try:
        for step in (1, 2):
            fence.check(1)
            store.create(f"checkpoints/{step}", b"of epoch 1")
    except FencedError:
        note("fenced")


def _counting(store: Store, since: datetime) -> str:
    return ",".join(info.key for info in store.list("checkpoints") if info.last_modified < since)


def _heir(store: Store, note: Note) -> None:
    """Starts twice, and each time says which checkpoints count."""
    fence = Fence(store, "train")
    if not fence.raise_to(2, {}):
        return
    for _ in range(2):
        since = fence.since(1)
        assert since is not None
        note(f"from {_counting(store, since)}")


def test_what_a_fenced_trainer_writes_late_never_counts() -> None:
    """It may look, be overtaken by the fence, and write: then its heir has not seen it and never will."""

    def check(before: State, after: State) -> None:
        old, new = (Fence(state.store(), "train").since(1) for state in (before, after))
        if old is not None:
            assert new == old
            assert _counting(before.store(), old) == _counting(after.store(), old)
        assert len({note for note in after.notes if note.startswith("from")}) <= 1

    assert explore({"old": _old_trainer, "heir": _heir}, check, ticks=2) > 200


def test_movers_that_race() -> None:
    def check(before: State, after: State) -> None:
        older, newer = (Fence(state.store(), "train").newest() for state in (before, after))
        assert older <= newer
        declared = [note for note in after.notes if note.startswith("declared")]
        assert len(declared) == len(set(declared)), "one epoch was declared by two"
        if all(life.ended for life in after.lives):
            assert f"declared {newer}" in declared
            assert newer == 4

    assert explore({"a": _mover(2, 3), "b": _mover(2, 4), "c": _mover(3)}, check) > 200
