"""Texts of the embedded target's own grammar: a corpus in memory for the extraction, and held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from drafthouse.config import digest_of
from drafthouse.corpus import CorpusSettings, GrammarSource, Prompt, TokenSample, prompts, token_samples
from drafthouse.corpus.grammar import GRAMMAR_KINDS

EMBEDDED = Path(str(files("drafthouse.target") / "embedded"))
TAPS = (0, 1, 2)
SETTINGS = CorpusSettings(
    sources=tuple(GrammarSource(kind=kind) for kind in GRAMMAR_KINDS), samples=48, heldout=4, max_tokens=224, seed=11
)


@dataclass(frozen=True)
class Manifest:
    digest: str
    tokens: int


class TextCorpus:
    """Samples in shards, as `drafthouse.states` wants a corpus."""

    def __init__(self, samples: Sequence[TokenSample], per_shard: int) -> None:
        parts = [samples[first : first + per_shard] for first in range(0, len(samples), per_shard)]
        self.shards = {digest_of([one.input_ids.tolist() for one in part]): part for part in parts}
        self.manifest = Manifest(digest_of(list(self.shards)), sum(len(one.input_ids) for one in samples))

    @property
    def shard_names(self) -> list[str]:
        return list(self.shards)

    def shard(self, name: str) -> Sequence[TokenSample]:
        return self.shards[name]


def sample_corpus(tokenizer: PreTrainedTokenizerFast) -> TextCorpus:
    """Three shards of sixteen conversations."""
    return TextCorpus(list(token_samples(SETTINGS, tokenizer)), 16)


def held_out_prompts(tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    """Four prompts of every grammar kind."""
    return prompts(SETTINGS, tokenizer)
