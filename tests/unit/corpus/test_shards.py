from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from drafthouse.corpus import CorpusReader, CorpusWriter, TokenSample
from drafthouse.corpus.shards import corpus_digest, pack, unpack
from drafthouse.errors import CorpusError
from drafthouse.store import Store


def make(count: int, seed: int = 0) -> list[TokenSample]:
    draw = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        length = int(draw.integers(2, 40))
        mask = draw.integers(0, 2, length).astype(np.uint8)
        mask[-1] = 1
        ids = draw.integers(0, 1000, length).astype(np.int32)
        samples.append(TokenSample(f"s{number}", ("chat", "code")[number % 2], ids, mask))
    return samples


def write(store: Store, samples: list[TokenSample], name: str = "c", **more: Any) -> CorpusWriter:
    writer = CorpusWriter(store, name, "tok", 4)
    for sample in samples:
        writer.add(sample)
    writer.finish(split="train", settings={"seed": 0}, **more)
    return writer


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    return Store.open(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{name}")


def test_what_is_written_is_read(store: Store) -> None:
    samples = make(10)
    write(store, samples, drops={"too_long": 3}, report={"short": {}}, sources={"x": "y"})
    reader = CorpusReader(store, "c")
    back = list(reader)
    assert [(one.id, one.kind) for one in back] == [(one.id, one.kind) for one in samples]
    for one, other in zip(back, samples, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        assert one.input_ids.dtype == np.int32
        assert one.loss_mask.dtype == np.uint8
    manifest = reader.manifest
    assert len(reader) == manifest.samples == 10
    assert manifest.tokens == sum(len(one.input_ids) for one in samples)
    assert [entry.samples for entry in manifest.shards] == [4, 4, 2]
    code = manifest.kinds["code"]
    assert code.samples == 5
    assert code.masked == sum(int(one.loss_mask.sum()) for one in samples if one.kind == "code")
    assert manifest.drops == {"too_long": 3}
    assert manifest.digest == corpus_digest(reader.shard_names)


def test_layout_in_the_store(store: Store) -> None:
    write(store, make(5))
    keys = [info.key for info in store.list("c")]
    assert "c/manifest.json" in keys
    assert len(keys) == 3
    values = json.loads(store.get("c/manifest.json"))
    assert values["schema"] == 1
    for entry in values["shards"]:
        data = store.get("c/" + entry["key"])
        assert entry["key"] == hashlib.sha256(data).hexdigest() + ".safetensors"
        assert entry["size"] == len(data)
        tensors = load(data)
        assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
            "input_ids": "int32",
            "loss_mask": "uint8",
            "offsets": "int64",
            "kind": "uint8",
        }
        assert tensors["offsets"][-1] == len(tensors["input_ids"])


def test_equal_samples_always_have_equal_bytes() -> None:
    assert len({pack(make(6), "tok") for _ in range(20)}) == 1
    assert pack(make(6), "tok") != pack(make(6), "other")


def test_a_flipped_bit_names_the_shard(store: Store) -> None:
    write(store, make(10))
    name = CorpusReader(store, "c").shard_names[1]
    data = bytearray(store.get(f"c/{name}.safetensors"))
    data[-5] ^= 1
    store.put(f"c/{name}.safetensors", bytes(data))
    reader = CorpusReader(store, "c")
    assert len(reader.shard(reader.shard_names[0])) == 4
    with pytest.raises(CorpusError, match=rf"shard {name}\.safetensors is damaged"):
        list(reader)


def test_a_missing_shard_and_an_unknown_one(store: Store) -> None:
    write(store, make(10))
    reader = CorpusReader(store, "c")
    store.delete(f"c/{reader.shard_names[2]}.safetensors")
    with pytest.raises(CorpusError, match=rf"shard {reader.shard_names[2]}\.safetensors is gone"):
        list(reader)
    with pytest.raises(CorpusError, match="no shard elsewhere"):
        reader.shard("elsewhere")


def _swap(values: dict[str, Any]) -> None:
    values["shards"].reverse()


DAMAGE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (_swap, "digest does not fit"),
    (lambda values: values.update(schema=2), "not a corpus of schema 1"),
    (lambda values: values.pop("tokens"), "'tokens'"),
    (lambda values: values.update(extra=1), "'extra'"),
    (lambda values: values["shards"][0].pop("size"), r"'shards\.0\.size'"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE)
def test_a_damaged_manifest(tmp_path: Path, damage: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    store = Store.open(str(tmp_path))
    write(store, make(10))
    values = json.loads(store.get("c/manifest.json"))
    damage(values)
    store.put("c/manifest.json", json.dumps(values).encode())
    with pytest.raises(CorpusError, match=sentence):
        CorpusReader(store, "c")


def test_no_manifest_and_no_json(store: Store) -> None:
    with pytest.raises(CorpusError, match=r"c/manifest\.json: there is no corpus of this name"):
        CorpusReader(store, "c")
    for data in (b"{", b"\xff", b"[]"):
        store.put("c/manifest.json", data)
        with pytest.raises(CorpusError, match=r"not (JSON|a corpus)"):
            CorpusReader(store, "c")


def test_a_name_is_bound_to_its_content(store: Store) -> None:
    write(store, make(10))
    write(store, make(10))
    with pytest.raises(CorpusError, match="c: another corpus has this name already"):
        write(store, make(10, seed=1))
    assert CorpusReader(store, "c").manifest.digest == corpus_digest(CorpusReader(store, "c").shard_names)


def test_shards_without_a_manifest_are_no_corpus(store: Store) -> None:
    writer = CorpusWriter(store, "c", "tok", 2)
    for sample in make(5):
        writer.add(sample)
    assert len(store.list("c")) == 2
    with pytest.raises(CorpusError, match="no corpus of this name"):
        CorpusReader(store, "c")


def test_answers_of_another_model_are_written_as_plain_samples(store: Store) -> None:
    prompt, answer = np.arange(5, dtype=np.int32), np.array([7, 8, 2], dtype=np.int32)
    mask = np.array([0] * 5 + [1] * 3, dtype=np.uint8)
    sample = TokenSample("p-1", "lookup", np.concatenate([prompt, answer]), mask)
    writer = CorpusWriter(store, "answers", "tok", 512)
    writer.add(sample)
    manifest = writer.finish(split="train", settings={"target": "abc", "temperature": 0})
    assert manifest.kinds["lookup"].masked == 3
    (back,) = CorpusReader(store, "answers")
    assert back.input_ids.tolist() == [0, 1, 2, 3, 4, 7, 8, 2]


IDS, MASK = np.arange(3, dtype=np.int32), np.ones(3, dtype=np.uint8)


@pytest.mark.parametrize(
    ("ids", "mask", "sentence"),
    [
        (IDS, np.zeros(3, dtype=np.uint8), "no assistant tokens"),
        (IDS, np.ones(2, dtype=np.uint8), "of one length"),
        (IDS.astype(np.int64), MASK, "must be int32"),
        (IDS, MASK.astype(bool), "must be int32 and uint8"),
        (IDS.reshape(1, 3), MASK.reshape(1, 3), "of one length"),
        (IDS, MASK * 2, "a loss mask is 0 or 1"),
        (IDS - 1, MASK, "not negative"),
        (IDS[:0], MASK[:0], "no assistant tokens"),
    ],
)
def test_samples_that_would_train_wrongly(ids: Any, mask: Any, sentence: str) -> None:
    writer = CorpusWriter(Store.open("memory://refused"), "c", "tok", 4)
    with pytest.raises(CorpusError, match=sentence):
        writer.add(TokenSample("s", "chat", ids, mask))


def test_an_empty_corpus_says_what_was_dropped() -> None:
    writer = CorpusWriter(Store.open("memory://refused"), "c", "tok", 4)
    with pytest.raises(CorpusError, match=r"no sample at all \(dropped: 3 too_long\)"):
        writer.finish(split="train", settings={}, drops={"too_long": 3})
    with pytest.raises(CorpusError, match="at least one sample"):
        CorpusWriter(Store.open("memory://refused"), "c", "tok", 0)


def test_more_kinds_than_a_byte_holds() -> None:
    writer = CorpusWriter(Store.open("memory://kinds"), "c", "tok", 1000)
    for number in range(256):
        writer.add(TokenSample(f"s{number}", f"k{number}", IDS, MASK))
    with pytest.raises(CorpusError, match="more than 256 kinds"):
        writer.add(TokenSample("s", "one more", IDS, MASK))


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 64, pack(make(3), "t")[:-1], pack(make(3), "t")[:40]])
def test_bytes_that_are_no_shard(data: bytes) -> None:
    with pytest.raises(CorpusError, match="x: not a corpus shard of schema 1"):
        unpack(data, "x")
