from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafthouse.errors import OutOfMemoryError, StatesError, StoreError
from drafthouse.progress import Silent
from drafthouse.states import ExtractSettings, StatesReader, presence, run_worker
from drafthouse.states.elements import stored_bytes
from drafthouse.states.heartbeat import Heartbeat
from drafthouse.states.shard import ShardFile
from drafthouse.states.spec import spec_of
from drafthouse.states.worker import default_worker_id
from drafthouse.store import Board, Done, Lease, Store
from tests.doubles.extraction import MemoryCorpus, TinyTaps
from tests.fixtures_s3 import s3_url
from tests.patience import until

ROOT = Path(__file__).parents[3]


def _scratch_is_empty(tmp_path: Path) -> bool:
    return not list(tmp_path.glob("drafthouse-states-*"))


def test_one_worker_does_everything(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    reported: list[Done] = []
    summary = run_worker(store, "run", corpus, target, settings, "w", on_shard=reported.append)
    assert (summary.worker, summary.shards, summary.tokens) == ("w", 3, corpus.tokens)
    assert (summary.redone, summary.lost, summary.interrupted) == (0, 0, False)
    done = Board(store, "run").all_done()
    assert sorted(marker.shard for marker in reported) == [marker.shard for marker in done]
    assert [marker.shard for marker in done] == sorted(corpus.shard_names)
    assert all(marker.extra["samples"] == 5 and marker.extra["shortened"] == 0 for marker in done)
    assert _scratch_is_empty(tmp_path)
    StatesReader(store, "run", cache=tmp_path / "cache").verify()


def test_a_second_call_finds_nothing_to_do(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    run_worker(store, "run", corpus, target, settings)
    before = [marker.token for marker in Board(store, "run").all_done()]
    assert run_worker(store, "run", corpus, target, settings).shards == 0
    assert [marker.token for marker in Board(store, "run").all_done()] == before


def test_the_model_sees_batches_and_not_samples(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    shapes: list[tuple[int, ...]] = []
    target.before = lambda ids: shapes.append(tuple(ids.shape))
    run_worker(store, "run", corpus, target, settings)
    assert len(shapes) == 6, "two batches for each shard of five samples"
    assert max(rows for rows, _ in shapes) == 3


def test_long_samples_are_cut(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    short = settings.model_copy(update={"max_tokens": 10})
    run_worker(store, "run", corpus, target, short)
    reader = StatesReader(store, "run", cache=tmp_path / "cache")
    assert max(len(reader.sample(i).input_ids) for i in range(len(reader))) == 10
    assert reader.tokens == sum(min(10, len(s.input_ids)) for made in corpus.shards.values() for s in made)
    shortened = sum(len(s.input_ids) > 10 for made in corpus.shards.values() for s in made)
    assert sum(marker.extra["shortened"] for marker in Board(store, "run").all_done()) == shortened


def test_workers_share_a_run(store: Store, settings: ExtractSettings) -> None:
    corpus = MemoryCorpus(shards=8)
    settings = settings.model_copy(update={"ttl_s": 10.0})
    summaries = []

    def work(name: str) -> None:
        summaries.append(run_worker(store, "run", corpus, TinyTaps(), settings, name))

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(summaries) == 3
    assert sum(summary.shards for summary in summaries) == 8
    assert sum(summary.lost for summary in summaries) == 0
    assert all(marker.epoch == 1 for marker in Board(store, "run").all_done())


@pytest.mark.s3
def test_a_run_on_s3(
    seaweed: str, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    store = Store.open(s3_url(seaweed))
    assert run_worker(store, "run", corpus, target, settings).shards == 3
    reader = StatesReader(store, "run", cache=tmp_path / "cache")
    reader.verify()
    assert reader.tokens == corpus.tokens


def test_another_spec_is_refused_and_named(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    run_worker(store, "run", corpus, target, settings)
    other = settings.model_copy(update={"layer_ids": (0, 1), "max_tokens": 32})
    with pytest.raises(StatesError, match=r"layer_ids: \[0, 2\] → \[0, 1\]; max_tokens: 64 → 32"):
        run_worker(store, "run", corpus, target, other)
    with pytest.raises(StatesError, match="target: tiny-4-16-0 → tiny-4-16-5"):
        run_worker(store, "run", corpus, TinyTaps(seed=5), settings)
    with pytest.raises(StatesError, match="corpus: "):
        run_worker(store, "run", MemoryCorpus(seed=3), target, settings)
    faster = settings.model_copy(update={"rows": 1, "ttl_s": 30.0})
    assert run_worker(store, "run", corpus, target, faster).shards == 0


def test_a_layer_out_of_range_touches_nothing(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    with pytest.raises(StatesError, match="this target has decoder layers 0 to 3"):
        run_worker(store, "run", corpus, target, settings.model_copy(update={"layer_ids": (0, 9)}))
    assert store.list() == []


def test_wrong_states_end_the_worker_and_free_the_shard(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    def spoil(out: Tensor) -> None:
        out[:, 0, 0, 0] = float("nan")

    target.spoil = spoil
    with pytest.raises(StatesError, match=r"shard [0-9a-f]{64}: the state of layer 0 is not finite"):
        run_worker(store, "run", corpus, target, settings)
    board = Board(store, "run")
    assert board.all_done() == []
    assert board.objects.list("data") == []
    assert all(state.status in {"free", "stale"} for state in board.states(corpus.shard_names).values())
    assert _scratch_is_empty(tmp_path)
    target.spoil = None
    summary = run_worker(store, "run", corpus, target, settings)
    assert summary.shards == 3
    assert summary.redone >= 1


def test_out_of_memory_ends_the_worker_and_frees_the_shard(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    target.before = fail
    with pytest.raises(OutOfMemoryError, match=r"rows × \d+ tokens does not fit cpu; lower"):
        run_worker(store, "run", corpus, target, settings)
    assert all(state.status in {"free", "stale"} for state in Board(store, "run").states(corpus.shard_names).values())
    assert _scratch_is_empty(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A store's directory on a disk that holds one shard and not two."""
    target = tmp_path / "disk"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(target)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def test_a_full_store_is_one_sentence(
    small_disk: Path, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    store = Store.open(str(small_disk))
    tight = settings.model_copy(update=dict.fromkeys(("disk_high", "disk_low", "shm_high", "shm_low"), 1.0))
    (small_disk / "filler").write_bytes(bytes(56 * 1024))
    with pytest.raises(StoreError, match="the disk is full; free space there and start again") as caught:
        run_worker(store, "run", corpus, target, tight)
    assert "\n" not in str(caught.value)
    assert len(Board(store, "run").all_done()) < 3
    for marker in Board(store, "run").all_done():
        info = Board(store, "run").objects.head(marker.key)
        assert info is not None
        assert info.size == marker.size
    assert not list(small_disk.rglob("*#*")), "no half-written rests"
    assert _scratch_is_empty(tmp_path)
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    run_worker(store, "run", corpus, target, tight)
    StatesReader(store, "run").verify()


def test_no_shard_is_claimed_on_a_nearly_full_disk(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    limits = dict.fromkeys(("disk_high", "disk_low", "shm_high", "shm_low"), 1e-9)
    full = settings.model_copy(update={**limits, "disk_wait_s": 0.1})
    corpus.manifest = dataclasses.replace(corpus.manifest, tokens=2**50)  # no disk holds so many states
    with pytest.raises(StoreError, match=r"the disk is \d+% full, and no shard is claimed from 0% on"):
        run_worker(store, "run", corpus, target, full)
    assert store.list("runs/run/lease") == []


@pytest.fixture
def large_full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 20 GB that is more than nine tenths full, and has more than 1 GiB free for all that."""
    image, target = tmp_path / "image", tmp_path / "large"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(20 * 10**9)  # a hole: it takes a few megabytes of the disk below
    make = ["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(image)]
    mount = ["mount", "-o", "loop", str(image), str(target)]
    for command in (make, mount):
        if not shutil.which(command[0]) or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a large file system needs root, ext4 and a loop device")
    try:
        with (target / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(target).free - 3 * 2**29)
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_a_disk_that_holds_the_whole_run_is_not_full_whatever_the_fraction(
    large_full_disk: Path, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    found = shutil.disk_usage(large_full_disk)
    assert found.used / (found.used + found.free) > settings.disk_high
    store = Store.open(str(large_full_disk / "store"))
    settings = settings.model_copy(update={"scratch": str(large_full_disk), "disk_wait_s": 0.1})
    summary = run_worker(store, "run", corpus, target, settings)
    assert (summary.shards, summary.waited_s < 0.1) == (3, True)
    too_large = MemoryCorpus(seed=1)
    token = stored_bytes(spec_of(target, too_large, settings))
    too_large.manifest = dataclasses.replace(too_large.manifest, tokens=found.free // 2 // token)
    with pytest.raises(StoreError, match=r"the disk is 9\d% full, and no shard is claimed from 90% on"):
        run_worker(store, "other", too_large, target, settings)
    assert store.list("runs/other/lease") == []


def test_a_slow_writer_blocks_the_producer(
    store: Store,
    corpus: MemoryCorpus,
    target: TinyTaps,
    settings: ExtractSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    ahead: list[int] = []
    write = ShardFile.write
    monkeypatch.setattr(presence, "CHANGED_S", 0.02)

    def slowly(self: ShardFile, parts: Sequence[Tensor], samples: Sequence[int]) -> None:
        if not written:  # not before the worker says that it waits
            board = Board(store, "run")
            until(lambda: board.presence("w")["waiting"] == "memory", "word that the device waits")
        write(self, parts, samples)
        written.append(len(samples))

    monkeypatch.setattr(ShardFile, "write", slowly)
    target.before = lambda ids: ahead.append(ids.shape[0]) or _at_most_one_waits(ahead, written)
    tight = settings.model_copy(update={"writer_bytes": 1, "writer_threads": 1, "shards_in_flight": 1})
    summary = run_worker(store, "run", corpus, target, tight, "w")
    assert summary.shards == 3
    assert sum(written) == 15
    assert summary.waited_s > 0, "the time that the device waits is told"


def _at_most_one_waits(captured: list[int], written: list[int]) -> None:
    assert len(captured) - len(written) <= 1, "a batch was captured before the last one was written"


def test_a_beat_that_fails_is_tried_again_and_a_loss_is_noticed(store: Store) -> None:
    class Shaky(Board):
        outage = 3
        beats = 0

        def heartbeat(self, lease: Lease, body: Mapping[str, Any]) -> None:
            self.beats += 1
            if self.beats <= self.outage:
                raise StoreError("the server cannot be reached")
            super().heartbeat(lease, body)

    board = Shaky(store, "run", ttl_s=0.08)
    lease = board.claim(["s"], "w")
    assert lease is not None
    with Heartbeat(board, "cpu") as heartbeat:
        heartbeat.hold(lease)
        until(lambda: store.head("runs/run/hb/s/000001"), "a beat")
        assert board.beats > 3
        assert not heartbeat.lost(lease)
        assert store.create("runs/run/lease/s/000002", b"{}")
        until(lambda: heartbeat.lost(lease), "the loss")
        heartbeat.drop(lease, board.release)
        beats = board.beats
        time.sleep(0.1)
    assert board.beats == beats
    assert heartbeat.held == []


def test_a_shard_taken_over_meanwhile_is_given_up(store: Store, target: TinyTaps, settings: ExtractSettings) -> None:
    """The worker stands still for longer than its lease; somebody else does the shard."""
    corpus = MemoryCorpus(shards=1)
    (name,) = corpus.shard_names
    quick = settings.model_copy(update={"ttl_s": 0.4})
    stalled = threading.Event()

    def stall(_: Tensor) -> None:
        if not stalled.is_set():
            stalled.set()
            run_worker(store, "run", corpus, TinyTaps(), quick, "heir")

    target.before = stall
    beat = Heartbeat.hold
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heartbeat, "hold", lambda self, lease: lease.worker == "heir" and beat(self, lease))
        summary = run_worker(store, "run", corpus, target, quick, "stalled")
    assert (summary.shards, summary.lost) == (0, 1)
    marker = Board(store, "run").done(name)
    assert marker is not None
    assert (marker.worker, marker.epoch) == ("heir", 2)
    assert [info.key for info in Board(store, "run").objects.list("data")] == [marker.key]


def test_heartbeats_say_what_goes_on(store: Store, target: TinyTaps, settings: ExtractSettings) -> None:
    corpus = MemoryCorpus(shards=1)
    seen: list[dict[str, Any]] = []
    board = Board(store, "run")
    batches = itertools.count()

    def beats() -> list[dict[str, Any]]:
        found = [json.loads(board.objects.get(info.key)) for info in board.objects.list("hb")]
        return [body for body in found if body["tokens"]]

    def look(_: Tensor) -> None:
        if next(batches) == 1:
            seen.extend(until(beats, "a beat that tells of the first batch"))

    target.before = look
    run_worker(store, "run", corpus, target, settings.model_copy(update={"ttl_s": 0.4}), "w")
    assert seen[-1]["worker"] == "w"
    assert seen[-1]["device"] == "cpu"
    assert seen[-1]["shard"] == corpus.shard_names[0]
    tokens = seen[-1]["tokens"]
    assert isinstance(tokens, int)
    assert 0 < tokens < corpus.tokens


def test_progress_reaches_the_number_of_shards(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    class Bar:
        total: float | None = None
        steps = 0.0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def advance(self, steps: float = 1, note: str | None = None) -> None:
            self.steps += steps

    class Bars(Silent):
        bar = Bar()

        def task(self, description: str, total: float | None) -> Bar:
            self.bar.total = total
            return self.bar

    bars = Bars()
    run_worker(store, "run", corpus, target, settings, progress=bars)
    assert bars.bar.steps == bars.bar.total == 3


def test_an_error_in_the_callers_report_ends_the_worker(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    def report(_: Done) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_worker(store, "run", corpus, target, settings, on_shard=report)
    assert _scratch_is_empty(tmp_path)
    assert "leased" not in {state.status for state in Board(store, "run").states(corpus.shard_names).values()}


def test_worker_ids() -> None:
    assert default_worker_id({}).endswith(f"-{os.getpid()}")
    assert f"-rank3-{os.getpid()}" in default_worker_id({"RANK": "3", "LOCAL_RANK": "1"})
    assert f"-rank1-{os.getpid()}" in default_worker_id({"LOCAL_RANK": "1"})


class Process:
    """A worker in a process of its own, over the doubles. One that is `held` stands still in its second shard until
    `go` is written."""

    def __init__(self, url: str, *, ttl: float, tmp_path: Path, held: bool = False) -> None:
        self.go = tmp_path / "go"
        command = [sys.executable, "-m", "tests.doubles.extract_worker", url, "run", str(ttl), "0"]
        command += ["4", str(self.go)] if held else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=240)
        return self.process.returncode, out, err

    def stands_in_its_second_shard(self, store: Store) -> None:
        """Wait until it does, and has committed the first."""
        until(
            lambda: (len(store.list("runs/run/done")), len(store.list("runs/run/lease"))) == (1, 2),
            "one shard that is done and one that is held",
            unless=lambda: self.process.poll() is not None and self.finish(),
        )


def test_a_killed_workers_shards_are_done_by_the_other(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    store, corpus = Store.open(url), MemoryCorpus(shards=6)
    board = Board(store, "run", ttl_s=2)
    victim = Process(url, ttl=2, tmp_path=tmp_path, held=True)
    victim.stands_in_its_second_shard(store)
    victim.process.send_signal(signal.SIGKILL)
    other = Process(url, ttl=2, tmp_path=tmp_path)
    assert victim.finish()[0] == -signal.SIGKILL
    code, out, err = other.finish()
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    done = board.all_done()
    assert [marker.shard for marker in done] == sorted(corpus.shard_names)
    again = [marker for marker in done if marker.epoch > 1]
    assert again, "the victim was killed in the middle of a shard"
    assert summary["redone"] == len(again)
    assert summary["shards"] + sum(marker.worker != summary["worker"] for marker in done) == 6
    assert not list(tmp_path.glob("drafthouse-states-*")), "the heir removes what the victim left in scratch"
    board.janitor()
    assert sorted(info.key for info in board.objects.list("data")) == sorted(marker.key for marker in done)
    reader = StatesReader(store, "run")
    reader.verify()
    assert reader.samples == 30
    assert len({reader.sample(i).id for i in range(30)}) == 30


def test_sigterm_releases_the_lease_at_once(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    store, corpus = Store.open(url), MemoryCorpus(shards=6)
    worker = Process(url, ttl=600, tmp_path=tmp_path, held=True)
    worker.stands_in_its_second_shard(store)
    worker.process.send_signal(signal.SIGTERM)
    worker.go.touch()
    code, out, err = worker.finish()
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["interrupted"]
    states = Board(store, "run").states(corpus.shard_names)
    assert {state.status for state in states.values()} <= {"free", "stale", "done"}
    assert sum(state.status == "done" for state in states.values()) == summary["shards"]
    begin = time.monotonic()
    rest = run_worker(store, "run", corpus, TinyTaps(), ExtractSettings(layer_ids=(0, 2), scratch=str(tmp_path)))
    assert time.monotonic() - begin < 300, "nobody waits for the ten minutes of the lease"
    assert rest.shards + summary["shards"] == 6
    assert dataclasses.asdict(rest)["interrupted"] is False
