"""Faults of S3 servers: ignored conditions, lost answers, conflicts, wrong credentials, nobody there."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

import pytest

from drafthouse.errors import StoreError
from drafthouse.store import Store
from drafthouse.store import backend as backend_module
from tests.doubles.s3_server import S3Double, losing_proxy
from tests.fixtures_s3 import s3_url


def _open(double: S3Double, prefix: str = "p") -> Store:
    return Store.open(f"s3://bucket/{prefix}?endpoint={double.endpoint}")


def test_the_double_speaks_enough_s3(double: S3Double, tmp_path: Path) -> None:
    store = _open(double)
    store.probe()
    store.put("a/1", b"x")
    store.put("a/2", b"yy")
    assert [(info.key, info.size) for info in store.list("a")] == [("a/1", 1), ("a/2", 2)]
    store.download("a/2", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"yy"


def test_probe_refuses_a_store_that_ignores_conditions(double: S3Double) -> None:
    double.faults.ignore_conditions = True
    with pytest.raises(StoreError, match="ignores conditional puts, so two workers would both win a lease"):
        _open(double).probe()
    assert double.objects == {}


def test_a_lost_answer_is_not_a_lost_create(double: S3Double) -> None:
    store = _open(double)
    double.faults.lose_answers = 1
    assert store.create("lease", b"mine")
    assert double.faults.puts == 2, "the client must have asked again, and been told 412"
    assert not store.create("lease", b"yours")


def test_a_lost_answer_does_not_make_a_loser_win(double: S3Double) -> None:
    store = _open(double)
    assert store.create("lease", b"yours")
    double.faults.lose_answers = 1
    double.objects["bucket/p/lease"] = b"yours"
    assert not store.create("lease", b"mine")
    assert store.get("lease") == b"yours"


def test_a_conflict_with_nothing_there_is_tried_again(double: S3Double) -> None:
    double.faults.conflicts = 1
    assert _open(double).create("lease", b"mine")
    assert double.objects["bucket/p/lease"] == b"mine"


def test_endless_conflicts_end_in_a_sentence(double: S3Double) -> None:
    double.faults.conflicts = 1000
    with pytest.raises(StoreError, match="says that the key is taken, and that nothing is there"):
        _open(double).create("lease", b"mine")
    assert double.objects == {}


def test_server_errors_are_retried(double: S3Double) -> None:
    double.faults.fail_puts = 2
    store = _open(double)
    store.put("k", b"x")
    assert store.get("k") == b"x"


def test_a_completed_upload_that_the_server_has_forgotten_is_sent_again(double: S3Double, tmp_path: Path) -> None:
    content = bytes(range(256)) * (10 * 2**12)
    (tmp_path / "file").write_bytes(content)
    double.faults.lose_completions = 1
    assert _open(double).upload("big", tmp_path / "file").size == len(content)
    assert double.objects["bucket/p/big"] == content
    assert len(double.uploads) == 2, "the client asked again and was told 404, so it was begun anew"


def test_an_upload_that_the_server_keeps_forgetting_ends_in_a_sentence(double: S3Double, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(9 * 2**20))
    double.faults.lose_completions = 1000
    with pytest.raises(StoreError, match="s3://bucket/p/big"):
        _open(double).upload("big", tmp_path / "file")


@pytest.mark.s3
def test_a_real_server_whose_answers_are_lost(seaweed: str, tmp_path: Path) -> None:
    """Every second answer is lost: whoever is told that it won has won, and big objects arrive whole."""
    url = s3_url(seaweed)
    content = random.Random(2).randbytes(9 * 2**20)
    (tmp_path / "file").write_bytes(content)
    with losing_proxy(seaweed, 0.5, seed=3) as losses:
        store, direct = Store.open(url.replace(seaweed, losses.endpoint)), Store.open(url)
        for number in range(6):
            bodies = [f"{number} of {racer}".encode() for racer in range(3)]
            won = [body for body in bodies if store.create(f"lease/{number}", body)]
            assert won == [direct.get(f"lease/{number}")]
        store.upload("data/big", tmp_path / "file")
        direct.download("data/big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    assert losses.lost > 5


def test_lasting_server_errors_end_in_a_sentence(double: S3Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend_module.RETRIES, "max_retries", 1)
    double.faults.fail_puts = 1000
    with pytest.raises(StoreError, match=r"s3://bucket/p/k: the server answered 500 \(InternalError\)"):
        _open(double).create("k", b"x")


def test_an_object_that_ends_early_is_no_download(double: S3Double, tmp_path: Path) -> None:
    store = _open(double)
    store.put("k", b"x" * 1000)
    double.faults.short_reads = True
    with pytest.raises(StoreError):
        store.download("k", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.s3
def test_wrong_credentials_are_told_at_once(seaweed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    store = Store.open(f"s3://tests/p?endpoint={seaweed}")
    (tmp_path / "file").write_bytes(b"x")
    begin = time.monotonic()
    for attempt in (
        lambda: store.get("k"),
        lambda: store.put("k", b"x"),
        lambda: store.create("k", b"x"),
        lambda: store.head("k"),
        lambda: store.list("k"),
        lambda: store.delete("k"),
        lambda: store.upload("k", tmp_path / "file"),
        store.probe,
        store.server_time,
    ):
        with pytest.raises(StoreError, match=r"refused the credentials.*check AWS_ACCESS_KEY_ID") as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert "wrong-secret" not in str(caught.value)
    assert time.monotonic() - begin < 60, "of the half minute for each"


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setitem(backend_module.RETRIES, "max_retries", 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        store = Store.open(f"s3://bucket/p?endpoint=http://127.0.0.1:{taken.getsockname()[1]}")
        begin = time.monotonic()
        with pytest.raises(StoreError, match=r"s3://bucket/p/k: the server cannot be reached; check"):
            store.create("k", b"x")
        with pytest.raises(StoreError, match="cannot be reached"):
            store.list()
        assert time.monotonic() - begin < 45, "of the half minute for each"


def test_retries_are_bounded_by_seconds() -> None:
    assert backend_module.RETRIES["retry_timeout"].total_seconds() <= 30
    assert backend_module.RETRIES["max_retries"] <= 10
