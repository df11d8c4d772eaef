"""Reading a states run: shards verified once and mapped into memory, batches that are a function of the
step."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthouse.errors import StatesError
from drafthouse.states.shard import OpenShard, sha256_of
from drafthouse.states.spec import StatesSpec, parse_spec
from drafthouse.store import Board, Done, ObjectMissingError, Store

IN_MEMORY_BYTES = 2 * 2**30


@dataclass(frozen=True)
class StateSample:
    """One sample: input_ids i32 `[T]`, loss_mask u8 `[T]`, hidden_states bf16 `[T, K, H]`,
    last_hidden_state bf16 `[T, H]`. The tensors are views of the shard: do not write to them."""

    id: str
    kind: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor
    last_hidden_state: Tensor


@dataclass(frozen=True)
class StateBatch:
    """Samples as rows, padded on the right with zeros.

    Attributes:
        input_ids: i64 `[rows, seq]`.
        loss_mask: bool `[rows, seq]`.
        lengths: i64 `[rows]`.
        hidden_states: bf16 `[rows, seq, K, hidden]`, outputs of the spec's `layer_ids`.
        last_hidden_state: bf16 `[rows, seq, hidden]`, before the final norm.
        ids: name of each row's sample.
        kinds: kind of each row's sample.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    hidden_states: Tensor
    last_hidden_state: Tensor
    ids: tuple[str, ...]
    kinds: tuple[str, ...]


