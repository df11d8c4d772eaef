from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from drafthouse.errors import StatesError
from drafthouse.states import ExtractSettings, StateBatch, StatesReader, run_worker
from drafthouse.store import Board, Store
from tests.doubles.extraction import MemoryCorpus, TinyTaps


def _take(reader: StatesReader, count: int, start: int = 0, rows: int = 4, **more: int) -> list[StateBatch]:
    return list(itertools.islice(reader.batches(rows, 7, start, **more), count))


def _equal(one: StateBatch, other: StateBatch) -> bool:
    names = ("input_ids", "loss_mask", "lengths", "hidden_states", "last_hidden_state")
    return one.ids == other.ids and all(torch.equal(getattr(one, n), getattr(other, n)) for n in names)


def test_samples_are_those_of_the_corpus_with_their_states(
    extracted: Store, corpus: MemoryCorpus, target: TinyTaps
) -> None:
    reader = StatesReader(extracted, "run")
    assert len(reader) == reader.samples == 15
    assert reader.tokens == corpus.tokens
    expected = [sample for name in sorted(corpus.shard_names) for sample in corpus.shard(name)]
    for index, wanted in enumerate(expected):
        sample = reader.sample(index)
        assert (sample.id, sample.kind) == (wanted.id, wanted.kind)
        assert np.array_equal(sample.input_ids.numpy(), wanted.input_ids)
        assert np.array_equal(sample.loss_mask.numpy(), wanted.loss_mask)
        ids = torch.from_numpy(wanted.input_ids).long()[None]
        alone = target.capture(ids, torch.tensor([ids.shape[1]]), (0, 2))[0].bfloat16()
        torch.testing.assert_close(sample.hidden_states, alone[:, :2], rtol=0.01, atol=1e-3)
        torch.testing.assert_close(sample.last_hidden_state, alone[:, 2], rtol=0.01, atol=1e-3)


