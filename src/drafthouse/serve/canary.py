"""The canary: what a served model must prove before traffic reaches it.

It runs against any OpenAI-compatible endpoint, at the parallelism that is deployed: a smoke test with one GPU has
hidden a broken all-reduce. A failing server never raises: the report says what failed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from drafthouse.progress import Progress, Silent
from drafthouse.serve import metrics
from drafthouse.serve.degenerate import inspect
from drafthouse.serve.endpoint import Endpoint, ServerError, short
from drafthouse.serve.errors import CanaryError
from drafthouse.serve.profile import CanarySpec, Profile, Question

# A code that no model can guess, in the middle of text that no model has seen.
_CODE = "7391-TAMARIND"
_SUBJECTS = ("harbour", "orchard", "workshop", "library", "station", "market", "garden", "mill")


class Parcel(BaseModel):
    """The object that the schema request must return: enumerations and bounds, so that it cannot run away."""

    model_config = {"extra": "forbid"}

    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=99)


@dataclass(frozen=True)
class Check:
    """One proof; `passed` None: it could not be made, which is no pass."""

    name: str
    passed: bool | None
    sentence: str
    seconds: float


@dataclass(frozen=True)
class CanaryReport:
    """What the canary found.

    Attributes:
        base_url, model: what was asked.
        checks: in the order in which they ran.
        acceptance_length: tokens per verify pass while the canary ran; None: nothing was drafted.
        right, asked: of the questions with known answers.
        seconds: of the whole canary.
    """

    base_url: str
    model: str | None
    checks: tuple[Check, ...]
    acceptance_length: float | None
    right: int
    asked: int
    seconds: float

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `passed` included."""
        return {"passed": self.passed, **asdict(self)}


class _Run:
    """Checks as they are collected; each is timed and none stops the others."""

    def __init__(self, endpoint: Endpoint, spec: CanarySpec, progress: Progress) -> None:
        self.endpoint, self.spec, self.progress = endpoint, spec, progress
        self.checks: list[Check] = []
        self.right = 0

    def check(self, name: str, proof: Callable[[], tuple[bool | None, str]]) -> bool:
        """Run one proof; a fault of the server fails it."""
        start = time.monotonic()
        try:
            passed, sentence = proof()
        except ServerError as fault:
            passed, sentence = False, str(fault)
        self.checks.append(Check(name, passed, sentence, round(time.monotonic() - start, 3)))
        return bool(passed)


def canary(
    base_url: str,
    spec: CanarySpec,
    *,
    model: str | None = None,
    speculates: bool = False,
    progress: Progress | None = None,
) -> CanaryReport:
    """Ask a served model for its proofs.

    Args:
        base_url: `http://host:port`, with or without `/v1`.
        spec: what is asked and what counts as right.
        model: served name; None: the only one that the server lists.
        speculates: drafts are expected, so the acceptance length must be above `spec.min_acceptance` (default 1).

    Returns:
        The report; `passed` is the health gate.

    Raises:
        CanaryError: the address is none, or the canary is switched off.
    """
    if not spec.enabled:
        raise CanaryError("the canary is switched off", where="canary.enabled", fix="set it to true to ask for proof")
    if not base_url.startswith(("http://", "https://")):
        raise CanaryError("not the address of a server", where=base_url, fix="write it as http://HOST:PORT")
    start = time.monotonic()
    accepted: metrics.Acceptance | None = None
    with Endpoint(base_url, spec) as endpoint:
        run = _Run(endpoint, spec, progress or Silent())
        if run.check("model", lambda: _model(endpoint, model)):
            with _acceptance(run, speculates) as reading:
                _questions(run)
                if spec.json_schema:
                    run.check("json-schema", lambda: _json_schema(endpoint))
                if spec.resume_words:
                    run.check("resumed-prefix", lambda: _resumed(endpoint, spec))
            accepted = reading[0] if reading else None
    return CanaryReport(
        base_url=endpoint.root,
        model=endpoint.model,
        checks=tuple(run.checks),
        acceptance_length=round(accepted.length, 3) if accepted else None,
        right=run.right,
        asked=len(spec.questions),
        seconds=round(time.monotonic() - start, 3),
    )


def canary_of(profile: Profile, base_url: str, progress: Progress | None = None) -> CanaryReport:
    """The canary that a profile describes."""
    return canary(
        base_url,
        profile.canary,
        model=profile.model.served_name,
        speculates=profile.speculates,
        progress=progress,
    )


