"""From sealed conversations to a token corpus: rendered, tokenised, masked and proven, shard by shard."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthouse.config import digest_of
from drafthouse.corpus.conversations import ConversationSet, read_shard
from drafthouse.corpus.records import Conversation, TokenSample
from drafthouse.corpus.shards import MANIFEST, KindCount, Manifest, ShardEntry, name_is_taken, put_shard, read_manifest
from drafthouse.corpus.shards import seal as seal_corpus
from drafthouse.corpus.template import ChatTemplate, Dropped
from drafthouse.corpus.tokenizer import load_tokenizer, tokenizer_sha256
from drafthouse.corpus.workers import Workers, default_processes
from drafthouse.errors import CorpusError
from drafthouse.progress import Progress, Silent
from drafthouse.store import ObjectMissingError, Store

_BATCH = 256
_PARTS = "parts"
_ONE_IN = 20  # conversations of a shard, of which one may stay unproven


@dataclass(frozen=True)
class _Job:
    """A shard of conversations and the marker that says that it is done; keys are relative to their folders."""

    source: str
    key: str
    target: str
    marker: str


@dataclass
class _Process:
    """What a worker keeps between jobs."""

    store: Store
    template: ChatTemplate
    tokenizer_hash: str
    max_tokens: int


_here: list[_Process] = []


def tokenise(
    store_url: str,
    conversations: str,
    corpus: str,
    tokenizer: Path,
    *,
    max_tokens: int,
    variables: Mapping[str, Any] | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Make the corpus `corpus` of the set `conversations`; a broken-off run goes on from its finished shards.

    Args:
        store_url: holds both.
        conversations: name of a sealed set.
        corpus: name of the corpus.
        tokenizer: folder with tokenizer and chat template.
        max_tokens: longer samples are dropped and counted.
        variables: further variables of the chat template, e.g. `{"enable_thinking": False}`.
        processes: how many work side by side; none: one a processor.
        progress: gets one bar.

    Raises:
        CorpusError: the set is not there or damaged, more than one conversation in twenty of a shard cannot be
            masked (fewer are dropped as `not_proven`), nothing is left, or the name
            belongs to another corpus.
        StoreError: the store refuses.
    """
    store, progress = Store.open(store_url), progress or Silent()
    given = ConversationSet(store, conversations)
    loaded = load_tokenizer(tokenizer)
    spec = {
        "conversations": given.manifest.digest,
        "max_tokens": max_tokens,
        "variables": dict(variables or {}),
    }
    fingerprints = {"chat_template": hashlib.sha256(str(loaded.chat_template).encode()).hexdigest()}
    tokenizer_hash = tokenizer_sha256(loaded)
    if store.child(corpus).head(MANIFEST) is not None:
        known = read_manifest(store, corpus)
        if (known.settings, known.tokenizer_sha256, known.sources) != (spec, tokenizer_hash, fingerprints):
            raise name_is_taken(corpus)
        _clear(store.child(corpus))
        return known
    parts = f"{_PARTS}/{digest_of([spec, tokenizer_hash, fingerprints])[:16]}"
    jobs = [_Job(conversations, shard.key, corpus, f"{parts}/{shard.sha256}.json") for shard in given.manifest.shards]
    shards: list[ShardEntry] = []
    kinds: dict[str, KindCount] = {}
    drops: Counter[str] = Counter()
    samples = 0
    arguments = (store_url, str(tokenizer), tokenizer_hash, max_tokens, dict(variables or {}))
    with (
        progress.task("template and tokens", given.manifest.samples) as task,
        Workers(processes or default_processes(), _prepare, arguments) as workers,
    ):
        for done in workers.each(_tokenise, jobs):
            if done["shard"] is not None:
                shards.append(ShardEntry.model_validate(done["shard"]))
            for kind, count in done["kinds"].items():
                kinds[kind] = _sum(kinds.get(kind, KindCount()), KindCount.model_validate(count))
            drops.update(done["drops"])
            samples += done["read"]
            task.advance(done["read"], note=f"{sum(shard.tokens for shard in shards) / 1e6:.1f} M tokens")
    manifest = seal_corpus(
        store.child(corpus),
        corpus,
        shards=shards,
        kinds=kinds,
        tokenizer_sha256=tokenizer_hash,
        split=given.manifest.split,
        settings=spec,
        drops=dict(sorted(drops.items())),
        sources=fingerprints,
        report={"conversations": _origin(given)},
    )
    _clear(store.child(corpus))
    return manifest


