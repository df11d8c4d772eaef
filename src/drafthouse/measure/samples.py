"""Decoded texts as rounds: which tokens were drafted and accepted in one pass, which are the target's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from drafthouse.measure import units
from drafthouse.measure.plots import inks
from drafthouse.measure.report_schema import Report, Run, Sample, Token


@dataclass(frozen=True)
class Round:
    number: int
    drafted: tuple[Token, ...]
    own: tuple[Token, ...]
    tip: str


@dataclass(frozen=True)
class RunView:
    ink: str
    rounds: tuple[Round, ...]
    summary: str


@dataclass(frozen=True)
class SampleView:
    id: str
    kind: str
    prompt: str
    reference: str
    same_text: bool
    runs: Mapping[str, RunView]


@dataclass(frozen=True)
class RunKey:
    key: str
    label: str
    ink: str
    checked: bool


def run_keys(report: Report) -> list[RunKey]:
    """Every kind of run that some sample kept: chains first, the baseline before ours."""
    found = {key for sample in report.samples for key in sample.runs}
    names = list(inks(report.acceptance))

    def order(key: str) -> tuple[int, int, str]:
        drafter, _, mode = key.partition("/")
        return (
            (("chain", "tree").index(mode) if mode in ("chain", "tree") else 2),
            _place(names, drafter),
            key,
        )

    ordered = sorted(found, key=order)
    first = "ours/chain" if "ours/chain" in found else next(iter(ordered), "")
    colours = inks(report.acceptance)
    return [RunKey(key, _run_label(key), _run_ink(key, colours), key == first) for key in ordered]


def sample_views(report: Report) -> list[SampleView]:
    colours = inks(report.acceptance)
    return [_sample(sample, colours) for sample in report.samples]


def _sample(sample: Sample, colours: Mapping[str, str]) -> SampleView:
    texts = {"".join(token.text for token in run.tokens) for run in sample.runs.values()}
    runs = {key: _run(key, run, colours) for key, run in sample.runs.items()}
    return SampleView(sample.id, sample.kind, sample.prompt, sample.reference, len(texts) <= 1, runs)


def _run(key: str, run: Run, colours: Mapping[str, str]) -> RunView:
    rounds = []
    for number, group in groupby(run.tokens, key=lambda token: token.round):
        tokens = list(group)
        drafted = tuple(token for token in tokens if token.source == "draft")
        own = tuple(token for token in tokens if token.source == "target")
        rounds.append(Round(number, drafted, own, _tip(number, len(drafted), len(own))))
    count, passes = len(run.tokens), run.rounds
    written = f"{units.count(count)} tokens in {units.count(passes)} target passes"
    summary = f"{_run_label(key)}: {written}, {units.length(count / max(passes, 1))} tokens per pass"
    return RunView(_run_ink(key, colours), tuple(rounds), summary)


def _run_label(key: str) -> str:
    return key.replace("/", ", ")


def _run_ink(key: str, colours: Mapping[str, str]) -> str:
    return colours.get(key.partition("/")[0], "muted")


def _tip(number: int, drafted: int, own: int) -> str:
    kept = "no drafted token accepted" if not drafted else f"{_plural(drafted, 'drafted token')} accepted"
    return f"Round {number}: {kept}, {_plural(own, 'token')} of the target's own"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
