"""The extraction worker: claim a shard, capture it, write it, upload it, commit it; as many at once as one
likes.

Any number of workers on any machines share a run through its store and nothing else. While a shard is hashed
and uploaded, the next one is captured. Each may die at any moment.
"""

from __future__ import annotations

import hashlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from drafthouse.errors import StatesError, StoreError
from drafthouse.progress import Progress, Silent, Task
from drafthouse.states.capture import Capture, Captured, plan
from drafthouse.states.elements import stored_bytes
from drafthouse.states.heartbeat import Heartbeat
from drafthouse.states.presence import Presence, reason_of
from drafthouse.states.pressure import ByteBudget, DiskGuard, Waiting, room_for
from drafthouse.states.protocols import Corpus, Taps
from drafthouse.states.scratch import scratch
from drafthouse.states.settings import ExtractSettings
from drafthouse.states.shard import ShardFile, ShardSample, cut
from drafthouse.states.spec import StatesSpec, spec_of
from drafthouse.store import Board, Done, FencedError, Lease, Store
from drafthouse.store.keys import segment_of

OnShard = Callable[[Done], None]
Check = Callable[[], None]


@dataclass(frozen=True)
class WorkerSummary:
    """What one worker did.

    Attributes:
        worker: its id.
        shards: shards that it committed.
        tokens: tokens in them.
        redone: those of them that others (or an earlier life) had begun.
        lost: shards that somebody else finished first, so that its work was thrown away.
        seconds: wall time of the whole call.
        waited_s: seconds in which the device waited for memory, disk or uploads.
        interrupted: it was told to stop (SIGTERM) before the run was complete.
    """

    worker: str
    shards: int
    tokens: int
    redone: int
    lost: int
    seconds: float
    waited_s: float
    interrupted: bool

    @property
    def rate(self) -> float:
        """Tokens a second, waiting included."""
        return self.tokens / self.seconds if self.seconds else 0.0


def default_worker_id(environment: Mapping[str, str] = os.environ) -> str:
    """Node, epoch of the job, torchrun's rank and process id: unique among all workers of a fleet.

    Node and epoch are what the fleet calls them (DRAFTHOUSE_NODE, DRAFTHOUSE_EPOCH) in a job that it started;
    elsewhere the node is the host's name. Without torchrun there is no rank.
    """
    node = _node(environment)
    epoch = environment.get("DRAFTHOUSE_EPOCH")
    rank = environment.get("RANK") or environment.get("LOCAL_RANK")
    parts = [node, f"e{epoch}" if epoch else "", f"rank{rank}" if rank else "", str(os.getpid())]
    return segment_of("-".join(part for part in parts if part))


def _node(environment: Mapping[str, str]) -> str:
    return environment.get("DRAFTHOUSE_NODE") or socket.gethostname()


