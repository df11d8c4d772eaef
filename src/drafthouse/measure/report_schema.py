"""The contract of `report.json`: what a run must say about itself so that a report can be drawn from it.

Structural levels refuse unknown keys (a misspelt optional section would otherwise vanish in silence); the
leaves accept more than they name, so that a run may carry extra figures. Shares are 0..1, sizes bytes, times
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from drafthouse.errors import DrafthouseError

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Length = Annotated[float, Field(gt=0)]

# `acceptance_length` repeats `acceptance.*.*.micro` for readers that want nothing else; writers may round it
ROUNDING = 0.01


class ReportError(DrafthouseError):
    """A report that lacks a key, holds a wrong value or contradicts itself; the sentence names the key."""


class Branch(BaseModel):
    """A structural level: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Leaf(BaseModel):
    """A level of figures: more may be added to it."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class StepSeconds(Leaf):
    """Seconds of each step of the loop, in the order that they ran; `total` is required, steps are free."""

    total: Seconds
    __pydantic_extra__: dict[str, Seconds] = Field(init=False)

    @property
    def steps(self) -> dict[str, float]:
        return dict(self.__pydantic_extra__)


class CorpusKind(Leaf):
    samples: Count
    tokens: Count
    masked: Count = Field(description="tokens whose loss counts (the assistant's own)")


class Corpus(Leaf):
    samples: Count
    tokens: Count
    kinds: dict[str, CorpusKind]
    drops: dict[str, Count] = Field(default_factory=dict, description="samples left out, by reason")
    digest: str


class TargetKind(Leaf):
    prompts: Count
    exact_match: Share


class Target(Leaf):
    name: str
    identity: str = Field(description="sha256 of weights and config")
    parameters: Count
    layer_types: list[str] = Field(min_length=1)
    exact_match: Share = Field(description="held-out answers equal to the reference")
    repeated_4grams: Share = Field(description="4-grams of generated tokens that were seen before in the same answer")
    mean_top1_probability: Share
    by_kind: dict[str, TargetKind]


class Shard(Leaf):
    shard: str
    samples: Count
    tokens: Count
    bytes: Count
    worker: str
    epoch: Count
    seconds: Seconds | None = None
    sha256: str
    redone: bool | None = Field(
        default=None, description="None: a shard of a later epoch than the first counts as redone"
    )


class Shards(Leaf):
    expected: Count
    committed: Count
    lost: Count
    duplicated: Count
    redone: Count
    killed_worker: str | None = None
    table: list[Shard]


class CurvePoint(Leaf):
    step: Count
    tokens: Count = Field(description="context tokens seen so far")
    loss: float
    accuracy: Share | None = Field(default=None, description="share of masked slots predicted right")
    acceptance: Length | None = Field(default=None, description="held-out acceptance length at this step")
    lr: Seconds | None = None
    noise: Seconds | None = None


class Training(Leaf):
    label: str
    recipe: dict[str, Any]
    parameters: Count
    steps: Count
    tokens: Count
    curve: list[CurvePoint] = Field(min_length=1)
    slot_accuracy: list[Share] = Field(min_length=1, description="accuracy of slots 1..B-1")


class Lengths(Branch):
    chain: Length
    tree: Length


class AcceptanceKind(Leaf):
    micro: Length
    prompts: Count
    tokens: Count
    target_passes: Count


class Acceptance(Leaf):
    """micro = all tokens over all target passes; macro = mean over prompts of the same quotient."""

    micro: Length
    macro: Length
    target_passes: Count
    tokens: Count
    per_position: list[Share] = Field(min_length=1, description="P(accept ≥ k), k = 1..B-1")
    by_kind: dict[str, AcceptanceKind]

    @model_validator(mode="after")
    def _falls(self) -> Acceptance:
        if any(
            later > earlier + 1e-9 for earlier, later in zip(self.per_position, self.per_position[1:], strict=False)
        ):
            raise ValueError("per_position rises: P(accept ≥ k) cannot grow with k")
        return self


class Budget(Leaf):
    micro: Length
    macro: Length


class TreeAcceptance(Acceptance):
    budget: Count = Field(description="nodes of a tree beside its root")
    by_budget: dict[str, Budget] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _budgets_are_numbers(self) -> TreeAcceptance:
        for key in self.by_budget:
            if not key.isdecimal():
                raise ValueError(f"by_budget has the key '{key}': a budget is a number of nodes")
        return self


class DrafterAcceptance(Branch):
    chain: Acceptance
    tree: TreeAcceptance


class Passes(Leaf):
    target_passes: Count
    tokens: Count


class Identical(Leaf):
    """Prompts whose greedy text equals plain decoding, by mode, out of `prompts`."""

    prompts: Count
    chain: Count
    tree: Count


class Mode(Leaf):
    tokens: Annotated[int, Field(gt=0)]
    seconds: Annotated[float, Field(gt=0)]
    target_passes: Annotated[int, Field(gt=0)]


class Modes(Branch):
    autoregressive: Mode
    chain: Mode | None = None
    tree: Mode | None = None


class WallClock(Leaf):
    threads: Count
    batch: Count
    modes: Modes


class Token(Leaf):
    text: str
    source: Literal["draft", "target"]
    round: Count


class Run(Leaf):
    tokens: list[Token]
    rounds: Count


class Sample(Leaf):
    id: str
    kind: str
    prompt: str
    reference: str
    runs: dict[str, Run] = Field(description="keys are <drafter>/<mode>")


class Report(Branch):
    """The whole of `report.json`."""

    name: str = Field(min_length=1)
    created: datetime
    machine: dict[str, Any]
    versions: dict[str, str]
    seeds: dict[str, Any]
    command: str
    config: dict[str, Any]
    config_digest: str
    seconds: StepSeconds
    corpus: Corpus
    target: Target
    shards: Shards
    training: dict[str, Training]
    acceptance_length: dict[str, Lengths]
    acceptance: dict[str, DrafterAcceptance]
    autoregressive: Passes
    greedy_identical: bool
    identical: Identical
    wall_clock: WallClock | None = None
    peak_memory_bytes: Count | None = None
    samples: list[Sample] = Field(default_factory=list)
    verdict: str = Field(min_length=1)

    @model_validator(mode="after")
    def _agrees(self) -> Report:
        for section in ("training", "acceptance_length", "acceptance"):
            for drafter in ("baseline", "ours"):
                if drafter not in getattr(self, section):
                    raise ValueError(f"lacks the key '{section}.{drafter}'")
        for drafter, lengths in self.acceptance_length.items():
            if drafter not in self.acceptance:
                raise ValueError(f"lacks the key 'acceptance.{drafter}'")
            for mode in ("chain", "tree"):
                headline, measured = getattr(lengths, mode), getattr(self.acceptance[drafter], mode).micro
                if abs(headline - measured) > ROUNDING:
                    raise ValueError(
                        f"'acceptance_length.{drafter}.{mode}' is {headline:g} but "
                        f"'acceptance.{drafter}.{mode}.micro' is {measured:g}"
                    )
        if self.greedy_identical and min(self.identical.chain, self.identical.tree) < self.identical.prompts:
            raise ValueError("'greedy_identical' is true but 'identical' counts a prompt whose text differs")
        return self


def parse_report(report: Mapping[str, Any]) -> Report:
    """Check a report dict against the contract.

    Raises:
        ReportError: one sentence that names the path of the first wrong key.
    """
    plain(report, "")
    try:
        return Report.model_validate(report)
    except ValidationError as error:
        raise ReportError(_sentence(error), where="the report", fix="correct what writes that key") from None


def plain(value: Any, path: str) -> None:
    """Refuse what JSON cannot hold (NumPy scalars, tensors, paths, NaN), naming where it sits."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if not isinstance(key, str):
                raise ReportError(
                    f"'{path or '(the whole report)'}' has the key {key!r}, which is not text",
                    where="the report",
                )
            plain(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            plain(below, f"{path}.{index}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ReportError(f"'{path}' is {value}, which is no number", where="the report", fix="leave the key out")
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ReportError(f"'{path}' holds half of a character (a lone surrogate)", where="the report")
    elif not (value is None or isinstance(value, int)):
        raise ReportError(
            f"'{path}' is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold",
            where="the report",
            fix="convert it to a plain number or text",
        )


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "missing":
        return f"lacks the key '{path}'"
    if first["type"] == "extra_forbidden":
        return f"unknown key '{path}'"
    return f"'{path}': {message[:1].lower()}{message[1:]}" if path else message
