"""Let the target answer the prompts of a corpus itself, shard by shard under leases.

A drafter is accepted when it foresees what the target says, not what a data set says; so the corpus that it
learns from holds the target's own answers. Any number of workers share the work through the store, each may
die, and the sealed result does not depend on who answered what.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafthouse.corpus import CorpusReader, CorpusWriter, Manifest
from drafthouse.corpus.records import TokenSample
from drafthouse.corpus.shards import pack, unpack
from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.errors import CorpusError
from drafthouse.progress import Progress, Task
from drafthouse.states.heartbeat import Heartbeat
from drafthouse.states.worker import default_worker_id, told_to_stop
from drafthouse.store import Board, Store
from drafthouse.target import Target


@dataclass(frozen=True)
class Answering:
    """One answering job.

    Attributes:
        store: holds the corpus, the leases and the result.
        questions: name of the corpus whose prompts are answered.
        run: name of the run on the store's board, and of the sealed corpus.
        settings: how answers are decoded.
        ttl_s: seconds of silence after which others take over a shard.
        still_ours: called before every claim; what it raises ends the worker.
    """

    store: Store
    questions: str
    run: str
    settings: DecodeSettings
    ttl_s: float
    still_ours: Callable[[], None] | None = None

    def work(self, target: Target, worker: str | None, progress: Progress) -> int:
        """Answer shards until all of them are done, by whomever; returns how many this worker committed.

        SIGTERM (in the main thread) ends it after the prompts that it decodes just now; the lease is released.

        Raises:
            StatesError: the run was begun with another target, corpus or sampling.
            StoreError: the store cannot hold leases.
            FencedError: from `still_ours`, when the job was moved elsewhere.
        """
        self.store.probe()
        reader = CorpusReader(self.store, self.questions)
        names = reader.shard_names
        board = self._board()
        board.bind(self._spec(target, reader))
        name = worker or default_worker_id()
        stepper, committed, shown = Stepper(target), 0, 0
        with (
            told_to_stop() as told,
            progress.task("answers of the target", len(names)) as task,
            Heartbeat(board, str(target.device)) as heartbeat,
        ):
            while (remaining := board.remaining(names)) and not told.is_set():
                task.advance(len(names) - len(remaining) - shown)
                shown = len(names) - len(remaining)
                if self.still_ours is not None:
                    self.still_ours()
                lease = board.claim(remaining, name)
                if lease is None:
                    told.wait(min(1.0, self.ttl_s / 5))
                    continue
                heartbeat.hold(lease)
                try:
                    samples = self._answer(stepper, reader.shard(lease.shard), _Until(told))
                except _StoppedError:
                    heartbeat.drop(lease, board.release)
                    break
                data = pack(samples, reader.manifest.tokenizer_sha256)
                board.objects.put(board.data_key(lease), data)
                committed += board.commit(
                    lease,
                    size=len(data),
                    sha256=hashlib.sha256(data).hexdigest(),
                    tokens=sum(len(sample.input_ids) for sample in samples),
                    extra={"samples": len(samples)},
                )
                heartbeat.drop(lease)
            task.advance(len(names) - len(board.remaining(names)) - shown)
        return committed

    def seal(self, target: Target) -> Manifest:
        """Make the finished shards a corpus, in the order of the questions.

        Raises:
            CorpusError: shards are missing, or an answered shard is damaged.
        """
        reader = CorpusReader(self.store, self.questions)
        board = self._board()
        if missing := board.remaining(reader.shard_names):
            raise CorpusError(
                f"{len(missing)} of {len(reader.shard_names)} shards are not answered yet",
                where=self.run,
                fix="run the answering workers until they end",
            )
        spec = self._spec(target, reader)
        size = reader.manifest.shards[0].samples
        writer = CorpusWriter(self.store, self.run, reader.manifest.tokenizer_sha256, size)
        for name in reader.shard_names:
            done = board.done(name)
            assert done is not None, "remaining() said so"
            data = board.objects.get(done.key)
            if hashlib.sha256(data).hexdigest() != done.sha256:
                raise CorpusError(
                    "an answered shard is damaged", where=done.key, fix="begin a new run: its data changed"
                )
            for sample in unpack(data, done.key):
                writer.add(sample)
        return writer.finish(split=reader.manifest.split, settings=spec)

    def _board(self) -> Board:
        return Board(self.store, self.run, ttl_s=self.ttl_s)

    def _spec(self, target: Target, reader: CorpusReader) -> dict[str, Any]:
        return {
            "target": target.identity,
            "corpus": reader.manifest.digest,
            "decode": self.settings.model_dump(mode="json", exclude={"rows"}),
        }

    def _answer(self, stepper: Stepper, samples: list[TokenSample], until: _Until) -> list[TokenSample]:
        prompts = [prompt_of(sample) for sample in samples]
        generations = decode(stepper, None, prompts, self.settings, progress=until)
        answered = []
        for sample, prompt, generation in zip(samples, prompts, generations, strict=True):
            ids = np.concatenate([prompt, np.array(generation.tokens, dtype=np.int32)])
            mask = np.zeros(len(ids), dtype=np.uint8)
            mask[len(prompt) :] = 1
            answered.append(TokenSample(sample.id, sample.kind, ids, mask))
        return answered


class _StoppedError(Exception):
    """The worker was told to stop."""


@dataclass(frozen=True)
class _Until:
    """A progress that ends the work that reports to it: decoding does so after every batch of prompts."""

    told: threading.Event

    @contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Task]:
        yield self

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        if self.told.is_set():
            raise _StoppedError


def prompt_of(sample: TokenSample) -> np.ndarray:
    """The tokens before the last assistant turn, its generation prompt included."""
    on = np.flatnonzero(sample.loss_mask)
    gaps = np.flatnonzero(np.diff(on) > 1)
    first = on[gaps[-1] + 1] if len(gaps) else on[0]
    return sample.input_ids[:first]