def run_worker(
    store: Store,
    run: str,
    corpus_reader: Corpus,
    target: Taps,
    settings: ExtractSettings,
    worker_id: str | None = None,
    progress: Progress | None = None,
    on_shard: OnShard | None = None,
    still_ours: Check | None = None,
) -> WorkerSummary:
    """Work on the run until all its shards are done, by whomever. Waits for silent workers' leases to run
    out.

    Call it once in each process; torchrun's RANK and LOCAL_RANK name the worker when `worker_id` does not.
    SIGTERM (when called in the main thread) ends it early: started uploads are finished, other leases
    released.

    Args:
        store: where the run lies; checked for conditional puts first.
        run: its name; the first worker binds it to the target, corpus and settings.
        corpus_reader: shards of tokenised samples.
        target: whose states are captured, on its own device.
        on_shard: called in this thread for every shard that this worker committed.
        still_ours: called before every claim; what it raises ends the worker, whose leases are released first.

    Raises:
        FencedError: from `still_ours`, when the job was moved elsewhere.
        StatesError: another spec is bound to the run, a layer is out of range, or captured states are wrong.
        StoreError: the store is unreachable, unsafe or full, or a disk stayed full.
        OutOfMemoryError: a batch does not fit; names its size and the settings to lower.
    """
    begin = time.monotonic()
    spec = spec_of(target, corpus_reader, settings)
    store.probe()
    board = Board(store, run, ttl_s=settings.ttl_s)
    board.bind(spec.model_dump(mode="json"))
    worker = segment_of(worker_id) if worker_id else default_worker_id()
    with ExitStack() as stack:
        stop = stack.enter_context(told_to_stop())
        folder = stack.enter_context(scratch(settings.scratch))
        heartbeat = stack.enter_context(Heartbeat(board, str(target.device)))
        pipeline = _Pipeline(board, heartbeat, settings, stop)
        about = {"node": _node(os.environ), "job": os.environ.get("DRAFTHOUSE_JOB")}
        stack.enter_context(Presence(board, worker, target.device, pipeline.waiting, about, pipeline.doing))
        stack.enter_context(pipeline)
        bar = (progress or Silent()).task("hidden states", float(spec.shards))
        task = stack.enter_context(bar)
        loop = _Loop(board, spec, corpus_reader, Capture(target, spec), settings, worker, folder, pipeline)
        loop.run(store, task, on_shard, still_ours or (lambda: None))
        remaining = board.remaining(corpus_reader.shard_names)
    return WorkerSummary(
        worker=worker,
        shards=pipeline.shards,
        tokens=pipeline.tokens,
        redone=pipeline.redone,
        lost=pipeline.lost,
        seconds=time.monotonic() - begin,
        waited_s=pipeline.waited_s + loop.waited_s,
        interrupted=bool(remaining),
    )


