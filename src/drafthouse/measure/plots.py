"""What each plot of the report shows: from the checked report to a chart, its legend and its numbers.

One colour means one drafter everywhere; what the target does by itself has a colour of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from drafthouse.measure import units
from drafthouse.measure.charts import Bar, Key, Line, Plot, bars, curves, levels, slots, spoken, thinned
from drafthouse.measure.report_schema import CurvePoint, Mode, Report, Training

TABLE_POINTS = 10
MODES = ("chain", "tree")


def inks(names: Iterable[str]) -> dict[str, str]:
    """Drafter → colour role, in the order of the page: "baseline", "ours", then the others."""
    spare = iter(("third", "fourth"))
    found = set(names)
    colours: dict[str, str] = {name: name for name in ("baseline", "ours") if name in found}
    for name in sorted(found - set(colours)):
        colours[name] = next(spare, "muted")
    return colours


def training_plots(report: Report) -> list[Plot]:
    """Loss, accuracy, held-out acceptance length, schedule, over tokens; what was not logged is left out."""
    runs = report.training
    losses = {str(run.recipe.get("loss", "")) for run in runs.values()}
    apart = "The recipes minimise different losses: compare the shapes, not the heights."
    plots = [
        _curve(
            "loss",
            "Training loss",
            "mean per step, over tokens seen",
            runs,
            "loss",
            write="{:.3f}".format,
            note=apart if len(losses) > 1 else "",
        ),
        _curve(
            "accuracy",
            "Slots predicted right",
            "share of masked slots, over tokens seen",
            runs,
            "accuracy",
            write=units.percent,
            share=True,
        ),
        _curve(
            "held-out",
            "Acceptance length while training",
            "tokens per target pass, held-out prompts, over tokens seen",
            runs,
            "acceptance",
            write=units.length,
            floor=1.0,
        ),
        _schedule(runs),
    ]
    return [plot for plot in plots if plot is not None]


def acceptance_by_slot(report: Report) -> Plot:
    """P(accept ≥ k): how often at least k drafted tokens of a block are kept."""
    lines = [
        _slot_line(f"{name}, {mode}", ink, getattr(report.acceptance[name], mode).per_position, mode == "tree")
        for name, ink in inks(report.acceptance).items()
        for mode in MODES
    ]
    unit = "P(accept ≥ k): share of passes that keep at least k drafted tokens"
    return _by_slot("by-slot", "How far a draft survives", unit, lines)


def accuracy_by_slot(report: Report) -> Plot:
    """Accuracy of each slot while training, where no slot before it has to be right."""
    colours = inks(report.training)
    lines = [_slot_line(name, ink, report.training[name].slot_accuracy) for name, ink in colours.items()]
    unit = "share right at the end of training, whatever the slots before it"
    return _by_slot("slot-accuracy", "Accuracy of each slot on its own", unit, lines)


def acceptance_by_kind(report: Report, mode: str) -> Plot:
    """Acceptance length (micro) of every prompt kind, drafters side by side."""
    colours, tree = inks(report.acceptance), mode == "tree"
    cells = {name: getattr(report.acceptance[name], mode).by_kind for name in colours}
    groups, rows = [], []
    for kind in dict.fromkeys(kind for by_kind in cells.values() for kind in by_kind):
        present = {name: by_kind[kind] for name, by_kind in cells.items() if kind in by_kind}
        prompts = units.count(max(cell.prompts for cell in present.values()))
        lengths = {name: units.length(cell.micro) for name, cell in present.items()}
        group = [
            Bar(cell.micro, lengths[name], colours[name], tree, own=min(1.0, cell.micro))
            for name, cell in present.items()
        ]
        groups.append((f"{kind} ({prompts} prompts)", group))
        rows.append((kind, prompts, *(lengths.get(name, "–") for name in colours)))
    name, title, unit = f"by-kind-{mode}", f"By kind of prompt, {mode}", "tokens per target pass"
    columns = ("kind", "prompts", *colours)
    keys = [Key("the target's own token", "target", "bar")]
    keys += [Key(f"{drafter}, {mode}", ink, "pale" if tree else "bar") for drafter, ink in colours.items()]
    svg = bars(name, spoken(title, unit, rows, columns), groups)
    return Plot(name, title, unit, svg, tuple(keys), columns, tuple(rows))


def acceptance_by_budget(report: Report) -> Plot | None:
    """Acceptance length of trees of several sizes, with the chain of the same drafter as a level line."""
    colours = inks(report.acceptance)
    trees = {name: report.acceptance[name].tree.by_budget for name in colours}
    budgets = sorted({int(key) for tree in trees.values() for key in tree})
    if not budgets:
        return None
    title, unit = "Chain against tree, by node budget", "tokens per target pass, over drafted nodes per pass"
    lines, level, rows, keys = [], [], [], []
    for name, ink in colours.items():
        tree, chain = trees[name], report.acceptance[name].chain.micro
        found = [(place, tree[str(budget)].micro) for place, budget in enumerate(budgets) if str(budget) in tree]
        lines.append(Line(f"{name}, tree", ink, found, dashed=True))
        level.append((chain, ink))
        cells = [units.length(tree[str(budget)].micro) if str(budget) in tree else "–" for budget in budgets]
        rows.append((name, units.length(chain), *cells))
        keys += [Key(f"{name}, chain", ink, "line"), lines[-1].key]
    columns = ("drafter", "chain", *(f"{budget} nodes" for budget in budgets))
    label = spoken(title, unit, rows, columns)
    svg = levels("by-budget", label, lines, level, [str(budget) for budget in budgets])
    return Plot("by-budget", title, unit, svg, tuple(keys), columns, tuple(rows))


def passes(report: Report) -> Plot:
    """Target passes needed for 100 tokens: the cost that speculation is meant to cut."""
    plain = 100 * report.autoregressive.target_passes / max(report.autoregressive.tokens, 1)
    costs = [("plain decoding, one token a pass", plain, "target", False)]
    for name, ink in inks(report.acceptance).items():
        for mode in MODES:
            micro = getattr(report.acceptance[name], mode).micro
            costs.append((f"{name}, {mode}", 100 / micro, ink, mode == "tree"))
    title, unit = "What 100 tokens cost", "target passes, fewer is better"
    columns = ("decoding", "target passes per 100 tokens", "tokens per target pass")
    rows = [(what, f"{cost:.1f}", units.length(100 / cost) if cost else "–") for what, cost, _, _ in costs]
    groups = [(what, [Bar(cost, f"{cost:.0f}", ink, pale)]) for what, cost, ink, pale in costs]
    svg = bars("passes", spoken(title, unit, rows, columns), groups)
    return Plot("passes", title, unit, svg, (), columns, tuple(rows))


def speed(report: Report) -> Plot | None:
    """Tokens per second against plain decoding in one run: a ratio, for absolute times are the machine's."""
    if report.wall_clock is None:
        return None
    modes = report.wall_clock.modes
    plain = _rate(modes.autoregressive)
    entries: list[tuple[str, Mode | None, str, bool]] = [
        ("plain decoding", modes.autoregressive, "target", False),
        ("ours, chain", modes.chain, "ours", False),
        ("ours, tree", modes.tree, "ours", True),
    ]
    groups, rows = [], []
    for what, mode, ink, pale in entries:
        if mode is None:
            continue
        against = units.ratio(_rate(mode) / plain)
        groups.append((what, [Bar(_rate(mode) / plain, against, ink, pale)]))
        per_pass = units.duration(mode.seconds / mode.target_passes)
        figures = (units.count(mode.tokens), units.duration(mode.seconds), units.count(_rate(mode)), per_pass)
        rows.append((what, *figures, against))
    title, unit = "Speed on this machine", "tokens per second, plain decoding = 1"
    columns = ("decoding", "tokens", "time", "tokens/s", "time per target pass", "against plain")
    svg = bars("speed", spoken(title, unit, rows, columns), groups, rule=1.0)
    return Plot("speed", title, unit, svg, (), columns, tuple(rows))


