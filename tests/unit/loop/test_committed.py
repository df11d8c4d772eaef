"""Folders in a store: whole or not there, one writer's, and of no life that is over."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from drafthouse.errors import StoreError
from drafthouse.loop.committed import MANIFEST, Committed, CommittedFolders, DamagedError
from drafthouse.loop.job import FenceWatch
from drafthouse.store import Fence, FencedError, Store
from tests.doubles.stores import Clock, ClockStore, Stepper
from tests.fixtures_s3 import s3_url, seaweed

__all__ = ["seaweed"]


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return Store.open(str(tmp_path / "store"))
    made = Store.open(s3_url(request.getfixturevalue("seaweed")))
    made.probe()  # this server makes a bucket with its first object
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def clocked(clock: Clock) -> ClockStore:
    return ClockStore.over(Store.open(f"memory://{secrets.token_hex(8)}"), clock)


def folders(store: Store, epoch: int | None = None) -> CommittedFolders:
    watch = None if epoch is None else FenceWatch(Fence(store, "job"), epoch)
    return CommittedFolders(store.child("kept"), watch)


def files(folder: Path, **contents: str) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return {name: folder / name for name in contents}


def keys(store: Store) -> set[str]:
    return {info.key for info in store.child("kept").list()}


def steps(kept: CommittedFolders) -> list[tuple[int, int]]:
    return [(one.step, one.epoch) for one in kept.counting()]


class TestRoundTrip:
    def test_what_was_published_is_fetched(self, store: Store, tmp_path: Path) -> None:
        kept = folders(store)
        assert kept.counting() == []
        assert kept.publish(5, files(tmp_path / "a", weights="w" * 70_000, state="", curve="1\n2\n"), {"x": 1})
        (one,) = kept.counting()
        assert (one.step, one.epoch, one.key) == (5, 0, "00000005-0")
        manifest = kept.fetch(one, tmp_path / "b")
        assert manifest["about"] == {"x": 1}
        assert {p.name: p.read_text() for p in (tmp_path / "b").iterdir()} == {
            "weights": "w" * 70_000,
            "state": "",
            "curve": "1\n2\n",
        }

    def test_publishing_again_is_one_folder(self, store: Store, tmp_path: Path) -> None:
        kept, made = folders(store), files(tmp_path / "a", weights="w")
        assert kept.publish(5, made, {})
        before = keys(store)
        assert kept.publish(5, made, {}), "a process that died before it heard of its own success"
        assert keys(store) == before

    def test_the_first_of_two_writers_counts(self, store: Store, tmp_path: Path) -> None:
        one, other = folders(store), folders(store)
        assert one.publish(5, files(tmp_path / "a", weights="first", state="same"), {})
        before = keys(store)
        assert other.publish(5, files(tmp_path / "b", weights="second", state="same"), {}) is None
        assert keys(store) == before, "the loser removes its own data and not what the winner named"
        other.fetch(other.counting()[0], tmp_path / "c")
        assert (tmp_path / "c/weights").read_text() == "first"

    def test_strangers_objects_are_no_folders(self, store: Store, tmp_path: Path) -> None:
        for key in ("note", "x/manifest.json", "12-1/manifest.json", "00000012-a/manifest.json"):
            store.child("kept").put(key, b"{}")
        assert folders(store).counting() == []


class TestRaces:
    """Two writers of one folder, interleaved at every request: whole in every order, and never mixed."""

    @pytest.mark.parametrize("head_start", range(0, 14, 2))
    def test_two_writers(self, head_start: int, tmp_path: Path) -> None:
        backing = Store.open(f"memory://{secrets.token_hex(8)}")
        made = [files(tmp_path / name, weights=name * 9, state=name, both="same") for name in "ab"]

        def writer(number: int) -> Stepper:
            return Stepper(
                lambda hook: folders(ClockStore.over(backing, Clock(), hook)).publish(5, made[number], {"by": number})
            )

        writers = [writer(0), writer(1)]
        for _ in range(head_start):
            writers[0].step()
        while not all(one.finished for one in writers):
            for one in reversed(writers):
                one.step()
        assert [one.error for one in writers] == [None, None]
        assert sum(one.result is not None for one in writers) == 1
        kept = folders(backing)
        manifest = kept.fetch(kept.counting()[0], tmp_path / "c")
        winner = made[manifest["about"]["by"]]
        assert {p.name: p.read_text() for p in (tmp_path / "c").iterdir()} == {
            name: path.read_text() for name, path in winner.items()
        }
        assert keys(backing) == {file["key"] for file in manifest["files"].values()} | {f"00000005-0/{MANIFEST}"}

    @pytest.mark.parametrize("died_before", range(8))
    def test_killed_at_every_request(self, died_before: int, tmp_path: Path) -> None:
        backing = Store.open(f"memory://{secrets.token_hex(8)}")
        made = files(tmp_path / "a", weights="w", state="s")
        first = Stepper(lambda hook: folders(ClockStore.over(backing, Clock(), hook)).publish(5, made, {}))
        for _ in range(died_before):
            first.step()
        first.crash()
        kept = folders(backing)
        for one in kept.counting():
            kept.fetch(one, tmp_path / "seen")
        assert kept.publish(5, made, {}), "the next process publishes it"
        kept.fetch(kept.counting()[0], tmp_path / "b")
        assert (tmp_path / "b/weights").read_text() == "w"


class TestDamage:
    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda store, key: store.delete(key), "weights is missing"),
            (lambda store, key: store.put(key, b"w"), "weights has 1 bytes, not 4: it was cut short"),
            (lambda store, key: store.put(key, b"wxyz"), "weights does not have the sha256"),
        ],
    )
    def test_data(self, store: Store, tmp_path: Path, damage: object, words: str) -> None:
        kept = folders(store)
        kept.publish(5, files(tmp_path / "a", weights="wwww"), {})
        assert callable(damage)
        damage(store.child("kept"), next(key for key in keys(store) if "weights" in key))
        with pytest.raises(DamagedError, match=words):
            kept.fetch(kept.counting()[0], tmp_path / "b")

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b'{"schema": 1}',
            b'{"schema": 99, "about": {}, "files": {}}',
            b'{"schema": 1, "about": {}, "files": {"../x": {"key": "a", "size": 1, "sha256": ""}}}',
            b'{"schema": 1, "about": {}, "files": {"..": {"key": "a", "size": 1, "sha256": ""}}}',
            b'{"schema": 1, "about": {}, "files": {"x": {"key": "a"}}}',
            b'{"schema": 1, "about": [], "files": {}}',
        ],
    )
    def test_manifest(self, tmp_path: Path, body: bytes) -> None:
        store = Store.open(f"memory://{secrets.token_hex(8)}")
        kept = folders(store)
        store.child("kept").put(f"00000005-0/{MANIFEST}", body)
        (one,) = kept.counting()
        with pytest.raises(DamagedError, match="its manifest is damaged"):
            kept.fetch(one, tmp_path / "b")
        assert not (tmp_path / "b").exists()
        store.child("kept").delete(f"00000005-0/{MANIFEST}")
        with pytest.raises(DamagedError, match="its manifest is missing"):
            kept.manifest(5, 0)

    def test_a_folder_without_its_files(self, tmp_path: Path) -> None:
        store = Store.open(f"memory://{secrets.token_hex(8)}")
        folders(store).publish(5, files(tmp_path / "a", weights="w"), {})
        strict = CommittedFolders(store.child("kept"), names=("weights", "state"))
        with pytest.raises(DamagedError, match="its manifest is damaged"):
            strict.manifest(5, 0)
        assert CommittedFolders(store.child("kept"), names=("weights",)).manifest(5, 0)["step"] == 5

    def test_a_damaged_manifest_gives_way_to_a_new_one(self, tmp_path: Path) -> None:
        store = Store.open(f"memory://{secrets.token_hex(8)}")
        kept, made = folders(store), files(tmp_path / "a", weights="w")
        store.child("kept").put(f"00000005-0/{MANIFEST}", b"{")
        with pytest.raises(DamagedError, match="its manifest is damaged"):
            kept.publish(5, made, {})
        assert kept.publish(5, made, {})
        kept.fetch(kept.counting()[0], tmp_path / "b")
        assert (tmp_path / "b/weights").read_text() == "w"

    def test_an_unreachable_store_is_no_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store.open(f"memory://{secrets.token_hex(8)}")
        kept = folders(store)
        kept.publish(5, files(tmp_path / "a", weights="w"), {})

        def fail(self: Store, key: str) -> bytes:
            raise StoreError("the server cannot be reached")

        monkeypatch.setattr(Store, "get", fail)
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            kept.manifest(5, 0)
        assert not isinstance(caught.value, DamagedError)


class TestEpochs:
    def test_before_the_fence_counts_and_after_it_does_not(
        self, clocked: ClockStore, clock: Clock, tmp_path: Path
    ) -> None:
        old, made = folders(clocked, 1), files(tmp_path / "a", weights="w")
        old.publish(5, made, {})
        clock.advance(1)
        Fence(clocked, "job").raise_to(2, {})
        # The zombie asked the fence just before it was raised, and commits now: the same second, and later.
        slow = CommittedFolders(clocked.child("kept"))
        slow.epoch = 1
        slow.publish(6, made, {})
        clock.advance(1)
        slow.publish(7, made, {})
        assert steps(folders(clocked, 2)) == [(5, 1)]
        assert steps(folders(clocked)) == [(7, 1), (6, 1), (5, 1)], "outside of a job everything counts"

    def test_a_life_that_is_over_publishes_nothing(self, clocked: ClockStore, tmp_path: Path) -> None:
        old, made = folders(clocked, 1), files(tmp_path / "a", weights="w")
        old.publish(5, made, {})
        before = keys(clocked)
        Fence(clocked, "job").raise_to(2, {})
        with pytest.raises(FencedError):
            old.publish(6, made, {})
        with pytest.raises(FencedError):
            old.prune(1)
        assert keys(clocked) == before

    def test_fenced_during_the_upload(self, clock: Clock, tmp_path: Path) -> None:
        backing = Store.open(f"memory://{secrets.token_hex(8)}")
        made = files(tmp_path / "a", weights="w")
        old = Stepper(lambda hook: folders(ClockStore.over(backing, clock, hook), 1).publish(5, made, {}))
        assert old.run_to("upload")
        Fence(backing, "job").raise_to(2, {})
        old.run()
        assert isinstance(old.error, FencedError)
        assert folders(backing).counting() == [], "data without a manifest is nothing"

    def test_a_life_to_come_does_not_count(self, clocked: ClockStore, tmp_path: Path) -> None:
        made = files(tmp_path / "a", weights="w")
        folders(clocked, 1).publish(5, made, {})
        folders(clocked, 3).publish(9, made, {})
        assert steps(folders(clocked, 2)) == [(5, 1)]
        assert steps(folders(clocked, 3)) == [(9, 3), (5, 1)], "no fence was ever raised: nothing is over"

    def test_of_equal_steps_the_newer_life_comes_first(self, clocked: ClockStore, clock: Clock, tmp_path: Path) -> None:
        made = files(tmp_path / "a", weights="w")
        folders(clocked, 1).publish(5, made, {})
        clock.advance(1)
        Fence(clocked, "job").raise_to(2, {})
        folders(clocked, 2).publish(5, made, {})
        assert steps(folders(clocked, 2)) == [(5, 2), (5, 1)]


class TestPrune:
    def publish(self, kept: CommittedFolders, clock: Clock, folder: Path, *numbers: int) -> None:
        for step in numbers:
            kept.publish(step, files(folder / str(step), weights=f"{step}"), {})
            clock.advance(60)

    def test_the_newest_stay(self, clocked: ClockStore, clock: Clock, tmp_path: Path) -> None:
        kept = folders(clocked)
        self.publish(kept, clock, tmp_path, 5, 10, 15, 20)
        kept.prune(2)
        assert steps(kept) == [(20, 0), (15, 0)]
        assert len(keys(clocked)) == 4

    def test_one_that_is_settled_stays(self, clocked: ClockStore, clock: Clock, tmp_path: Path) -> None:
        """Else a fence of the same second would leave nothing that counts."""
        kept, made = folders(clocked, 1), files(tmp_path / "a", weights="w")
        self.publish(kept, clock, tmp_path, 5, 10)
        for step in (15, 20):
            kept.publish(step, made, {})
        kept.prune(1)
        assert steps(kept) == [(20, 1), (15, 1), (10, 1)]
        Fence(clocked, "job").raise_to(2, {})
        assert steps(folders(clocked, 2)) == [(10, 1)]

    def test_what_is_damaged_does_not_count_among_them(self, clocked: ClockStore, clock: Clock, tmp_path: Path) -> None:
        kept = folders(clocked)
        self.publish(kept, clock, tmp_path, 5, 10, 90)
        damaged = kept.counting()[0]
        self.publish(kept, clock, tmp_path, 15, 20)
        kept.prune(2, {damaged})
        assert steps(kept) == [(20, 0), (15, 0)]

    def test_of_a_later_life_nothing_is_touched(self, clocked: ClockStore, clock: Clock, tmp_path: Path) -> None:
        self.publish(folders(clocked, 2), clock, tmp_path, 5, 10, 15)
        old = folders(clocked, 1)
        self.publish(old, clock, tmp_path, 1, 2, 3)
        old.prune(2)
        assert steps(folders(clocked, 2)) == [(15, 2), (10, 2), (5, 2), (3, 1), (2, 1)]

    def test_earlier_lives_are_cleared_away(self, clocked: ClockStore, clock: Clock, tmp_path: Path) -> None:
        self.publish(folders(clocked, 1), clock, tmp_path, 5, 10)
        Fence(clocked, "job").raise_to(2, {})
        zombie = CommittedFolders(clocked.child("kept"))
        zombie.epoch = 1
        self.publish(zombie, clock, tmp_path, 99)
        new = folders(clocked, 2)
        self.publish(new, clock, tmp_path, 15)
        new.prune(2)
        assert steps(folders(clocked)) == [(15, 2), (10, 1)]

    def test_rests_of_the_dead_go_and_uploads_of_the_living_stay(
        self, clocked: ClockStore, clock: Clock, tmp_path: Path
    ) -> None:
        kept = folders(clocked)
        clocked.child("kept").put("00000001-0/weights-abc", b"w")
        clock.advance(4000)
        clocked.child("kept").put("00000002-0/weights-abc", b"w")
        self.publish(kept, clock, tmp_path, 5)
        kept.prune(1)
        assert {key.partition("/")[0] for key in keys(clocked)} == {"00000002-0", "00000005-0"}

    def test_an_empty_store_is_fine(self, clocked: ClockStore) -> None:
        folders(clocked).prune(1)

    @pytest.mark.parametrize("died_before", range(1, 9))
    def test_killed_while_it_removes(self, died_before: int, clock: Clock, tmp_path: Path) -> None:
        backing = Store.open(f"memory://{secrets.token_hex(8)}")
        clocked = ClockStore.over(backing, clock)
        self.publish(folders(clocked), clock, tmp_path, 5, 10, 15)

        def prune(hook: object) -> None:
            assert callable(hook)
            own = ClockStore.over(backing, clock, hook)
            folders(own).prune(1)

        first = Stepper(prune)
        for _ in range(died_before):
            first.step()
        first.crash()
        kept = folders(clocked)
        for number, one in enumerate(kept.counting()):
            kept.fetch(one, tmp_path / f"seen{number}")
        assert (kept.counting()[0].step, kept.counting()[-1].step) in {(15, 5), (15, 10), (15, 15)}


def test_a_reader_during_a_removal_sees_whole_or_damaged(tmp_path: Path) -> None:
    """What disappears under a reader is told as damage, so that it takes the next one."""
    store = Store.open(str(tmp_path / "store"))
    kept = folders(store)
    kept.publish(5, files(tmp_path / "a", weights="w" * 100_000), {})
    (one,) = kept.counting()
    for info in store.child("kept").list():
        store.child("kept").delete(info.key)
    with pytest.raises(DamagedError):
        kept.fetch(one, tmp_path / "b")


def test_a_manifest_says_what_it_is_of(tmp_path: Path) -> None:
    store = Store.open(f"memory://{secrets.token_hex(8)}")
    kept = folders(store, 4)
    kept.publish(5, files(tmp_path / "a", weights="wwww"), {"worker": "me"})
    said = json.loads(store.get(f"kept/00000005-4/{MANIFEST}"))
    assert (said["step"], said["epoch"], said["about"]) == (5, 4, {"worker": "me"})
    assert said["files"]["weights"]["size"] == 4
    assert Committed(5, 4, kept.counting()[0].at) == kept.counting()[0]
