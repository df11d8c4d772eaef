from __future__ import annotations

import fcntl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafthouse.errors import StatesError
from drafthouse.states.pressure import ByteBudget, DiskGuard, room_for
from drafthouse.states.scratch import _remove_if_abandoned, scratch


def _blocked(budget: ByteBudget, count: int) -> tuple[threading.Thread, threading.Event]:
    through = threading.Event()

    def take() -> None:
        budget.take(count)
        through.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, through


def test_the_producer_waits_until_bytes_come_back() -> None:
    budget = ByteBudget(100)
    budget.take(60)
    thread, through = _blocked(budget, 50)
    assert not through.wait(0.05)
    budget.give_back(20)
    assert through.wait(240)
    thread.join()
    assert budget.waited_s > 0


def test_more_than_the_limit_passes_alone() -> None:
    budget = ByteBudget(100)
    budget.take(1000)
    thread, through = _blocked(budget, 1)
    assert not through.wait(0.05)
    budget.give_back(1000)
    assert through.wait(240)
    thread.join()


def test_a_failure_wakes_the_producer_and_stays() -> None:
    budget = ByteBudget(100)
    budget.take(100)
    caught: list[Exception] = []

    def take() -> None:
        try:
            budget.take(1)
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    budget.fail(ValueError("disk"))
    budget.fail(ValueError("later"))
    thread.join(240)
    assert str(caught[0]) == "disk"
    with pytest.raises(ValueError, match="disk"):
        budget.check()


def test_the_guard_has_hysteresis() -> None:
    used = {"a": 50, "b": 50}
    guard = DiskGuard(
        [Path("a"), Path("b")], 0.90, 0.85, usage=lambda folder: (used[folder.name], 100 - used[folder.name])
    )
    assert guard.full() is None
    used["b"] = 89
    assert guard.full() is None
    used["b"] = 90
    assert guard.full() == (Path("b"), 0.90)
    used["b"] = 87
    assert guard.full() == (Path("b"), 0.87), "it stopped, so it goes on only at 85 %"
    used["b"] = 85
    assert guard.full() is None
    used["b"] = 87
    assert guard.full() is None


def test_file_systems_in_memory_have_limits_of_their_own() -> None:
    used = {"shm": 79, "disk": 79}
    guard = DiskGuard(
        [Path("shm"), Path("disk")],
        0.90,
        0.85,
        memory_high=0.80,
        memory_low=0.70,
        usage=lambda folder: (used[folder.name], 100 - used[folder.name]),
        in_memory=lambda folder: folder.name == "shm",
    )
    assert (guard.limit(Path("shm")), guard.limit(Path("disk"))) == (0.80, 0.90)
    used["disk"] = 84
    assert guard.full() is None
    used["shm"] = 80
    assert guard.full() == (Path("shm"), 0.80)
    used["shm"] = 71
    assert guard.full() == (Path("shm"), 0.71)
    used["shm"] = 70
    assert guard.full() is None
    used.update(shm=85, disk=91)
    assert guard.full() == (Path("shm"), 0.85), "it is furthest over its own limit"
    used["shm"] = 60
    assert guard.full() == (Path("disk"), 0.91)


def test_a_file_system_with_room_for_the_run_is_not_full_whatever_the_fraction() -> None:
    free, available = {"shm": 100, "disk": 100}, [100]
    guard = DiskGuard(
        [Path("shm"), Path("disk")],
        0.90,
        0.85,
        enough=100,
        usage=lambda folder: (10_000, free[folder.name]),
        available=lambda: available[0],
        in_memory=lambda folder: folder.name == "shm",
    )
    assert guard.full() is None
    free["disk"] = 99
    assert guard.full() == (Path("disk"), pytest.approx(0.99, abs=0.001))
    free["disk"] = 100
    assert guard.full() is None, "there is room again, and nobody waits for the lower fraction"
    available[0] = 99
    assert guard.full() == (Path("shm"), pytest.approx(0.99, abs=0.001)), "what is free there is no memory that is free"
    free["shm"] = 10_000
    assert guard.full() is None, "half empty"


def test_room_is_twice_the_run_and_a_gibibyte() -> None:
    assert room_for(0) == 2**30
    assert room_for(5 * 2**30) == 11 * 2**30


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system in memory of one MiB, like a container's /dev/shm."""
    target = tmp_path / "shm"
    target.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", target], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield target
    subprocess.run(["umount", target], check=True)


def test_a_real_file_system_in_memory_fills_and_empties(small_memory: Path, tmp_path: Path) -> None:
    on_disk, later = tmp_path, small_memory / "not" / "yet"
    if not _lies_on_a_disk(on_disk):
        pytest.skip("the temporary directory itself lies in memory")
    guard = DiskGuard([on_disk, later], 1.0, 1.0, memory_high=0.80, memory_low=0.50)
    assert (guard.limit(on_disk), guard.limit(later)) == (1.0, 0.80)
    (small_memory / "first").write_bytes(bytes(512 * 2**10))
    assert guard.full() is None
    (small_memory / "second").write_bytes(bytes(320 * 2**10))
    found = guard.full()
    assert found is not None
    assert found[0] == later
    assert found[1] == pytest.approx(0.81, abs=0.01)
    (small_memory / "second").write_bytes(bytes(64 * 2**10))
    assert guard.full() is not None, "below the upper limit and above the lower one: it still waits"
    (small_memory / "second").unlink()
    assert guard.full() is None
    (small_memory / "second").write_bytes(bytes(64 * 2**10))
    assert guard.full() is None


def _lies_on_a_disk(folder: Path) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True).stdout
    return kind.strip() not in {"tmpfs", "ramfs"}


def test_the_guard_looks_at_the_real_disk(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "yet"
    found = DiskGuard([missing], 1e-9, 1e-9).full()
    assert found is not None
    assert 0 < found[1] <= 1
    assert DiskGuard([missing], 1.0, 1.0).full() is None


def test_scratch_disappears_and_removes_what_the_dead_left(tmp_path: Path) -> None:
    dead = tmp_path / "drafthouse-states-dead"
    dead.mkdir()
    (dead / "lock").write_text("")
    (dead / "shard").write_bytes(bytes(100))
    with scratch(str(tmp_path)) as living:
        (living / "shard").write_bytes(b"x")
        with scratch(str(tmp_path)) as second:
            assert second != living
            assert (living / "shard").exists(), "a living worker's directory is not touched"
        assert [path.name for path in tmp_path.iterdir()] == [living.name]
    assert list(tmp_path.iterdir()) == []


def test_scratch_that_another_start_sweeps_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, swept = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            [folder] = tmp_path.iterdir()
            swept.append(folder)
            monkeypatch.setattr(fcntl, "flock", take)
            _remove_if_abandoned(folder)
            monkeypatch.setattr(fcntl, "flock", flock)
        take(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with scratch(str(tmp_path)) as living:
        assert living not in swept
        assert [path.name for path in tmp_path.iterdir()] == [living.name]
        (living / "shard").write_bytes(b"x")
    assert len(swept) == 1
    assert list(tmp_path.iterdir()) == []


def test_scratch_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StatesError, match="there is no such directory"), scratch(str(tmp_path / "nowhere")):
        pass