def exact_match(report: Report, threshold: float) -> Plot | None:
    """How often the target itself is right, by kind; under the share `threshold` acceptance says little."""
    kinds = report.target.by_kind
    if not kinds:
        return None
    title, unit = "The target's own answers", "share equal to the reference, held-out prompts"
    columns = ("kind", "prompts", "exact")
    rows = [(kind, units.count(cell.prompts), units.percent(cell.exact_match)) for kind, cell in kinds.items()]
    groups = [
        (f"{kind} ({prompts} prompts)", [Bar(kinds[kind].exact_match, share, "muted")]) for kind, prompts, share in rows
    ]
    svg = bars("exact-match", spoken(title, unit, rows, columns), groups, rule=threshold, limit=1.0)
    return Plot("exact-match", title, unit, svg, (), columns, tuple(rows))


def _curve(
    name: str,
    title: str,
    unit: str,
    runs: Mapping[str, Training],
    field: str,
    *,
    write: Callable[[float], str],
    share: bool = False,
    floor: float | None = None,
    note: str = "",
) -> Plot | None:
    lines = [Line(drafter, ink, _points(runs[drafter].curve, field)) for drafter, ink in inks(runs).items()]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    rows = [
        (line.label, units.count(tokens), write(value))
        for line in lines
        for tokens, value in thinned(line.points, TABLE_POINTS)
    ]
    ends = [(line.label, write(line.points[0][1]), write(line.points[-1][1])) for line in lines]
    label = spoken(title, unit, ends, ("drafter", "first", "last"))
    svg = curves(name, label, lines, share=share, floor=floor)
    keys = tuple(line.key for line in lines)
    return Plot(name, title, unit, svg, keys, ("drafter", "tokens", field), tuple(rows), note)