def _model(endpoint: Endpoint, wanted: str | None) -> tuple[bool, str]:
    names = endpoint.models()
    if wanted is not None and wanted not in names:
        return False, f"'{wanted}' is not served; the server lists {', '.join(names) or 'nothing'}"
    if wanted is None and len(names) != 1:
        return False, f"the server lists {len(names)} models ({', '.join(names)}): name one"
    endpoint.model = wanted or names[0]
    return True, f"'{endpoint.model}' is served"


@contextmanager
def _acceptance(run: _Run, speculates: bool) -> Iterator[list[metrics.Acceptance]]:
    """Reads the counters before and after what happens inside; the list holds the difference afterwards."""
    wanted = run.spec.min_acceptance if run.spec.min_acceptance is not None else (1.0 if speculates else None)
    found: list[metrics.Acceptance] = []
    try:
        before = run.endpoint.metrics()
    except ServerError:
        # Without a first reading the counters since the server's start still show whether drafts are accepted.
        before = {}
    yield found

    def proof() -> tuple[bool | None, str]:
        read = metrics.acceptance(before, run.endpoint.metrics())
        if read is None:
            return None, "the engine's metrics show no drafts"
        found.append(read)
        sentence = f"acceptance length {read.length:.2f} ({read.source})"
        if wanted is None:
            return True, sentence
        return read.length > wanted, f"{sentence}, must be above {wanted:g}"

    if wanted is not None:
        run.check("acceptance", proof)


def _questions(run: _Run) -> None:
    spec = run.spec
    with run.progress.task("canary", len(spec.questions)) as task:
        for number, question in enumerate(spec.questions, 1):
            run.check(f"question-{number}", lambda asked=question: _question(run, asked))  # type: ignore[misc]
            task.advance()
    needed = spec.min_right * len(spec.questions)
    run.check(
        "known-answers",
        lambda: (run.right >= needed, f"{run.right} of {len(spec.questions)} answers are right, {needed:g} needed"),
    )


def _question(run: _Run, question: Question) -> tuple[bool, str]:
    """Judges the form of an answer; whether it is right is counted, because a share of wrong ones may be allowed."""
    content, everything = run.endpoint.ask([{"role": "user", "content": question.prompt}], question.max_tokens)
    verdict = inspect(everything, run.spec.min_distinct)
    if verdict.degenerate:
        return False, f"degenerate output: {verdict.reasons[0]} ({short(everything)})"
    right = any(answer.lower() in content.lower() for answer in question.answers)
    run.right += right
    return True, f"{'right' if right else 'wrong'}: {short(content) or 'reasoning only, no answer'}"


def _json_schema(endpoint: Endpoint) -> tuple[bool, str]:
    schema = {"name": "parcel", "schema": Parcel.model_json_schema(), "strict": True}
    prompt = "A parcel holds twelve red marbles. Give the colour and the count as JSON."
    content, _ = endpoint.ask(
        [{"role": "user", "content": prompt}],
        128,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    try:
        parcel = Parcel.model_validate_json(content)
    except ValidationError:
        return False, f"the answer does not follow the schema ({short(content)})"
    return True, f"the answer follows the schema ({json.dumps(parcel.model_dump())})"


def _resumed(endpoint: Endpoint, spec: CanarySpec) -> tuple[bool, str]:
    """Ask about a long text, then go on: the second request resumes the cached prefix of the first.

    Prefix caching of recurrent states together with drafts has returned states of other positions.
    """
    text = long_text(spec.resume_words)
    first = {"role": "user", "content": f"{text}\n\nWhat is the code of the archive? Answer with the code only."}
    answer, everything = endpoint.ask([first], 256)
    if _CODE.lower() not in answer.lower():
        return False, f"the code in a text of {spec.resume_words} words was not found ({short(everything)})"
    again = [first, {"role": "assistant", "content": answer}, {"role": "user", "content": "Repeat the code, please."}]
    answer, everything = endpoint.ask(again, 256)
    verdict = inspect(everything, spec.min_distinct)
    if verdict.degenerate:
        return False, f"degenerate output after resuming: {verdict.reasons[0]} ({short(everything)})"
    if _CODE.lower() not in answer.lower():
        return False, f"the code was lost after resuming the prefix ({short(everything)})"
    return True, f"the code was found in {spec.resume_words} words, and again after resuming them"


def long_text(words: int) -> str:
    """About `words` words of numbered, distinct sentences with the code in the middle."""
    sentence = "On day {0} the {1} counted {2} visitors and {3} carts."
    count = max(2, words // len(sentence.split()))
    lines = [
        sentence.format(day, _SUBJECTS[day % len(_SUBJECTS)], 17 + day * 37 % 911, day * 53 % 97)
        for day in range(1, count + 1)
    ]
    lines.insert(count // 2, f"The code of the archive is {_CODE}.")
    return "\n".join(lines)
