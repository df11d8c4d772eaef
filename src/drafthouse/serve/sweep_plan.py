"""What a sweep measures: which server, which load, at which points, refused where a point cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, field_validator

from drafthouse.config import Settings, validate
from drafthouse.errors import ConfigError, DrafthouseError
from drafthouse.serve.launch import model_path
from drafthouse.serve.profile import Profile

CONCURRENCIES = (1, 2, 5, 10, 20, 50, 100)
CONTEXTS = (1_024, 4_096, 16_384, 32_768, 65_536, 122_880)


class SweepError(DrafthouseError):
    """A sweep that cannot be made, continued or read."""


class Target(Settings):
    """The server that is loaded.

    Attributes:
        url: without `/v1`.
        model: the name in requests.
        tokenizer: folder or hub id, by which prompts of a given length are made.
        context_length: tokens of one request that the server takes, prompt and answer; None: not known.
    """

    url: str = Field(pattern=r"^https?://[^/]+")
    model: str = Field(min_length=1)
    tokenizer: str = Field(min_length=1)
    context_length: int | None = Field(None, gt=0)

    @field_validator("url")
    @classmethod
    def _root(cls, value: str) -> str:
        return value.rstrip("/").removesuffix("/v1")


class Load(Settings):
    """The load of every point.

    Attributes:
        output_tokens: of every answer; ends of text are ignored, so that all answers are equally long.
        rounds: requests that each of the concurrent users sends, one after another.
        seed: of the prompts. A point's prompts differ from every other point's, or a prefix cache would answer.
        limit_s: after which a point is given up.
    """

    output_tokens: int = Field(256, ge=2)
    rounds: int = Field(3, ge=1)
    seed: int = Field(17, ge=0, lt=2**31)
    limit_s: float = Field(3_600, gt=0)


@dataclass(frozen=True, order=True)
class Place:
    """One point of a sweep: tokens of each prompt, and requests that run at once."""

    context: int
    concurrency: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"context-{self.context}-concurrency-{self.concurrency}"

    def requests(self, load: Load) -> int:
        """Measured requests of this point."""
        return self.concurrency * load.rounds

    def seed(self, load: Load) -> int:
        """A seed of its own."""
        return (load.seed * 1_000_003 + self.context * 131 + self.concurrency) % 2**31


def server(
    profile: Profile | None,
    *,
    url: str | None = None,
    model: str | None = None,
    tokenizer: str | None = None,
) -> Target:
    """The server that a profile describes; what is given besides comes before it, or does without a profile.

    Raises:
        SweepError: without a profile, something is missing; or the address is none.
    """
    if profile is not None:
        url, model = url or profile.address, model or profile.model.served_name
        tokenizer = tokenizer or model_path(profile.model.path)
    given = {"url": url, "model": model, "tokenizer": tokenizer}
    if missing := [f"--{name}" for name, value in given.items() if value is None]:
        raise SweepError(f"without a profile {missing[0]} is needed", where="sweep", fix="give it, or a profile")
    try:
        return validate(Target, given | {"context_length": profile and profile.context_length}, "sweep")
    except ConfigError as error:
        raise SweepError(error.what, where=str(url), fix="write the address as http://HOST:PORT") from None


def places(
    target: Target,
    load: Load,
    concurrencies: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    *,
    full: bool = False,
) -> list[Place]:
    """The points, cheapest first.

    Without `full` they are a cross: every concurrency at the shortest context, every context at the lowest
    concurrency. All pairs of 1 to 100 requests and 1K to 120K tokens would be some 20 million tokens of prompts.

    Args:
        concurrencies, contexts: None: the usual ones; contexts that the server has no room for are left out.

    Raises:
        SweepError: a value below 1, none left, or a context that was asked for and does not fit.
    """
    room = None if target.context_length is None else target.context_length - load.output_tokens
    if contexts is None:
        contexts = [context for context in CONTEXTS if room is None or context <= room] or [room or 0]
    for what, values in (("concurrency", concurrencies), ("context", contexts)):
        if values is not None and (not values or min(values) < 1):
            raise SweepError(
                f"{what} needs numbers above 0", where="sweep", fix="write them with commas, such as 1,10,100"
            )
    if room is not None and max(contexts) > room:
        raise SweepError(
            f"a prompt of {max(contexts)} tokens and an answer of {load.output_tokens} do not fit into the"
            f" {target.context_length} of the server",
            where="sweep",
            fix=f"stay at or below {room}",
        )
    counts = sorted(set(concurrencies or CONCURRENCIES))
    lengths = sorted(set(contexts))
    pairs = {Place(length, count) for length in lengths for count in counts}
    if full:
        return sorted(pairs)
    return sorted(place for place in pairs if place.context == lengths[0] or place.concurrency == counts[0])
