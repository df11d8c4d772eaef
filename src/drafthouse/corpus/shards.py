"""Corpus shards: safetensors files named by their own sha256, and the manifest that makes them a corpus.

A shard is the unit of work of an extraction, so its name has to say what is in it: the same samples always
give the same bytes. The manifest is written last; shards without a manifest are no corpus, and a rerun keeps
those that fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from drafthouse.corpus.records import TokenSample
from drafthouse.errors import CorpusError
from drafthouse.store import ObjectMissingError, Store

Kinds = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.int64]

SCHEMA = 1
MANIFEST = "manifest.json"
_HEADER_SIZE = 8  # bytes of the little-endian length before a safetensors header
_MOST_KINDS = 256  # a kind is one byte


class ShardEntry(BaseModel):
    """One shard of a corpus; `name` is the sha256 of its bytes, the key is `<name>.safetensors`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    sha256: str
    size: int = Field(description="bytes")
    samples: int
    tokens: int


class KindCount(BaseModel):
    """Totals of one kind; `masked` are the tokens that the model has to produce."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int = 0
    tokens: int = 0
    masked: int = 0


class Manifest(BaseModel):
    """What a corpus holds and what it was made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_version: int = Field(SCHEMA, alias="schema")
    digest: str = Field(description="sha256 over the schema and the shards' hashes, in order")
    shards: tuple[ShardEntry, ...]
    samples: int
    tokens: int
    kinds: dict[str, KindCount]
    drops: dict[str, int] = Field(description="conversations that gave no sample, by reason")
    tokenizer_sha256: str
    split: str
    settings: dict[str, Any]
    sources: dict[str, str] = Field(description="fingerprints of the sources whose text depends on the machine")
    report: dict[str, Any] = Field(description="samples of malformed records, and quotas that were not filled")

    def to_json(self) -> bytes:
        """Canonical bytes: the same corpus gives the same manifest."""
        values = self.model_dump(mode="json", by_alias=True)
        return (json.dumps(values, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


class CorpusWriter:
    """Packs samples into shards under `<name>/` of a store and seals them with a manifest.

    Args:
        store: where the corpus lies.
        name: its folder; a sealed corpus is never changed, so a name is bound to its content.
        tokenizer_sha256: see `drafthouse.corpus.tokenizer.tokenizer_sha256`.
        samples_per_shard: samples of a shard (the last one may hold fewer).
    """

    def __init__(self, store: Store, name: str, tokenizer_sha256: str, samples_per_shard: int) -> None:
        if samples_per_shard < 1:
            raise CorpusError("a shard holds at least one sample", where=name, fix="raise samples_per_shard")
        self._store, self._name = store.child(name), name
        self._tokenizer, self._per_shard = tokenizer_sha256, samples_per_shard
        self._pending: list[TokenSample] = []
        self._shards: list[ShardEntry] = []
        self._kinds: dict[str, KindCount] = {}

    def add(self, sample: TokenSample) -> None:
        """Append a sample; a full shard is written at once.

        Raises:
            CorpusError: the sample has no assistant token, or its arrays do not fit together.
            StoreError: the store refuses the shard.
        """
        self._check(sample)
        before = self._kinds.get(sample.kind, KindCount())
        self._kinds[sample.kind] = KindCount(
            samples=before.samples + 1,
            tokens=before.tokens + len(sample.input_ids),
            masked=before.masked + int(sample.loss_mask.sum()),
        )
        self._pending.append(sample)
        if len(self._pending) == self._per_shard:
            self._flush()

    def finish(
        self,
        *,
        split: str,
        settings: Mapping[str, Any],
        drops: Mapping[str, int] | None = None,
        sources: Mapping[str, str] | None = None,
        report: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Write the last shard and the manifest.

        Raises:
            CorpusError: there is no sample, or the name already belongs to another corpus.
        """
        self._flush()
        return seal(
            self._store,
            self._name,
            shards=self._shards,
            kinds=self._kinds,
            tokenizer_sha256=self._tokenizer,
            split=split,
            settings=settings,
            drops=drops,
            sources=sources,
            report=report,
        )

    def _check(self, sample: TokenSample) -> None:
        ids, mask = sample.input_ids, sample.loss_mask
        if ids.ndim != 1 or ids.shape != mask.shape or ids.dtype != np.int32 or mask.dtype != np.uint8:
            raise CorpusError(
                f"input_ids {ids.dtype}{ids.shape} and loss_mask {mask.dtype}{mask.shape} must "
                "be int32 and uint8 of one length",
                where=sample.id,
            )
        if not mask.any():
            raise CorpusError("no assistant tokens: the loss mask is empty", where=sample.id, fix="drop the sample")
        if mask.max() > 1 or ids.min() < 0:
            raise CorpusError("a loss mask is 0 or 1 and token ids are not negative", where=sample.id)
        if sample.kind not in self._kinds and len(self._kinds) == _MOST_KINDS:
            raise CorpusError(f"more than {_MOST_KINDS} kinds", where=sample.id, fix="merge some kinds")

    def _flush(self) -> None:
        if not self._pending:
            return
        self._shards.append(put_shard(self._store, self._pending, self._tokenizer))
        self._pending = []


def seal(
    store: Store,
    name: str,
    *,
    shards: Sequence[ShardEntry],
    kinds: Mapping[str, KindCount],
    tokenizer_sha256: str,
    split: str,
    settings: Mapping[str, Any],
    drops: Mapping[str, int] | None = None,
    sources: Mapping[str, str] | None = None,
    report: Mapping[str, Any] | None = None,
) -> Manifest:
    """Make written shards a corpus; `store` is the one under the corpus' name.

    Raises:
        CorpusError: there is no sample, or the name already belongs to another corpus.
    """
    if not shards:
        dropped = ", ".join(f"{count} {reason}" for reason, count in (drops or {}).items()) or "nothing"
        raise CorpusError(f"no sample at all (dropped: {dropped})", where=name, fix="see the sources")
    manifest = Manifest(
        schema_version=SCHEMA,
        digest=corpus_digest([shard.sha256 for shard in shards]),
        shards=tuple(shards),
        samples=sum(shard.samples for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        kinds=dict(sorted(kinds.items())),
        drops=dict(drops or {}),
        tokenizer_sha256=tokenizer_sha256,
        split=split,
        settings=dict(settings),
        sources=dict(sources or {}),
        report=dict(report or {}),
    )
    if not store.create(MANIFEST, manifest.to_json()):
        raise name_is_taken(name)
    return manifest


def put_shard(store: Store, samples: Sequence[TokenSample], tokenizer_sha256: str) -> ShardEntry:
    """Write samples under their sha256, unless they are there already."""
    data = pack(samples, tokenizer_sha256)
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"{sha256}.safetensors"
    if not holds(store, key, data):
        store.put(key, data)
    tokens = sum(len(sample.input_ids) for sample in samples)
    return ShardEntry(key=key, sha256=sha256, size=len(data), samples=len(samples), tokens=tokens)


def holds(store: Store, key: str, data: bytes) -> bool:
    """Whether exactly `data` lies under `key`."""
    info = store.head(key)
    # a right size is no proof: a killed copy or a bad disk leaves other bytes under a right name
    return info is not None and info.size == len(data) and store.get(key) == data


class CorpusReader:
    """A sealed corpus. Every shard's hash is checked when it is first read.

    Raises:
        CorpusError: there is no manifest, it is damaged, or it was written by another version.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store.child(name), name
        self.manifest = read_manifest(store, name)
        self._entries = {entry.sha256: entry for entry in self.manifest.shards}
        self._verified: set[str] = set()

    @property
    def shard_names(self) -> list[str]:
        """Names of the shards in corpus order; an extraction run uses the same names."""
        return [entry.sha256 for entry in self.manifest.shards]

    def shard(self, name: str) -> list[TokenSample]:
        """The samples of one shard, in order.

        Raises:
            CorpusError: there is no such shard, it is gone, or its bytes are not those that its name
                promises.
        """
        return unpack(self._data(name), f"{self._name}/{name}.safetensors")

    def lengths(self, name: str) -> tuple[list[str], Kinds, Lengths, Lengths]:
        """Of one shard: names of kinds, kind of every sample u8 [n], its tokens and its masked tokens i64 [n].

        Raises:
            CorpusError: as `shard`.
        """
        return measure(self._data(name), f"{self._name}/{name}.safetensors")

    def _data(self, name: str) -> bytes:
        entry = self._entries.get(name)
        if entry is None:
            raise CorpusError(f"no shard {name}", where=self._name, fix="take a name from shard_names")
        try:
            data = self._store.get(entry.key)
        except ObjectMissingError:
            raise CorpusError(
                f"shard {entry.key} is gone",
                where=self._name,
                fix="build the corpus again: it writes what is missing",
            ) from None
        if name not in self._verified:
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise CorpusError(
                    f"shard {entry.key} is damaged: its bytes do not have the hash in its name",
                    where=self._name,
                    fix="build or seal the corpus again: that replaces the shard",
                )
            self._verified.add(name)
        return data

    def __iter__(self) -> Iterator[TokenSample]:
        for name in self.shard_names:
            yield from self.shard(name)

    def __len__(self) -> int:
        return self.manifest.samples


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of a sealed corpus.

    Raises:
        CorpusError: there is none, it is damaged, or it was written by another version.
    """
    where = f"{name}/{MANIFEST}"
    try:
        values = json.loads(store.child(name).get(MANIFEST))
    except ObjectMissingError:
        raise CorpusError("there is no corpus of this name", where=where, fix="build it first") from None
    except ValueError:
        raise CorpusError("not JSON", where=where, fix="delete it and build the corpus again") from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise CorpusError(f"not a corpus of schema {SCHEMA}", where=where, fix="build the corpus again")
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise CorpusError(f"'{path}': {first['msg']}", where=where, fix="build the corpus again") from None
    if manifest.digest != corpus_digest([shard.sha256 for shard in manifest.shards]):
        raise CorpusError("the digest does not fit the list of shards", where=where, fix="build the corpus again")
    return manifest


def corpus_digest(shard_hashes: Sequence[str]) -> str:
    """sha256 (hex) over the schema and the shards' hashes in order: the identity of a corpus."""
    return hashlib.sha256("\n".join([f"drafthouse corpus {SCHEMA}", *shard_hashes]).encode()).hexdigest()


def name_is_taken(name: str) -> CorpusError:
    return CorpusError(
        "another corpus has this name already",
        where=name,
        fix="choose another name, or delete the old corpus with everything made from it",
    )


def pack(samples: Sequence[TokenSample], tokenizer_sha256: str) -> bytes:
    """Samples as safetensors bytes: input_ids i32 [T], loss_mask u8 [T], offsets i64 [n+1], kind u8 [n]."""
    kinds = sorted({sample.kind for sample in samples})
    lengths = [len(sample.input_ids) for sample in samples]
    tensors = {
        "input_ids": np.concatenate([sample.input_ids for sample in samples]),
        "loss_mask": np.concatenate([sample.loss_mask for sample in samples]),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "kind": np.array([kinds.index(sample.kind) for sample in samples], dtype=np.uint8),
    }
    metadata = {
        "schema": str(SCHEMA),
        "kinds": json.dumps(kinds),
        "ids": json.dumps([sample.id for sample in samples]),
        "tokenizer_sha256": tokenizer_sha256,
    }
    return _with_sorted_header(save_tensors(tensors, metadata))


def measure(data: bytes, where: str) -> tuple[list[str], Kinds, Lengths, Lengths]:
    """Kinds and lengths of a shard's samples, without the samples (see `CorpusReader.lengths`).

    Raises:
        CorpusError: the bytes are not a shard of this schema.
    """
    try:
        kinds: list[str] = json.loads(_header(data)["__metadata__"]["kinds"])
        tensors = load_tensors(data)
        offsets = tensors["offsets"]
        masked = np.add.reduceat(tensors["loss_mask"].astype(np.int64), offsets[:-1])
        return kinds, tensors["kind"], np.diff(offsets), masked
    except (SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CorpusError(
            f"not a corpus shard of schema {SCHEMA} ({error})", where=where, fix="build the corpus again"
        ) from None


def unpack(data: bytes, where: str) -> list[TokenSample]:
    """The samples of a shard's bytes.

    Raises:
        CorpusError: the bytes are not a shard of this schema.
    """
    try:
        metadata = _header(data)["__metadata__"]
        tensors = load_tensors(data)
        kinds, ids = json.loads(metadata["kinds"]), json.loads(metadata["ids"])
        if metadata["schema"] != str(SCHEMA):
            raise ValueError(f"schema {metadata['schema']}")
        offsets = tensors["offsets"].tolist()
        return [
            TokenSample(name, kinds[kind], tensors["input_ids"][first:last], tensors["loss_mask"][first:last])
            for name, kind, first, last in zip(ids, tensors["kind"], offsets[:-1], offsets[1:], strict=True)
        ]
    except (SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CorpusError(
            f"not a corpus shard of schema {SCHEMA} ({error})", where=where, fix="build the corpus again"
        ) from None


def _header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:_HEADER_SIZE], "little")
    header: dict[str, Any] = json.loads(data[_HEADER_SIZE : _HEADER_SIZE + size])
    return header


def _with_sorted_header(data: bytes) -> bytes:
    # safetensors keeps metadata in a hash map with a random seed: without this, equal samples would get two
    # names.
    size = int.from_bytes(data[:_HEADER_SIZE], "little")
    text = json.dumps(_header(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_HEADER_SIZE, "little") + text + data[_HEADER_SIZE + size :]
