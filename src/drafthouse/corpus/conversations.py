"""Curated conversations in a store: shards of JSON lines named by their sha256, and the manifest that seals them."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafthouse.corpus.records import Conversation
from drafthouse.corpus.shards import holds, name_is_taken
from drafthouse.errors import CorpusError
from drafthouse.store import ObjectMissingError, Store

SCHEMA = 1
MANIFEST = "conversations.json"
REGENERATION = "(regeneration)"  # in the place of a source: what was lost when the target answered


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ConversationShard(_Model):
    """One shard; the key is `<sha256>.jsonl.gz`, `size` in bytes."""

    key: str
    sha256: str
    size: int
    samples: int


class ConversationManifest(_Model):
    """A sealed set of conversations and where they come from."""

    schema_version: int = Field(SCHEMA, alias="schema")
    digest: str = Field(description="sha256 over the schema and the shards' hashes, in order")
    shards: tuple[ConversationShard, ...]
    samples: int
    split: str
    kinds: dict[str, int]
    sources: dict[str, dict[str, Any]] = Field(
        description="licence, origin, records read, taken and held out, by source"
    )
    drops: dict[str, dict[str, int]] = Field(
        description="records that were neither taken nor held out, by source and reason"
    )
    short: dict[str, int] = Field(default_factory=dict, description="samples that a kind's quota lacks")
    settings: dict[str, Any]
    examples: dict[str, Any] = Field(default_factory=dict, description="some records of every reason, by source")

    def to_json(self) -> bytes:
        values = self.model_dump(mode="json", by_alias=True)
        return (json.dumps(values, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


class ConversationSet:
    """A sealed set of conversations.

    Raises:
        CorpusError: there is no manifest, or it is damaged.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store.child(name), name
        where = f"{name}/{MANIFEST}"
        try:
            self.manifest = ConversationManifest.model_validate(json.loads(self.store.get(MANIFEST)))
        except ObjectMissingError:
            raise CorpusError("there are no conversations of this name", where=where, fix="curate them first") from None
        except (ValueError, ValidationError):
            raise CorpusError("not a manifest of conversations", where=where, fix="curate them again") from None
        if self.manifest.digest != set_digest([shard.sha256 for shard in self.manifest.shards]):
            raise CorpusError("the digest does not fit the list of shards", where=where, fix="curate them again")
        self._entries = {shard.sha256: shard for shard in self.manifest.shards}

    @property
    def shard_names(self) -> list[str]:
        return [shard.sha256 for shard in self.manifest.shards]

    def shard(self, name: str) -> list[Conversation]:
        """The conversations of one shard, in order.

        Raises:
            CorpusError: there is no such shard, it is gone, or its bytes are not those that its name promises.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CorpusError(f"no shard {name}", where=self.name, fix="take a name from shard_names")
        return read_shard(self.store, entry.key, f"{self.name}/{entry.key}")


def read_shard(store: Store, key: str, where: str) -> list[Conversation]:
    """The conversations of the shard `key`, whose name is checked against its bytes."""
    try:
        data = store.get(key)
    except ObjectMissingError:
        raise CorpusError("a shard of conversations is gone", where=where, fix="curate them again") from None
    if hashlib.sha256(data).hexdigest() != key.partition(".")[0]:
        raise CorpusError("a shard of conversations is damaged", where=where, fix="delete it, and curate them again")
    return unpack_lines(data, where)


def pack_lines(lines: Sequence[bytes]) -> bytes:
    """JSON lines as gzip; the same lines give the same bytes on one version of zlib."""
    return gzip.compress(b"".join(lines), compresslevel=1, mtime=0)


def unpack_lines(data: bytes, where: str) -> list[Conversation]:
    """The conversations of a shard's bytes.

    Raises:
        CorpusError: the bytes are no shard.
    """
    try:
        return [Conversation.model_validate_json(line) for line in gzip.decompress(data).splitlines()]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise CorpusError(f"not a shard of conversations ({error})", where=where, fix="curate them again") from None


def put_shard(store: Store, lines: Sequence[bytes]) -> ConversationShard:
    """Write a shard unless it is there already."""
    data = pack_lines(lines)
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"{sha256}.jsonl.gz"
    if not holds(store, key, data):
        store.put(key, data)
    return ConversationShard(key=key, sha256=sha256, size=len(data), samples=len(lines))


def seal(store: Store, name: str, manifest: ConversationManifest) -> ConversationManifest:
    """Write the manifest, once.

    Raises:
        CorpusError: the name belongs to another set already.
    """
    if not store.child(name).create(MANIFEST, manifest.to_json()):
        raise name_is_taken(name)
    return manifest


def set_digest(shard_hashes: Sequence[str]) -> str:
    """sha256 (hex) over the schema and the shards' hashes in order: the identity of a set."""
    return hashlib.sha256("\n".join([f"drafthouse conversations {SCHEMA}", *shard_hashes]).encode()).hexdigest()