class StatesReader:
    """A states run of a store.

    The sha256 of every shard is compared with its done-marker when it is first used. Shards of a `file:`
    store are mapped where they lie; others are copied to `cache` first, the next one while this one is read.

    Args:
        store: where the run lies.
        run: its name.
        cache: directory for copies; none: ``$XDG_CACHE_HOME/drafthouse/states``.
        in_memory_bytes: runs up to this size are kept in memory whole.
        allow_incomplete: read what is there although shards are missing.

    Raises:
        StatesError: there is no such run, or not all of its shards are done.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        cache: Path | None = None,
        in_memory_bytes: int = IN_MEMORY_BYTES,
        allow_incomplete: bool = False,
    ) -> None:
        board = Board(store, run)
        self._objects = board.objects
        values = board.spec()
        if values is None:
            raise StatesError("there is no such states run", where=board.objects.url, fix="extract it first")
        self.spec: StatesSpec = parse_spec(values, f"{board.objects.url}/spec.json")
        self._shards = board.all_done()
        missing = self.spec.shards - len(self._shards)
        if not self._shards or (missing and not allow_incomplete):
            raise StatesError(
                f"{len(self._shards)} of {self.spec.shards} shards are done",
                where=board.objects.url,
                fix="let the extraction finish",
            )
        self._cache = cache
        self._keep = sum(done.size for done in self._shards) <= in_memory_bytes
        self._counts = np.array([_samples_of(done, board.objects.url) for done in self._shards], dtype=np.int64)
        self._ends = np.cumsum(self._counts)
        self._open: dict[int, Future[OpenShard]] = {}
        self._lock = threading.Lock()
        self._opener = ThreadPoolExecutor(1, "states-reader")
        self.samples = int(self._ends[-1])
        self.tokens = sum(done.tokens for done in self._shards)

    def __len__(self) -> int:
        return self.samples

    def sample(self, index: int) -> StateSample:
        """Sample number `index`, counted over the shards in the order of their names.

        Raises:
            StatesError: there is no such sample, or its shard is damaged.
        """
        if not 0 <= index < self.samples:
            raise StatesError(f"there is no sample {index}", fix=f"samples are 0 to {self.samples - 1}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return self._sample(shard, index - int(self._ends[shard] - self._counts[shard]))

    def verify(self) -> None:
        """Open and hash all shards now.

        Raises:
            StatesError: a shard is missing, cut off, changed, or of another specification.
        """
        for shard in range(len(self._shards)):
            self._shard(shard)

    def batches(
        self, rows: int, seed: int, start_step: int = 0, *, rank: int = 0, ranks: int = 1
    ) -> Iterator[StateBatch]:
        """Batches without end, shuffled by shard and within shards, differently in every epoch.

        Batch number `step` is a function of (run, rows, seed, step, rank, ranks) alone: a training run that
        starts again at `start_step` sees what it would have seen. A batch may reach over the end of an epoch,
        so every sample is seen equally often and all batches have `rows` rows.

        Args:
            rows: samples in a batch.
            seed: of the order.
            start_step: number of the first batch to yield.
            rank: of this process among `ranks` that share every step's `rows * ranks` samples.
        """
        if rows < 1 or start_step < 0 or not 0 <= rank < ranks:
            raise StatesError(
                f"no batches with rows={rows}, start_step={start_step}, rank={rank} of {ranks}",
                fix="use at least one row, a step from 0 on and a rank below ranks",
            )

        @lru_cache(maxsize=2)
        def order(epoch: int) -> _Order:
            return _Order(self._counts, seed, epoch)

        step = start_step
        while True:
            first = (step * ranks + rank) * rows
            places = [order(n // self.samples).place(n % self.samples) for n in range(first, first + rows)]
            self._prepare(places[0][0])  # before the one that follows: they are opened one after the other
            following = order(first // self.samples).shard_after(places[0][0])
            if following is not None:
                self._prepare(following)
            yield _collate([self._sample(shard, sample) for shard, sample in places])
            step += 1

    def _sample(self, shard: int, index: int) -> StateSample:
        opened = self._shard(shard)
        begin, end = opened.offsets[index], opened.offsets[index + 1]
        hidden, last = opened.states(begin, end)
        return StateSample(
            id=opened.ids[index],
            kind=opened.kinds[index],
            input_ids=opened.input_ids[begin:end],
            loss_mask=opened.loss_mask[begin:end],
            hidden_states=hidden,
            last_hidden_state=last,
        )

    def _shard(self, shard: int) -> OpenShard:
        return self._prepare(shard).result()

    def _prepare(self, shard: int) -> Future[OpenShard]:
        with self._lock:
            if shard not in self._open:
                self._open[shard] = self._opener.submit(self._open_shard, self._shards[shard])
            return self._open[shard]

    def _open_shard(self, done: Done) -> OpenShard:
        where = f"{self._objects.url}/{done.key}"
        local = self._objects.local_path(done.key)
        if local is not None:
            _verify(local, done, where)
        else:
            local = self._copy(done, where)
        opened = OpenShard(local, self.spec, where)
        if len(opened) != _samples_of(done, where) or opened.input_ids.shape[0] != done.tokens:
            raise StatesError("the shard does not hold what its done-marker says", where=where)
        if self._keep:
            opened.load()
        return opened

    def _copy(self, done: Done, where: str) -> Path:
        folder = self._cache or _default_cache()
        path = folder / f"{done.sha256}.safetensors"
        if path.exists() and path.stat().st_size == done.size and sha256_of(path) == done.sha256:
            return path
        try:
            self._objects.download(done.key, path)
        except ObjectMissingError:
            raise _missing(where) from None
        try:
            _verify(path, done, where)
        except StatesError:
            path.unlink(missing_ok=True)
            raise
        return path


class _Order:
    """The order of one epoch: shards shuffled, and the samples of each."""

    def __init__(self, counts: npt.NDArray[np.int64], seed: int, epoch: int) -> None:
        self._seed, self._epoch = seed, epoch
        self._counts = counts
        self._shards = _random(seed, epoch, -1).permutation(len(counts))
        self._ends = np.cumsum(counts[self._shards])
        self._within: dict[int, npt.NDArray[np.int64]] = {}

    def place(self, position: int) -> tuple[int, int]:
        """(shard, sample within it) at this position of the epoch."""
        turn = int(np.searchsorted(self._ends, position, side="right"))
        shard = int(self._shards[turn])
        if shard not in self._within:
            self._within[shard] = _random(self._seed, self._epoch, shard).permutation(self._counts[shard])
        return shard, int(self._within[shard][position - int(self._ends[turn] - self._counts[shard])])

    def shard_after(self, shard: int) -> int | None:
        """The shard whose turn comes after that of `shard`, if there is one in this epoch."""
        turn = int(np.flatnonzero(self._shards == shard)[0]) + 1
        return int(self._shards[turn]) if turn < len(self._shards) else None


def _random(seed: int, epoch: int, shard: int) -> np.random.RandomState:
    # RandomState and not Generator: only its streams are frozen for all versions of numpy (NEP 19).
    digest = hashlib.sha256(f"{seed}/{epoch}/{shard}".encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype=np.uint32))


def _collate(samples: list[StateSample]) -> StateBatch:
    rows, length = len(samples), max(len(sample.input_ids) for sample in samples)
    taps, width = samples[0].hidden_states.shape[1:]
    ids = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    hidden = torch.zeros(rows, length, taps, width, dtype=samples[0].hidden_states.dtype)
    last = torch.zeros(rows, length, width, dtype=samples[0].last_hidden_state.dtype)
    for row, sample in enumerate(samples):
        end = len(sample.input_ids)
        ids[row, :end] = sample.input_ids
        mask[row, :end] = sample.loss_mask != 0
        hidden[row, :end] = sample.hidden_states
        last[row, :end] = sample.last_hidden_state
    return StateBatch(
        input_ids=ids,
        loss_mask=mask,
        lengths=torch.tensor([len(sample.input_ids) for sample in samples]),
        hidden_states=hidden,
        last_hidden_state=last,
        ids=tuple(sample.id for sample in samples),
        kinds=tuple(sample.kind for sample in samples),
    )


def _verify(path: Path, done: Done, where: str) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise _missing(where) from None
    if size != done.size:
        raise StatesError(
            f"the shard {done.shard} is cut off: {size} of {done.size} bytes",
            where=where,
            fix="delete its done-marker and extract it again",
        )
    found = sha256_of(path)
    if found != done.sha256:
        raise StatesError(
            f"the shard {done.shard} was changed: its sha256 is {found}, and its done-marker says {done.sha256}",
            where=where,
            fix="delete its done-marker and extract it again",
        )


def _missing(where: str) -> StatesError:
    return StatesError(
        "the shard is done and its data is gone",
        where=where,
        fix="delete its done-marker and extract it again",
    )


def _samples_of(done: Done, where: str) -> int:
    samples = done.extra.get("samples")
    if not isinstance(samples, int) or samples < 1:
        raise StatesError(f"the done-marker of {done.shard} does not count its samples", where=where)
    return samples


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "drafthouse" / "states"
