from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import CorpusReader, CorpusSettings, JsonlSource, StdlibSource, build, tokenizer_sha256
from drafthouse.errors import CorpusError
from drafthouse.store import Store
from tests.unit.corpus.conftest import GRAMMAR

SETTINGS = CorpusSettings(sources=GRAMMAR, samples=90, heldout=5, samples_per_shard=32)


class KilledError(Exception):
    pass


class Killer:
    """Progress that ends the process's work after some steps, as a kill would."""

    def __init__(self, after: int) -> None:
        self.left = after

    @contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Killer]:
        yield self

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        self.left -= 1
        if self.left <= 0:
            raise KilledError


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    return Store.open(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{name}")


def written(store: Store) -> dict[str, object]:
    return {info.key: info.last_modified for info in store.list("")}


def test_content_decides_the_digest(tokenizer: PreTrainedTokenizerFast, store: Store) -> None:
    manifest = build(SETTINGS, tokenizer, store, "one")
    assert manifest.samples == 90
    assert [entry.samples for entry in manifest.shards] == [32, 32, 26]
    assert manifest.tokenizer_sha256 == tokenizer_sha256(tokenizer)
    assert CorpusSettings.model_validate(manifest.settings) == SETTINGS
    again = build(SETTINGS, tokenizer, store, "two")
    assert again == manifest
    assert store.get("one/manifest.json") == store.get("two/manifest.json")
    other = build(SETTINGS.model_copy(update={"seed": 1}), tokenizer, store, "three")
    heldout = build(SETTINGS, tokenizer, store, "four", "heldout")
    assert len({manifest.digest, other.digest, heldout.digest}) == 3
    assert heldout.samples == 20
    assert sum(1 for _ in CorpusReader(store, "one")) == 90


def test_a_complete_corpus_is_not_written_again(tokenizer: PreTrainedTokenizerFast, store: Store) -> None:
    manifest = build(SETTINGS, tokenizer, store, "c")
    before = written(store)
    assert build(SETTINGS, tokenizer, store, "c", progress=Killer(1)) == manifest
    assert written(store) == before


def test_an_interrupted_build_keeps_its_shards(tokenizer: PreTrainedTokenizerFast, store: Store) -> None:
    with pytest.raises(KilledError):
        build(SETTINGS, tokenizer, store, "c", progress=Killer(70))
    before = written(store)
    assert len(before) == 2
    with pytest.raises(CorpusError, match="no corpus of this name"):
        CorpusReader(store, "c")
    manifest = build(SETTINGS, tokenizer, store, "c")
    after = written(store)
    assert {key: after[key] for key in before} == before
    assert manifest.digest == build(SETTINGS, tokenizer, store, "d").digest


@pytest.mark.parametrize("damage", [b"", b"same size"])
def test_a_damaged_shard_is_replaced(tokenizer: PreTrainedTokenizerFast, store: Store, damage: bytes) -> None:
    manifest = build(SETTINGS, tokenizer, store, "c")
    key = "c/" + manifest.shards[1].key
    good = store.get(key)
    store.put(key, bytes(len(good)) if damage else damage)
    assert build(SETTINGS, tokenizer, store, "c") == manifest
    assert store.get(key) == good


def test_a_lost_shard_is_written_again(tokenizer: PreTrainedTokenizerFast, store: Store) -> None:
    manifest = build(SETTINGS, tokenizer, store, "c")
    store.delete("c/" + manifest.shards[0].key)
    build(SETTINGS, tokenizer, store, "c")
    assert len(list(CorpusReader(store, "c"))) == 90


def test_another_corpus_under_the_name_is_refused_before_any_write(
    tokenizer: PreTrainedTokenizerFast, store: Store
) -> None:
    build(SETTINGS, tokenizer, store, "c")
    before = written(store)
    for settings, split in ((SETTINGS.model_copy(update={"seed": 9}), "train"), (SETTINGS, "heldout")):
        with pytest.raises(CorpusError, match="c: another corpus has this name already"):
            build(settings, tokenizer, store, "c", split)  # type: ignore[arg-type]
    assert written(store) == before


def test_a_changed_source_file_is_another_corpus(
    tokenizer: PreTrainedTokenizerFast, store: Store, tmp_path: Path
) -> None:
    line = '{"messages": [{"role": "user", "content": "q%d"}, {"role": "assistant", "content": "a"}]}\n'
    path = tmp_path / "a.jsonl"
    path.write_text("".join(line % number for number in range(40)), encoding="utf-8")
    settings = CorpusSettings(sources=(JsonlSource(path=path),), samples=10)
    first = build(settings, tokenizer, store, "c")
    assert first.sources[f"jsonl:{path}"] == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text("nonsense\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(CorpusError, match="another corpus has this name already"):
        build(settings, tokenizer, store, "c")
    second = build(settings, tokenizer, store, "d")
    assert second.drops == {"malformed_not_json": 1}
    assert second.report["malformed"][str(path)]["examples"]["not_json"][0]["line"] == 1


def test_the_standard_library_leaves_its_fingerprint(tokenizer: PreTrainedTokenizerFast, store: Store) -> None:
    settings = CorpusSettings(sources=(StdlibSource(kind="code"),), samples=20)
    manifest = build(settings, tokenizer, store, "c")
    assert len(manifest.sources["python_stdlib:code"]) == 64


def test_nothing_left_is_an_error_and_leaves_nothing(
    tokenizer: PreTrainedTokenizerFast, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x\ny\n", encoding="utf-8")
    settings = CorpusSettings(sources=(JsonlSource(path=path),), samples=10)
    with pytest.raises(CorpusError, match=r"no sample at all \(dropped: 2 malformed_not_json\)"):
        build(settings, tokenizer, store, "c")
    assert not written(store)
    missing = CorpusSettings(sources=(JsonlSource(path=tmp_path / "none"),), samples=10)
    with pytest.raises(CorpusError, match="cannot be read"):
        build(missing, tokenizer, store, "c")
