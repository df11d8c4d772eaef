"""Build a corpus in a store: the same settings, tokenizer and sources give the same bytes."""

from __future__ import annotations

import hashlib

from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import sources
from drafthouse.corpus.mixture import Report, source_name, token_samples
from drafthouse.corpus.origins import file_sha256
from drafthouse.corpus.records import Split
from drafthouse.corpus.settings import CorpusSettings, GrammarSource, StdlibSource
from drafthouse.corpus.shards import MANIFEST, CorpusWriter, Manifest, name_is_taken, read_manifest
from drafthouse.corpus.tokenizer import tokenizer_sha256
from drafthouse.progress import Progress, Silent
from drafthouse.store import Store


def build(
    settings: CorpusSettings,
    tokenizer: PreTrainedTokenizerFast,
    store: Store,
    name: str,
    split: Split = "train",
    progress: Progress | None = None,
) -> Manifest:
    """Write the corpus `name` of one split and return its manifest.

    A complete one is returned as it is; of an interrupted or damaged one the fitting shards are kept and the
    others are written again.

    Raises:
        CorpusError: the name belongs to a corpus of other settings, a source cannot be read, a template
            cannot be masked, or nothing is left after the drops.
        StoreError: the store cannot be written.
    """
    tokenizer_hash = tokenizer_sha256(tokenizer)
    fingerprints = fingerprint(settings, tokenizer, split)
    wanted = settings.model_dump(mode="json")
    there = store.child(name).head(MANIFEST) is not None
    if there:
        manifest = read_manifest(store, name)
        made_from = (manifest.settings, manifest.tokenizer_sha256, manifest.sources, manifest.split)
        if made_from != (wanted, tokenizer_hash, fingerprints, split):
            raise name_is_taken(name)
        if _complete(store.child(name), manifest):
            return manifest
    report = Report()
    writer = CorpusWriter(store, name, tokenizer_hash, settings.samples_per_shard)
    for sample in token_samples(settings, tokenizer, split, report, progress or Silent()):
        writer.add(sample)
    return writer.finish(
        split=split, settings=wanted, drops=report.all_drops(), sources=fingerprints, report=report.as_dict()
    )


def fingerprint(settings: CorpusSettings, tokenizer: PreTrainedTokenizerFast, split: Split) -> dict[str, str]:
    """sha256 of what decides the content beside the settings: chat template, files, Python's library."""
    found = {"chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()}
    for source in settings.sources:
        if isinstance(source, StdlibSource):
            found[source_name(source)] = sources.library(split).fingerprint
        elif not isinstance(source, GrammarSource):
            found[source_name(source)] = file_sha256(source.path)
    return found


def _complete(store: Store, manifest: Manifest) -> bool:
    for shard in manifest.shards:
        info = store.head(shard.key)
        if info is None or info.size != shard.size:
            return False
        if hashlib.sha256(store.get(shard.key)).hexdigest() != shard.sha256:
            return False
    return True