class _Pipeline:
    """What happens to captured states: writer threads, then hash, upload and commit, behind the next
    capture."""

    def __init__(self, board: Board, heartbeat: Heartbeat, settings: ExtractSettings, wake: threading.Event) -> None:
        self.heartbeat = heartbeat
        self.stop = wake
        self.shards = self.tokens = self.redone = self.lost = 0
        self._board = board
        self.waiting = Waiting()
        self._budget = ByteBudget(settings.writer_bytes, self.waiting)
        self._writers = ThreadPoolExecutor(settings.writer_threads, "states-writer")
        self._finisher = ThreadPoolExecutor(1, "states-upload")
        self._slots = threading.Semaphore(settings.shards_in_flight)
        self._slots_waited = 0.0
        self._results: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._progressed = threading.Event()

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Uploads that were started are finished even when something else failed: their work is whole.
        self._writers.shutdown(wait=True)
        self._finisher.shutdown(wait=True)
        failed = isinstance(error, Exception) and not isinstance(error, FencedError)

        def give_up(lease: Lease) -> None:
            self._board.release(lease)
            if failed and error is not None:
                self._board.fail(lease, reason_of(error))

        for lease in self.heartbeat.held:
            try:
                self.heartbeat.drop(lease, give_up)
            except StoreError:
                continue  # it will go stale; the error that brought us here is the one to tell

    def doing(self) -> dict[str, Any]:
        """For people who look."""
        held = {lease.shard: tokens for lease, tokens in self.heartbeat.captured.items()}
        return {"held": held, "shards": self.shards, "tokens": self.tokens}

    @property
    def waited_s(self) -> float:
        return self._budget.waited_s + self._slots_waited

    def check(self) -> None:
        """Raise what went wrong in a thread."""
        self._budget.check()

    def take(self, count: int) -> None:
        self._budget.take(count)

    def give_back(self, count: int) -> None:
        self._budget.give_back(count)

    def write(self, file: ShardFile, captured: Captured, count: int, where: str) -> Future[None]:
        """Queue a batch; its `count` bytes are given back when it is on the disk."""

        def job() -> None:
            try:
                file.write(captured.wait(where), captured.samples)
            except BaseException as error:
                self._budget.fail(error)
                raise
            finally:
                self._budget.give_back(count)

        return self._writers.submit(job)

    def finish(self, lease: Lease, file: ShardFile, writes: Sequence[Future[None]], extra: dict[str, Any]) -> None:
        """Queue hash, upload and commit of a captured shard; blocks while too many wait."""
        begin = time.monotonic()
        with self.waiting.on("uploads"):
            self._slots.acquire()
        self._slots_waited += time.monotonic() - begin

        def job() -> None:
            try:
                self._commit(lease, file, writes, extra)
            except BaseException as error:
                self._budget.fail(error)
            finally:
                wait(writes)  # a thread that still writes must not meet a closed file
                file.abort()
                self._slots.release()
                self._progressed.set()

        self._finisher.submit(job)

    def wait(self, seconds: float) -> None:
        """Until a shard is through, but no longer than `seconds`."""
        self._progressed.wait(seconds)
        self._progressed.clear()

    def results(self) -> Iterator[Done]:
        """The commits since the last call."""
        while True:
            try:
                yield self._results.get_nowait()
            except queue.Empty:
                return

    def drain(self) -> None:
        """Wait for everything that was queued."""
        self._writers.shutdown(wait=True)
        self._finisher.shutdown(wait=True)
        self.check()

    def _commit(self, lease: Lease, file: ShardFile, writes: Sequence[Future[None]], extra: dict[str, Any]) -> None:
        for write in writes:
            write.result()
        sha256 = file.finish()
        if self._board.lost(lease):
            self._forget(lease)
            return
        key = self._board.data_key(lease)
        self._board.objects.upload(key, file.path)
        if not self._board.commit(lease, size=file.size, sha256=sha256, tokens=file.tokens, extra=extra):
            self._forget(lease)
            return
        self.heartbeat.drop(lease)
        self.shards += 1
        self.tokens += file.tokens
        self.redone += lease.epoch > 1
        done = self._board.done(lease.shard)
        if done is not None:
            self._results.put(done)

    def _forget(self, lease: Lease) -> None:
        self.lost += 1
        self.heartbeat.drop(lease)


