"""From the checked report to what the page says: comparisons, states, sentences. Templates only lay out.

Nothing here is HTML. Wherever the report could flatter itself (a babbling target, a recipe that loses, a tree
below its chain) the view computes the plain statement and the page shows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafthouse.measure import units
from drafthouse.measure.plots import inks
from drafthouse.measure.report_schema import Report

# A target outside these makes any drafter look good: text that repeats itself is easy to draft, and so are
# the constants of a target that never looks at its prompt.
EXACT_MATCH_AT_LEAST = 0.60
REPEATED_4GRAMS_UNDER = 0.30

STEPS = {
    "corpus": "text to tokens and loss mask",
    "generate": "the target writes the answers",
    "extract": "hidden states, by shard",
    "train": "both drafters, same tokens",
    "evaluate": "held-out prompts",
    "report": "this page",
}


@dataclass(frozen=True)
class Dimension:
    """One line of the headline figure, in tokens per target pass."""

    label: str
    value: float
    ink: str
    pale: bool
    gain: str = ""
    loses: bool = False


@dataclass(frozen=True)
class Fact:
    label: str
    value: str
    detail: str
    flag: str = ""  # what is wrong with it, in a word or two


@dataclass(frozen=True)
class Step:
    name: str
    what: str
    flow: str
    seconds: str
    share: float


@dataclass(frozen=True)
class Gauge:
    """A share beside the level that it should keep; `level` None where there is none to keep."""

    name: str
    value: str
    share: float
    level: float | None
    wanted: str
    bad: bool
    against: str


def dimensions(report: Report) -> list[Dimension]:
    """Plain decoding, then the drafters side by side within chain and within tree."""
    plain = report.autoregressive.tokens / max(report.autoregressive.target_passes, 1)
    lines = [Dimension("plain decoding", plain, "target", False)]
    for mode in ("chain", "tree"):
        base = getattr(report.acceptance_length["baseline"], mode)
        for name, ink in inks(report.acceptance_length).items():
            value = getattr(report.acceptance_length[name], mode)
            gain = "" if name == "baseline" else units.change(value, base)
            lines.append(Dimension(f"{name}, {mode}", value, ink, mode == "tree", gain, value < base))
    return lines


def scale_end(lines: list[Dimension]) -> int:
    """Right end of the headline scale: the next whole token."""
    return max(2, math.ceil(max(line.value for line in lines)))


def facts(report: Report) -> list[Fact]:
    """The figures beside the acceptance length that decide whether the run is worth anything."""
    same, shards, target = report.identical, report.shards, report.target
    identical = Fact(
        "Greedy text identical to plain decoding",
        f"{units.count(min(same.chain, same.tree))} of {units.count(same.prompts)}",
        "prompts, chain and tree"
        if same.chain == same.tree
        else f"prompts; chain {units.count(same.chain)}, tree {units.count(same.tree)}",
        flag="" if report.greedy_identical else "texts differ",
    )
    redone = f"{units.count(shards.redone)} redone"
    if shards.killed_worker:
        redone += f" after worker {shards.killed_worker} was killed"
    committed = Fact(
        "Shards committed",
        f"{units.count(shards.committed)} of {units.count(shards.expected)}",
        f"{units.count(shards.lost)} lost, {units.count(shards.duplicated)} duplicated, {redone}",
        flag="not complete"
        if shards.lost or shards.committed != shards.expected
        else "not unique"
        if shards.duplicated
        else "",
    )
    right = Fact(
        "Target answers right",
        units.percent(target.exact_match),
        f"of held-out prompts, {units.compact(target.parameters)} parameters",
        flag=f"under {units.percent(EXACT_MATCH_AT_LEAST)}" if target.exact_match < EXACT_MATCH_AT_LEAST else "",
    )
    memory = f", {units.size(report.peak_memory_bytes)} of memory at its peak" if report.peak_memory_bytes else ""
    total = Fact("Whole loop", units.duration(report.seconds.total), f"{len(report.seconds.steps)} steps{memory}")
    return [identical, committed, right, total]


def steps(report: Report) -> list[Step]:
    """The loop in the order that it ran, each step with what it handed on."""
    corpus, shards = report.corpus, report.shards
    written = units.size(sum(row.bytes for row in shards.table))
    trained = max((run.steps for run in report.training.values()), default=0)
    flows = {
        "corpus": f"{units.count(corpus.samples)} samples, {units.compact(corpus.tokens)} tokens",
        "extract": f"{units.count(shards.committed)} shards, {written}",
        "train": f"{len(report.training)} × {units.count(trained)} steps",
        "evaluate": f"{units.count(report.identical.prompts)} prompts",
    }
    longest = max(report.seconds.steps.values(), default=0.0) or 1.0
    return [
        Step(
            name.replace("_", " "),
            STEPS.get(name, ""),
            flows.get(name, ""),
            units.duration(value),
            value / longest,
        )
        for name, value in report.seconds.steps.items()
    ]


def acceptance_rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in inks(report.acceptance):
        for mode in ("chain", "tree"):
            cell = getattr(report.acceptance[name], mode)
            nodes = units.count(cell.budget) if mode == "tree" else "–"
            figures = (units.length(cell.micro), units.length(cell.macro), units.count(cell.tokens))
            rows.append((name, mode, nodes, *figures, units.count(cell.target_passes)))
    return rows


def trees_below_chain(report: Report) -> list[str]:
    """Where a tree keeps fewer tokens than its own chain, which contains the same first choices."""
    found = []
    for name in inks(report.acceptance):
        chain, tree = report.acceptance[name].chain, report.acceptance[name].tree
        if tree.micro < chain.micro:
            found.append(f"{name}, all prompts")
        found += [
            f"{name}, {kind}"
            for kind, cell in tree.by_kind.items()
            if kind in chain.by_kind and cell.micro < chain.by_kind[kind].micro
        ]
    return found


def gauges(report: Report) -> list[Gauge]:
    """The degeneracy guard: three shares of the target's own greedy text."""
    target = report.target
    return [
        Gauge(
            "Answers equal to the reference",
            units.percent(target.exact_match),
            target.exact_match,
            EXACT_MATCH_AT_LEAST,
            f"wanted: at least {units.percent(EXACT_MATCH_AT_LEAST)}",
            target.exact_match < EXACT_MATCH_AT_LEAST,
            "A target that answers with the same constants whatever it is asked is drafted almost perfectly, "
            "and the figure means nothing.",
        ),
        Gauge(
            "Repeated 4-grams",
            units.percent(target.repeated_4grams),
            target.repeated_4grams,
            REPEATED_4GRAMS_UNDER,
            f"wanted: under {units.percent(REPEATED_4GRAMS_UNDER)}",
            target.repeated_4grams >= REPEATED_4GRAMS_UNDER,
            "Text that runs in circles is easy to guess. Structured answers such as JSON repeat a little by nature.",
        ),
        Gauge(
            "Mean top-1 probability",
            units.percent(target.mean_top1_probability),
            target.mean_top1_probability,
            None,
            "no level to keep",
            False,
            "How sure the target is of its own greedy token. The surer it is, the longer any draft survives: "
            "compare acceptance lengths only between targets that are about as sure.",
        ),
    ]


def speed_sentences(report: Report) -> list[str]:
    """What the measured times say: cost of a pass, tokens kept by it, and the speed that follows."""
    clock = report.wall_clock
    if clock is None:
        return []
    plain = clock.modes.autoregressive
    plain_pass, plain_rate = plain.seconds / plain.target_passes, plain.tokens / plain.seconds
    sentences = []
    for name in ("chain", "tree"):
        mode = getattr(clock.modes, name)
        if mode is None:
            continue
        rate = mode.tokens / mode.seconds / plain_rate
        cost = units.ratio(mode.seconds / mode.target_passes / plain_pass)
        kept = units.length(mode.tokens / mode.target_passes)
        sentences.append(
            f"With {name} decoding one round (draft, verify, commit) took {cost} the time of a plain step "
            f"and yielded {kept} tokens, so it {_outcome(rate)}: {units.ratio(rate)} the speed of plain "
            "decoding."
        )
    return sentences


def _outcome(rate: float) -> str:
    """Half a percent is within what two runs of the same thing differ by."""
    if abs(rate - 1) < 0.005:
        return "broke even"
    return "was faster" if rate > 1 else "was slower"
