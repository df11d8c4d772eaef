"""Many real processes on one run, on a directory and on a real S3 server behind a proxy that loses answers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafthouse.store import Board, Store
from tests.doubles.s3_server import losing_proxy
from tests.fixtures_s3 import s3_url


def _stress(url: str, folder: Path, *, shards: int, ttl_s: float) -> dict[str, int]:
    folder.mkdir()
    Store.open(url).probe()
    command = [sys.executable, "-m", "tests.unit.store.stress", url, str(folder), str(shards), str(ttl_s), "7"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    counts: dict[str, int] = json.loads(ran.stdout)
    assert counts.get("ended", 0) >= 1, ran.stderr[-2000:]
    assert counts["killed"] >= 4, "it was too quiet to show anything"
    assert counts["paused"] >= 2
    return counts


def _check(store: Store, folder: Path, *, shards: int, ttl_s: float) -> Board:
    """Every shard is there exactly once, with its hash, and whoever was told to have won has won."""
    board = Board(store, "run", ttl_s=ttl_s)
    markers = board.all_done()
    assert [marker.shard for marker in markers] == [f"s{number:02d}" for number in range(shards)]
    for marker in markers:
        board.objects.download(marker.key, folder / "copy")
        content = (folder / "copy").read_bytes()
        assert len(content) == marker.size
        assert hashlib.sha256(content).hexdigest() == marker.sha256
    wins = dict(line.split() for line in (folder / "wins").read_text().splitlines())
    assert len(wins) == len((folder / "wins").read_text().splitlines()), "one shard was won twice"
    won = {marker.shard: marker.sha256 for marker in markers}
    assert wins.items() <= won.items()
    time.sleep(ttl_s + 1)
    board.janitor()
    assert [info.key for info in board.objects.list("data")] == [marker.key for marker in markers]
    assert any(marker.epoch > 1 for marker in markers), "nobody's work was taken over"
    return board


def test_on_a_directory(tmp_path: Path) -> None:
    url, folder = str(tmp_path / "store"), tmp_path / "scratch"
    counts = _stress(url, folder, shards=24, ttl_s=1.0)
    assert counts.get("failed", 0) == 0
    _check(Store.open(url), folder, shards=24, ttl_s=1.0)


@pytest.mark.s3
def test_on_a_server_that_loses_answers(seaweed: str, tmp_path: Path) -> None:
    url, folder = s3_url(seaweed), tmp_path / "scratch"
    with losing_proxy(seaweed, 0.1, seed=5) as losses:
        _stress(url.replace(seaweed, losses.endpoint), folder, shards=16, ttl_s=2.0)
    assert losses.lost > 20
    _check(Store.open(url), folder, shards=16, ttl_s=2.0)
