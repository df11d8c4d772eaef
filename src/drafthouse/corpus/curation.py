"""The curation file: which data sets make a corpus, under which licences, in which proportion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from drafthouse.config import Settings
from drafthouse.corpus.formats import Format
from drafthouse.corpus.grammar import GrammarKind
from drafthouse.corpus.sources import StdlibKind

Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class _Curated(Settings):
    name: Word = Field(description="How the source is called in the card and in the samples' ids.")
    kind: Word = Field(description="Kind under which its samples are counted.")
    licence: str = Field(min_length=1, description="Licence of the text, as its card states it (SPDX where it can).")
    weight: float = Field(default=1.0, gt=0, description="Share of its kind's quota.")
    cap: int | None = Field(default=None, ge=1, description="Most training samples taken from it.")


class _Collected(_Curated):
    format: Format = Field(description="How a record is written.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="Where a field stands under another name, e.g. instruction: question."
    )
    cut_to_chars: int | None = Field(
        default=None, ge=64, description="End a longer conversation behind the last answer that fits."
    )
    optional: bool = Field(default=False, description="Go on without it when it is not there; the card says so.")


class FilesSource(_Collected):
    """JSON Lines (`.jsonl`, also `.gz`), one JSON array (`.json`) or Parquet files on this machine."""

    type: Literal["files"] = "files"
    paths: tuple[str, ...] = Field(min_length=1, description="Files or patterns; relative to the curation file.")


class HubSource(_Collected):
    """A data set of a Hugging Face hub."""

    type: Literal["hub"] = "hub"
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", description="owner/name of the data set.")
    revision: str = Field(min_length=1, description="Commit, tag or branch; the card shows the commit that it was.")
    files: tuple[str, ...] = Field(min_length=1, description="Patterns of the files to read.")


class StoreSource(_Collected):
    """Objects below a prefix of an object store: the same file types."""

    type: Literal["store"] = "store"
    url: str = Field(description="s3://bucket/prefix?endpoint=…, file:folder, …")


class LibraryTextSource(_Curated):
    """Questions about the standard library of the running Python: text that every machine has."""

    type: Literal["python_stdlib"] = "python_stdlib"
    about: StdlibKind = Field(description="`code` quotes lines, `docs` quotes docstrings.")
    count: int = Field(ge=1, description="Questions to ask; repeated ones are dropped as duplicates.")


class GeneratedSource(_Curated):
    """Synthetic conversations of one grammar (`drafthouse.corpus.grammar`)."""

    type: Literal["grammar"] = "grammar"
    about: GrammarKind = Field(description="Kind of conversation.")
    count: int = Field(ge=1, description="Conversations to make.")


CuratedSource = Annotated[
    FilesSource | HubSource | StoreSource | LibraryTextSource | GeneratedSource, Field(discriminator="type")
]


class KindSettings(Settings):
    """One kind of conversation."""

    quota: int | None = Field(default=None, ge=1, description="Training samples wanted; none: all that there are.")


class FilterSettings(Settings):
    """What is dropped before anything is chosen; every drop is counted."""

    min_chars: int = Field(default=8, ge=0, description="Shortest conversation, all turns together.")
    max_chars: int = Field(default=16_000, ge=64, description="Longest conversation.")
    max_turns: int = Field(default=64, ge=1, description="Most messages.")
    near_duplicates: float | None = Field(
        default=0.8, gt=0.5, le=1.0, description="Jaccard similarity from which the later one is dropped; none: exact."
    )
    evaluation: tuple[str, ...] = Field(
        default=(), description="Files of prompts (.txt: one a line; .jsonl) that must not be trained on."
    )
    ngram: int = Field(default=13, ge=4, description="Words in a row that may not be shared with such a prompt.")


class CurationSettings(Settings):
    """Root of `inventory/corpora/NAME.yml`. Equal files and sources give equal corpora, byte for byte."""

    name: Word
    note: str = Field(default="", description="What the mixture is for.")
    kinds: dict[Word, KindSettings] = Field(min_length=1)
    sources: tuple[CuratedSource, ...] = Field(min_length=1)
    filters: FilterSettings = Field(default_factory=FilterSettings)
    heldout_one_in: int = Field(default=128, ge=2, description="One question in so many is held out, by its hash.")
    heldout: int = Field(default=512, ge=0, description="Most held-out conversations of a kind.")
    samples_per_shard: int = Field(default=512, ge=1, description="Conversations of one shard.")
    seed: int = Field(default=0, ge=0, description="Of choice and order.")

    @model_validator(mode="after")
    def _fits(self) -> CurationSettings:
        names = [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are called '{twice[0]}'")
        if unknown := sorted({source.kind for source in self.sources} - set(self.kinds)):
            raise ValueError(f"kinds lacks '{unknown[0]}', which a source belongs to")
        if unused := sorted(set(self.kinds) - {source.kind for source in self.sources}):
            raise ValueError(f"no source belongs to the kind '{unused[0]}'")
        return self

    def licences(self) -> dict[str, str]:
        """Licence of every source, by its name."""
        return {source.name: source.licence for source in self.sources}


def curation_file(name: str, folder: Path | None = None) -> Path:
    """`name` as a path, or as the name of a file under `inventory/corpora`."""
    path = Path(name)
    if path.suffix in {".yml", ".yaml"} or path.exists():
        return path
    return (folder or Path("inventory/corpora")) / f"{name}.yml"
