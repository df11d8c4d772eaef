from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthouse.errors import StatesError, StoreError
from drafthouse.states import ExtractSettings, StatesSpec, spec_of
from drafthouse.states.shard import OpenShard, ShardFile, ShardSample, cut
from tests.doubles.extraction import MemoryCorpus, Sample, TinyTaps


@pytest.fixture
def spec(target: TinyTaps, corpus: MemoryCorpus, settings: ExtractSettings) -> StatesSpec:
    return spec_of(target, corpus, settings)


@pytest.fixture
def samples(corpus: MemoryCorpus) -> list[ShardSample]:
    return cut(corpus.shard(corpus.shard_names[0]), 64, "shard")


def _states(samples: list[ShardSample], order: list[int]) -> tuple[Tensor, Tensor]:
    tokens = sum(len(samples[i].input_ids) for i in order)
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 2, 16, generator=generator).bfloat16()
    return hidden, torch.randn(tokens, 16, generator=generator).bfloat16()


def _write(path: Path, spec: StatesSpec, samples: list[ShardSample]) -> ShardFile:
    file = ShardFile(path, spec, samples)
    for order in ([3, 0], [4], [1, 2]):
        file.write(_states(samples, order), order)
    return file


def test_states_land_in_their_places_in_any_order(tmp_path: Path, spec: StatesSpec, samples: list[ShardSample]) -> None:
    file = _write(tmp_path / "s", spec, samples)
    assert file.finish() == hashlib.sha256((tmp_path / "s").read_bytes()).hexdigest()
    assert (tmp_path / "s").stat().st_size == file.size
    opened = OpenShard(tmp_path / "s", spec, "s")
    assert opened.ids == [sample.id for sample in samples]
    assert opened.kinds == [sample.kind for sample in samples]
    for order in ([3, 0], [4], [1, 2]):
        hidden, last = _states(samples, order)
        row = 0
        for index in order:
            begin, end = opened.offsets[index], opened.offsets[index + 1]
            assert end - begin == len(samples[index].input_ids)
            found, found_last = opened.states(begin, end)
            assert torch.equal(found, hidden[row : row + end - begin])
            assert torch.equal(found_last, last[row : row + end - begin])
            assert np.array_equal(opened.input_ids[begin:end].numpy(), samples[index].input_ids)
            assert np.array_equal(opened.loss_mask[begin:end].numpy(), samples[index].loss_mask)
            row += end - begin


def test_any_safetensors_reader_can_read_it(tmp_path: Path, spec: StatesSpec, samples: list[ShardSample]) -> None:
    file = _write(tmp_path / "s", spec, samples)
    file.finish()
    tensors = load_file(tmp_path / "s")
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "hidden_states": (torch.bfloat16, (file.tokens, 2, 16)),
        "last_hidden_state": (torch.bfloat16, (file.tokens, 16)),
        "input_ids": (torch.int32, (file.tokens,)),
        "loss_mask": (torch.uint8, (file.tokens,)),
        "offsets": (torch.int64, (6,)),
        "kind": (torch.uint8, (5,)),
    }


def test_the_same_states_give_the_same_bytes(tmp_path: Path, spec: StatesSpec, samples: list[ShardSample]) -> None:
    assert _write(tmp_path / "a", spec, samples).finish() == _write(tmp_path / "b", spec, samples).finish()


def test_a_shard_with_holes_is_not_finished(tmp_path: Path, spec: StatesSpec, samples: list[ShardSample]) -> None:
    file = ShardFile(tmp_path / "s", spec, samples)
    file.write(_states(samples, [0]), [0])
    with pytest.raises(StatesError, match="tokens have no states"):
        file.finish()
    file.abort()
    assert not (tmp_path / "s").exists()


def test_states_and_tokens_must_match(tmp_path: Path, spec: StatesSpec, samples: list[ShardSample]) -> None:
    file = ShardFile(tmp_path / "s", spec, samples)
    with pytest.raises(StatesError, match="states for"):
        file.write(_states(samples, [0, 1]), [0])
    file.abort()


def test_a_truncated_shard_is_refused(tmp_path: Path, spec: StatesSpec, samples: list[ShardSample]) -> None:
    file = _write(tmp_path / "s", spec, samples)
    file.finish()
    whole = (tmp_path / "s").read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 20, 4, 0):
        (tmp_path / "s").write_bytes(whole[:size])
        with pytest.raises(StatesError, match="damaged or cut off"):
            OpenShard(tmp_path / "s", spec, "s")


def test_a_shard_of_another_spec_is_refused(tmp_path: Path, spec: StatesSpec, samples: list[ShardSample]) -> None:
    _write(tmp_path / "s", spec, samples).finish()
    other = spec.model_copy(update={"target": "another"})
    with pytest.raises(StatesError, match=f"belongs to another specification: {spec.digest()} instead of"):
        OpenShard(tmp_path / "s", other, "s")


def test_a_loaded_shard_does_not_need_its_file(tmp_path: Path, spec: StatesSpec, samples: list[ShardSample]) -> None:
    file = _write(tmp_path / "s", spec, samples)
    file.finish()
    opened = OpenShard(tmp_path / "s", spec, "s")
    before = opened.states(0, file.tokens)[0].clone()
    opened.load()
    (tmp_path / "s").write_bytes(bytes((tmp_path / "s").stat().st_size))
    assert torch.equal(opened.states(0, file.tokens)[0], before)


def test_cut_keeps_the_beginning() -> None:
    sample = Sample("a", "chat", np.arange(10, dtype=np.int32), np.ones(10, dtype=np.uint8))
    (short,) = cut([sample], 4, "shard")
    assert short.input_ids.tolist() == [0, 1, 2, 3]
    assert short.loss_mask.tolist() == [1, 1, 1, 1]


def test_cut_refuses_broken_samples() -> None:
    empty = Sample("a", "chat", np.zeros(0, np.int32), np.zeros(0, np.uint8))
    uneven = Sample("b", "chat", np.zeros(3, np.int32), np.zeros(2, np.uint8))
    for bad in (empty, uneven):
        with pytest.raises(StatesError, match=f"sample '{bad.id}'"):
            cut([bad], 10, "shard")
    with pytest.raises(StatesError, match="holds no sample"):
        cut([], 10, "shard")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "disk"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(target)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def test_a_full_disk_is_told_before_any_state_is_made(small_disk: Path, spec: StatesSpec, corpus: MemoryCorpus) -> None:
    many = [sample for shard in corpus.shards.values() for sample in shard] * 10
    with pytest.raises(StoreError, match="the disk is full"):
        ShardFile(small_disk / "s", spec, cut(many, 64, "shard"))
    assert list(small_disk.iterdir()) == []