def _clear(corpus: Store) -> None:
    """Remove the markers of a sealed corpus, whoever was killed before it could."""
    for info in corpus.list(_PARTS):
        corpus.delete(info.key)


def _origin(given: ConversationSet) -> dict[str, Any]:
    manifest = given.manifest
    return {
        "name": given.name,
        "sources": manifest.sources,
        "drops": manifest.drops,
        "short": manifest.short,
        "examples": manifest.examples,
    }


def _prepare(store_url: str, tokenizer: str, tokenizer_hash: str, max_tokens: int, variables: dict[str, Any]) -> None:
    template = ChatTemplate(load_tokenizer(Path(tokenizer)), variables)
    _here[:] = [_Process(Store.open(store_url), template, tokenizer_hash, max_tokens)]


def _tokenise(job: _Job) -> dict[str, Any]:
    (process,) = _here
    target = process.store.child(job.target)
    try:
        known: dict[str, Any] = json.loads(target.get(job.marker))
        if known["shard"] is None or _there(target, known["shard"]):
            return known
    except (ObjectMissingError, ValueError, KeyError):
        pass
    given = read_shard(process.store.child(job.source), job.key, f"{job.source}/{job.key}")
    samples: list[TokenSample] = []
    drops: Counter[str] = Counter()
    unproven: list[CorpusError] = []
    for start in range(0, len(given), _BATCH):
        for made in _made(process, given[start : start + _BATCH], unproven):
            if isinstance(made, Dropped):
                drops[made.reason] += 1
            else:
                samples.append(made)
    # A record may be beyond a template; a template that is beyond many records is an error, not a drop.
    if unproven:
        if len(unproven) * _ONE_IN > len(given):
            raise unproven[0]
        drops["not_proven"] = len(unproven)
    done: dict[str, Any] = {
        "shard": put_shard(target, samples, process.tokenizer_hash).model_dump() if samples else None,
        "kinds": {kind: count.model_dump() for kind, count in _counted(samples).items()},
        "drops": dict(drops),
        "read": len(given),
    }
    target.put(job.marker, json.dumps(done, sort_keys=True).encode())
    return done


def _made(process: _Process, given: list[Conversation], unproven: list[CorpusError]) -> Iterator[TokenSample | Dropped]:
    """Samples of a batch; where it cannot be masked, of its conversations one by one."""
    try:
        yield from process.template.samples(given, process.max_tokens)
    except CorpusError as error:
        if len(given) == 1:
            unproven.append(error)
            return
        for one in given:
            yield from _made(process, [one], unproven)


def _there(target: Store, shard: dict[str, Any]) -> bool:
    info = target.head(shard["key"])
    if info is None or info.size != shard["size"]:
        return False
    return hashlib.sha256(target.get(shard["key"])).hexdigest() == str(shard["sha256"])


def _counted(samples: list[TokenSample]) -> dict[str, KindCount]:
    counts: dict[str, KindCount] = {}
    for sample in samples:
        one = KindCount(samples=1, tokens=len(sample.input_ids), masked=int(sample.loss_mask.sum()))
        counts[sample.kind] = _sum(counts.get(sample.kind, KindCount()), one)
    return counts


def _sum(one: KindCount, other: KindCount) -> KindCount:
    return KindCount(
        samples=one.samples + other.samples, tokens=one.tokens + other.tokens, masked=one.masked + other.masked
    )