def _schedule(runs: Mapping[str, Training]) -> Plot | None:
    """Learning rate (solid) and noise (dashed), each as a share of its peak; equal schedules are one line."""
    colours = inks(runs)
    shared: dict[tuple[str, tuple[tuple[float, float], ...]], list[str]] = {}
    for field in ("lr", "noise"):
        for drafter in colours:
            points = tuple(_points(runs[drafter].curve, field))
            if any(value > 0 for _, value in points):
                shared.setdefault((field, points), []).append(drafter)
    if not shared:
        return None
    lines, rows = [], []
    for (field, points), drafters in shared.items():
        peak = max(value for _, value in points)
        what = f"{' and '.join(drafters)}, {'learning rate' if field == 'lr' else 'noise'}"
        ink = colours[drafters[0]] if len(drafters) == 1 else "ink"
        lines.append(Line(what, ink, [(x, y / peak) for x, y in points], dashed=field == "noise"))
        rows.append((what, f"{peak:.3g}", f"{points[0][1]:.3g}", f"{points[-1][1]:.3g}"))
    title, unit, columns = (
        "Schedule",
        "share of its own peak, over tokens seen",
        ("schedule", "peak", "first", "last"),
    )
    svg = curves("schedule", spoken(title, unit, rows, columns), lines, share=True)
    return Plot("schedule", title, unit, svg, tuple(line.key for line in lines), columns, tuple(rows))


def _slot_line(label: str, ink: str, shares: Sequence[float], dashed: bool = False) -> Line:
    return Line(label, ink, list(enumerate(shares, start=1)), dashed)


def _by_slot(name: str, title: str, unit: str, lines: Sequence[Line]) -> Plot:
    last = max(len(line.points) for line in lines)
    rows = []
    for line in lines:
        cells = [units.percent(share) for _, share in line.points]
        rows.append((line.label, *cells, *("–" for _ in range(last - len(cells)))))
    columns = ("drafter", *(f"k = {slot}" for slot in range(1, last + 1)))
    svg = slots(name, spoken(title, unit, rows, columns), lines)
    return Plot(name, title, unit, svg, tuple(line.key for line in lines), columns, tuple(rows))


def _points(curve: Sequence[CurvePoint], field: str) -> list[tuple[float, float]]:
    values: list[tuple[float, Any]] = [(point.tokens, getattr(point, field)) for point in curve]
    return [(tokens, value) for tokens, value in values if value is not None]


def _rate(mode: Mode) -> float:
    return mode.tokens / mode.seconds