class _Loop:
    """Claiming and capturing, in the caller's thread."""

    def __init__(
        self,
        board: Board,
        spec: StatesSpec,
        corpus: Corpus,
        capture: Capture,
        settings: ExtractSettings,
        worker: str,
        folder: Path,
        pipeline: _Pipeline,
    ) -> None:
        self.waited_s = 0.0
        self._board, self._spec, self._corpus, self._capture = board, spec, corpus, capture
        self._settings, self._worker, self._folder, self._pipeline = settings, worker, folder, pipeline
        self._poll = min(2.0, max(0.2, settings.ttl_s / 10))

    def run(self, store: Store, task: Task, on_shard: OnShard | None, still_ours: Check) -> None:
        names = _rotated(self._corpus.shard_names, self._worker)
        own = store.local_path("runs")
        folders = [self._folder] if own is None else [self._folder, own]
        limits = self._settings
        guard = DiskGuard(
            folders,
            limits.disk_high,
            limits.disk_low,
            memory_high=limits.shm_high,
            memory_low=limits.shm_low,
            enough=room_for(self._corpus.manifest.tokens * stored_bytes(self._spec)),
        )
        shown = 0
        while True:
            self._pipeline.check()
            remaining = self._board.remaining(names)
            task.advance(len(names) - len(remaining) - shown, self._rate())
            shown = len(names) - len(remaining)
            self._report(on_shard)
            if not remaining or self._pipeline.stop.is_set() or not self._await_space(guard, task):
                break
            still_ours()
            lease = self._board.claim(remaining, self._worker)
            if lease is None:
                self._pipeline.waiting.reason = "leases"
                self._pipeline.wait(self._poll)
            else:
                self._pipeline.waiting.reason = None
                self._extract(lease)
        self._pipeline.drain()
        task.advance(len(names) - len(self._board.remaining(names)) - shown, self._rate())
        self._report(on_shard)

    def _extract(self, lease: Lease) -> None:
        pipeline, begin = self._pipeline, time.monotonic()
        pipeline.heartbeat.hold(lease)
        corpus_samples = self._corpus.shard(lease.shard)
        samples = cut(corpus_samples, self._spec.max_tokens, lease.shard)
        shortened = sum(len(a.input_ids) < len(b.input_ids) for a, b in zip(samples, corpus_samples, strict=True))
        file = ShardFile(self._folder / f"{lease.shard}.{lease.epoch}", self._spec, samples)
        writes: list[Future[None]] = []
        handed_over = False
        try:
            if not self._capture_all(lease, file, samples, writes):
                return
            seconds = time.monotonic() - begin
            extra = {
                "samples": len(samples),
                "shortened": shortened,
                "capture_s": round(seconds, 3),
                "node": _node(os.environ),
            }
            pipeline.finish(lease, file, writes, extra)
            handed_over = True
        finally:
            if not handed_over:
                wait(writes)
                file.abort()

    def _capture_all(
        self, lease: Lease, file: ShardFile, samples: list[ShardSample], writes: list[Future[None]]
    ) -> bool:
        """False when the shard was given up: told to stop, or taken over by somebody else."""
        pipeline, tokens = self._pipeline, 0
        for batch in plan([len(sample.input_ids) for sample in samples], self._settings):
            if pipeline.stop.is_set():
                return False  # the lease is released when the worker ends
            if pipeline.heartbeat.lost(lease):
                pipeline.lost += 1
                pipeline.heartbeat.drop(lease)
                return False
            valid = sum(len(samples[i].input_ids) for i in batch.samples)
            count = self._capture.host_bytes(valid)
            pipeline.take(count)
            try:
                captured = self._capture.run(samples, batch)
            except BaseException:
                pipeline.give_back(count)
                raise
            writes.append(pipeline.write(file, captured, count, f"shard {lease.shard}"))
            tokens += valid
            pipeline.heartbeat.report(lease, tokens)
        return True

    def _await_space(self, guard: DiskGuard, task: Task) -> bool:
        """False when the worker was told to stop meanwhile.

        Raises:
            StoreError: the disk stayed full.
        """
        if guard.full() is None:
            return True
        begin = time.monotonic()
        with self._pipeline.waiting.on("disk"):
            while (found := guard.full()) is not None:
                folder, fraction = found
                if time.monotonic() - begin >= self._settings.disk_wait_s:
                    raise StoreError(
                        f"the disk is {fraction:.0%} full, and no shard is claimed from {guard.limit(folder):.0%} on",
                        where=str(folder),
                        fix="free space there, or set extract.scratch to a larger disk",
                    )
                task.advance(0, f"waiting for space: {folder} is {fraction:.0%} full")
                self._pipeline.wait(min(self._poll, 1.0))
                self._pipeline.check()
                if self._pipeline.stop.is_set():
                    return False
        self.waited_s += time.monotonic() - begin
        return True

    def _report(self, on_shard: OnShard | None) -> None:
        for done in self._pipeline.results():
            if on_shard is not None:
                on_shard(done)

    def _rate(self) -> str | None:
        return f"{self._pipeline.tokens} tokens" if self._pipeline.tokens else None


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGTERM sets. Outside the main thread Python allows no handler: then it is never set."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _rotated(names: Sequence[str], worker: str) -> list[str]:
    """`names` from a place that depends on the worker, so that workers seldom want the same shard."""
    if not names:
        raise StatesError("the corpus has no shards", fix="build the corpus first")
    first = int.from_bytes(hashlib.sha256(worker.encode()).digest()[:8], "big") % len(names)
    return [*names[first:], *names[:first]]
