"""The background thread: newest wins, failures are made up for, nothing is left behind."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from drafthouse.errors import StoreError
from drafthouse.loop import uploader as module
from drafthouse.loop.uploader import LAST_TRIES, Parcel, Uploader
from drafthouse.store import FencedError
from tests.patience import until


class Desk:
    """Takes parcels: waits while `open` is not set, then raises what is in `errors`, or keeps what it read."""

    def __init__(self) -> None:
        self.open, self.called = threading.Event(), threading.Event()
        self.errors: list[BaseException] = []
        self.got: list[tuple[int, dict[str, str]]] = []
        self.calls = 0

    def __call__(self, parcel: Parcel) -> None:
        self.calls += 1
        self.called.set()
        assert self.open.wait(30)
        if self.errors:
            raise self.errors.pop(0)
        self.got.append((parcel.step, {name: path.read_text() for name, path in parcel.files.items()}))

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.got]


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def uploader(desk: Desk, tmp_path: Path) -> Uploader:
    made = Uploader(tmp_path / "uploads", desk, retry_s=0.01)
    made.start()
    return made


def checkpoint(folder: Path, step: int) -> dict[str, Path]:
    (folder / f"{step}").mkdir()
    (folder / f"{step}/w").write_text(f"weights {step}")
    return {"w": folder / f"{step}/w"}


def test_the_newest_wins(uploader: Uploader, desk: Desk, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        uploader.offer(step, checkpoint(tmp_path, step), {})
        if step == 1:
            assert desk.called.wait(30), "it is on its way while the others come"
    assert len(list((tmp_path / "uploads").iterdir())) == 2, "one on its way, one waiting"
    desk.open.set()
    uploader.close()
    assert desk.steps == [1, 4]
    assert not (tmp_path / "uploads").exists()


def test_a_checkpoint_may_go_while_it_is_uploaded(uploader: Uploader, desk: Desk, tmp_path: Path) -> None:
    files, curve = checkpoint(tmp_path, 1), tmp_path / "curve"
    curve.write_text("1\n")
    uploader.offer(1, files, {"curve": curve})
    files["w"].unlink()
    with curve.open("a") as file:
        file.write("2\n")
    desk.open.set()
    uploader.close()
    assert desk.got == [(1, {"w": "weights 1", "curve": "1\n"})]


def test_without_hard_links(uploader: Uploader, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module.os, "link", refuse)
    uploader.offer(1, checkpoint(tmp_path, 1), {})
    desk.open.set()
    uploader.close()
    assert desk.steps == [1]


def test_failures_are_made_up_for(
    uploader: Uploader, desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk.errors = [StoreError("the server cannot be reached") for _ in range(LAST_TRIES + 2)]
    desk.open.set()
    with caplog.at_level(logging.WARNING):
        uploader.offer(7, checkpoint(tmp_path, 7), {})
        until(lambda: uploader.check() or desk.calls >= LAST_TRIES + 2, "the tries")
    uploader.close()
    assert desk.steps == [7]
    assert "the checkpoint of step 7 is not stored yet: the server cannot be reached" in caplog.text


def test_what_failed_gives_way_to_a_newer_one(uploader: Uploader, desk: Desk, tmp_path: Path) -> None:
    desk.errors = [StoreError("the server cannot be reached")]
    uploader.offer(1, checkpoint(tmp_path, 1), {})
    assert desk.called.wait(30)
    uploader.offer(2, checkpoint(tmp_path, 2), {})
    desk.open.set()
    uploader.close()
    assert desk.steps == [2]


def test_the_end_does_not_wait_for_ever(uploader: Uploader, desk: Desk, tmp_path: Path) -> None:
    desk.errors = [StoreError("the server cannot be reached") for _ in range(20)]
    desk.open.set()
    uploader.offer(1, checkpoint(tmp_path, 1), {})
    with pytest.raises(StoreError, match="cannot be reached"):
        uploader.close()
    assert desk.got == []
    assert desk.calls <= 20


@pytest.mark.parametrize("error", [FencedError("over"), ValueError("a mistake of ours")])
def test_what_ends_it_for_good_is_told(uploader: Uploader, desk: Desk, tmp_path: Path, error: Exception) -> None:
    desk.errors = [error]
    desk.open.set()
    uploader.offer(1, checkpoint(tmp_path, 1), {})
    with pytest.raises(type(error)):
        uploader.close()
    with pytest.raises(type(error)):
        uploader.check()
    assert desk.calls == 1


def test_given_up(uploader: Uploader, desk: Desk, tmp_path: Path) -> None:
    uploader.offer(1, checkpoint(tmp_path, 1), {})
    assert desk.called.wait(30)
    uploader.offer(2, checkpoint(tmp_path, 2), {})
    uploader.abandon(patience_s=0.01)
    assert desk.got == [], "what is on its way is left behind"
    desk.open.set()
    uploader.abandon()
    assert desk.steps == [1]
    assert not (tmp_path / "uploads").exists()


def test_rests_of_an_earlier_process_go(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "uploads/0").mkdir(parents=True)
    (tmp_path / "uploads/0/w").write_text("old")
    fresh = Uploader(tmp_path / "uploads", desk)
    fresh.start()
    desk.open.set()
    fresh.offer(1, checkpoint(tmp_path, 1), {})
    fresh.close()
    assert desk.got == [(1, {"w": "weights 1"})]


def test_a_folder_that_cannot_be_written(uploader: Uploader, desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "uploads").write_text("a file")
    with pytest.raises(OSError, match="uploads"):
        uploader.offer(1, checkpoint(tmp_path, 1), {})
    desk.open.set()
    uploader.close()
    assert desk.calls == 0
