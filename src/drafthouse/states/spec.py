"""The specification of a states run: everything that decides what its shards contain."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from drafthouse.config import Settings
from drafthouse.errors import StatesError
from drafthouse.states.protocols import Corpus, Taps
from drafthouse.states.settings import ExtractSettings

SCHEMA = 1


class StatesSpec(Settings):
    """Two runs with equal specs hold the same states, up to the arithmetic of the device."""

    schema_version: int = SCHEMA
    target: str = Field(description="identity of the target: sha256 of its weights and config")
    layer_ids: tuple[int, ...] = Field(description="decoder layers whose OUTPUTS are kept, counted from 0")
    num_layers: int = Field(description="decoder layers of the target")
    hidden_size: int
    dtype: Literal["bf16", "fp8"]
    corpus: str = Field(description="digest of the corpus")
    shards: int = Field(description="shards of the corpus, and so of the complete run")
    max_tokens: int


def spec_of(target: Taps, corpus: Corpus, settings: ExtractSettings) -> StatesSpec:
    """The spec that `settings` mean for this target and corpus.

    Raises:
        StatesError: no layer is asked for, or one that the target does not have.
    """
    last = target.num_layers - 1
    if not settings.layer_ids:
        raise StatesError(
            "no layer is asked for", where="extract.layer_ids", fix=f"name decoder layers from 0 to {last}"
        )
    outside = [layer for layer in settings.layer_ids if layer > last]
    if outside:
        raise StatesError(
            f"layer id {outside[0]} is out of range: this target has decoder layers 0 to {last}",
            where="extract.layer_ids",
            fix="an id is the output of that decoder layer, counted from 0",
        )
    return StatesSpec(
        target=target.identity,
        layer_ids=settings.layer_ids,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        dtype=settings.dtype,
        corpus=corpus.manifest.digest,
        shards=len(corpus.shard_names),
        max_tokens=settings.max_tokens,
    )


def parse_spec(values: dict[str, Any], where: str) -> StatesSpec:
    """The spec in a run's ``spec.json``.

    Raises:
        StatesError: it was written by another version, or is no spec of states.
    """
    version = values.get("schema_version")
    if version != SCHEMA:
        raise StatesError(f"schema {version} instead of {SCHEMA}", where=where, fix="extract again with this version")
    try:
        return StatesSpec.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise StatesError(f"'{name}': {first['msg']}", where=where, fix="extract again") from None
