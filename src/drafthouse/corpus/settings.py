"""The corpus section of a run file: which sources, in which proportion, of which size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from drafthouse.config import Settings
from drafthouse.corpus.grammar import GRAMMAR_KINDS, GrammarKind
from drafthouse.corpus.sources import STDLIB_KINDS, StdlibKind


class _Source(Settings):
    weight: float = Field(default=1.0, gt=0, description="Share of the samples that no source fixes with `count`.")
    count: int | None = Field(default=None, ge=0, description="Exact number of training samples; overrides `weight`.")


class GrammarSource(_Source):
    """Synthetic conversations of one kind."""

    type: Literal["grammar"] = "grammar"
    kind: GrammarKind = Field(description="Kind of conversation, see drafthouse.corpus.grammar.")


class StdlibSource(_Source):
    """Questions about the standard library of the running Python."""

    type: Literal["python_stdlib"] = "python_stdlib"
    kind: StdlibKind = Field(description="`code` quotes lines, `docs` quotes docstrings.")


class JsonlSource(_Source):
    """Conversations in OpenAI's messages form, a JSON object a line."""

    type: Literal["jsonl"] = "jsonl"
    path: Path = Field(description="A local file, one JSON object with `messages` (and `tools`) a line.")
    kind: str = Field(default="chat", min_length=1, description="Kind under which its samples are counted.")


Source = Annotated[GrammarSource | StdlibSource | JsonlSource, Field(discriminator="type")]


def _default_sources() -> tuple[Source, ...]:
    grammar = tuple(GrammarSource(kind=kind) for kind in GRAMMAR_KINDS)
    return (*grammar, *(StdlibSource(kind=kind) for kind in STDLIB_KINDS))


class CorpusSettings(Settings):
    """What a corpus is made of. Equal settings, tokenizer and sources give an equal corpus, byte for byte."""

    sources: tuple[Source, ...] = Field(
        default_factory=_default_sources, description="Sources with their weight or count.", min_length=1
    )
    samples: int = Field(default=4096, gt=0, description="Samples of the training split over all sources.")
    heldout: int = Field(default=32, ge=0, description="Held-out prompts of every source.")
    max_tokens: int = Field(
        default=256, gt=8, description="Longest sample in tokens; longer ones are dropped and counted."
    )
    samples_per_shard: int = Field(
        default=512, gt=0, description="Samples of one shard: the unit of work of an extraction."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the synthetic sources and of the order.")

    @model_validator(mode="after")
    def _counts_fit(self) -> CorpusSettings:
        fixed = sum(source.count or 0 for source in self.sources)
        if fixed > self.samples:
            raise ValueError(f"the counts of the sources add up to {fixed}, more than samples = {self.samples}")
        if fixed < self.samples and all(source.count is not None for source in self.sources):
            raise ValueError(
                f"the counts of the sources add up to {fixed}, fewer than samples = {self.samples}, and "
                "no source is left to fill the rest by weight"
            )
        return self

    def quotas(self) -> list[int]:
        """Training samples of every source: counts as given, the rest by weight (largest remainder)."""
        rest = self.samples - sum(source.count or 0 for source in self.sources)
        total = sum(source.weight for source in self.sources if source.count is None)
        exact = [rest * source.weight / total if source.count is None else source.count for source in self.sources]
        quotas = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda place: (quotas[place] - exact[place], place))
        for place in by_remainder[: self.samples - sum(quotas)]:
            quotas[place] += 1
        return quotas