def test_batches_are_padded_on_the_right(extracted: Store) -> None:
    reader = StatesReader(extracted, "run")
    samples = {reader.sample(i).id: reader.sample(i) for i in range(len(reader))}
    (batch,) = _take(reader, 1)
    rows, length = batch.input_ids.shape
    assert rows == 4
    assert length == int(batch.lengths.max())
    assert batch.hidden_states.shape == (rows, length, 2, 16)
    assert batch.last_hidden_state.shape == (rows, length, 16)
    assert (batch.input_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
    for row, name in enumerate(batch.ids):
        sample, end = samples[name], int(batch.lengths[row])
        assert batch.kinds[row] == sample.kind
        assert torch.equal(batch.input_ids[row, :end], sample.input_ids.long())
        assert torch.equal(batch.loss_mask[row, :end], sample.loss_mask.bool())
        assert torch.equal(batch.hidden_states[row, :end], sample.hidden_states)
        assert torch.equal(batch.last_hidden_state[row, :end], sample.last_hidden_state)
        for tensor in (batch.input_ids, batch.loss_mask, batch.hidden_states, batch.last_hidden_state):
            assert not tensor[row, end:].any()


def test_a_batch_is_a_function_of_its_step(extracted: Store) -> None:
    whole = _take(StatesReader(extracted, "run"), 12)
    for start in (0, 1, 5, 11):
        again = _take(StatesReader(extracted, "run"), 12 - start, start)
        assert all(_equal(a, b) for a, b in zip(again, whole[start:], strict=True))
    other = next(StatesReader(extracted, "run").batches(4, 8, 0))
    assert not _equal(other, whole[0])


def test_every_epoch_holds_every_sample_once_in_another_order(extracted: Store) -> None:
    seen = [name for batch in _take(StatesReader(extracted, "run"), 15) for name in batch.ids]
    epochs = [tuple(seen[first : first + 15]) for first in range(0, 60, 15)]
    assert all(len(set(epoch)) == 15 for epoch in epochs)
    assert len(set(epochs)) == 4


def test_samples_of_a_shard_stay_together_in_an_epoch(extracted: Store) -> None:
    seen = [name for batch in _take(StatesReader(extracted, "run"), 3, rows=5) for name in batch.ids]
    shards = [name.split("/")[0] for name in seen]
    assert len([key for key, _ in itertools.groupby(shards)]) == 3
    assert [name.split("/")[1] for name in seen[:5]] != ["0", "1", "2", "3", "4"]


def test_the_order_is_frozen(extracted: Store) -> None:
    """With another order after an upgrade, a resumed training would see samples twice."""
    seen = [name for batch in _take(StatesReader(extracted, "run"), 2, rows=5) for name in batch.ids]
    assert seen == FROZEN


FROZEN = ["0/4", "0/0", "0/3", "0/2", "0/1", "1/4", "1/2", "1/3", "1/1", "1/0"]


def test_more_rows_than_samples(extracted: Store) -> None:
    batch = next(StatesReader(extracted, "run").batches(40, 7))
    assert batch.input_ids.shape[0] == 40
    assert len(set(batch.ids)) == 15


def test_ranks_share_a_step(extracted: Store) -> None:
    whole = _take(StatesReader(extracted, "run"), 3, rows=4)
    halves = [_take(StatesReader(extracted, "run"), 3, rows=2, rank=rank, ranks=2) for rank in (0, 1)]
    for step in range(3):
        assert halves[0][step].ids + halves[1][step].ids == whole[step].ids


def test_mapped_and_kept_in_memory_are_equal(extracted: Store) -> None:
    mapped = _take(StatesReader(extracted, "run", in_memory_bytes=0), 4)
    kept = _take(StatesReader(extracted, "run"), 4)
    assert all(_equal(a, b) for a, b in zip(mapped, kept, strict=True))


def test_a_remote_run_is_copied_to_the_cache_once(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    run_worker(store, "run", corpus, target, settings)
    cache = tmp_path / "cache"
    first = _take(StatesReader(store, "run", cache=cache, in_memory_bytes=0), 4)
    names = sorted(path.name for path in cache.iterdir())
    assert names == sorted(f"{done.sha256}.safetensors" for done in Board(store, "run").all_done())
    for done in Board(store, "run").all_done():
        store.delete(f"runs/run/{done.key}")
    again = _take(StatesReader(store, "run", cache=cache, in_memory_bytes=0), 4)
    assert all(_equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_damaged_copy_is_fetched_again(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    run_worker(store, "run", corpus, target, settings)
    cache = tmp_path / "cache"
    StatesReader(store, "run", cache=cache).verify()
    for path in cache.iterdir():
        _flip(path)
    StatesReader(store, "run", cache=cache).verify()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _data(store: Store) -> tuple[str, str, Path]:
    done = Board(store, "run").all_done()[1]
    path = store.local_path(f"runs/run/{done.key}")
    assert path is not None
    return done.shard, done.sha256, path


def test_a_flipped_bit_names_the_shard_and_both_hashes(extracted: Store) -> None:
    shard, sha256, path = _data(extracted)
    _flip(path)
    with pytest.raises(StatesError) as caught:
        StatesReader(extracted, "run").verify()
    message = str(caught.value)
    assert shard in message
    assert f"its done-marker says {sha256}" in message
    assert hashlib.sha256(path.read_bytes()).hexdigest() in message
    with pytest.raises(StatesError, match="was changed"):
        _take(StatesReader(extracted, "run"), 10)


def test_a_flipped_bit_in_a_remote_store(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings, tmp_path: Path
) -> None:
    run_worker(store, "run", corpus, target, settings)
    done = Board(store, "run").all_done()[0]
    data = bytearray(store.get(f"runs/run/{done.key}"))
    data[-9] ^= 64
    store.put(f"runs/run/{done.key}", bytes(data))
    with pytest.raises(StatesError, match="was changed"):
        StatesReader(store, "run", cache=tmp_path / "cache").verify()
    assert not (tmp_path / "cache" / f"{done.sha256}.safetensors").exists()


def test_a_truncated_shard(extracted: Store) -> None:
    shard, _, path = _data(extracted)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StatesError, match=f"the shard {shard} is cut off"):
        StatesReader(extracted, "run").verify()


def test_a_shard_whose_data_is_gone(extracted: Store) -> None:
    _data(extracted)[2].unlink()
    with pytest.raises(StatesError, match="the shard is done and its data is gone"):
        StatesReader(extracted, "run").verify()


def test_no_such_run(extracted: Store) -> None:
    with pytest.raises(StatesError, match="there is no such states run"):
        StatesReader(extracted, "other")


def test_an_incomplete_run(extracted: Store) -> None:
    shard, _, _ = _data(extracted)
    extracted.delete(f"runs/run/done/{shard}")
    with pytest.raises(StatesError, match="2 of 3 shards are done; let the extraction finish"):
        StatesReader(extracted, "run")
    assert StatesReader(extracted, "run", allow_incomplete=True).samples == 10


def test_a_run_whose_spec_was_edited(extracted: Store) -> None:
    spec = json.loads(extracted.get("runs/run/spec.json"))
    extracted.put("runs/run/spec.json", json.dumps({**spec, "target": "another"}).encode())
    with pytest.raises(StatesError, match="belongs to another specification"):
        StatesReader(extracted, "run").verify()


def test_wrong_arguments(extracted: Store) -> None:
    reader = StatesReader(extracted, "run")
    for index in (-1, 15):
        with pytest.raises(StatesError, match="samples are 0 to 14"):
            reader.sample(index)
    for rows, start, rank in ((0, 0, 0), (1, -1, 0), (1, 0, 2)):
        with pytest.raises(StatesError, match="no batches with"):
            next(reader.batches(rows, 0, start, rank=rank))
