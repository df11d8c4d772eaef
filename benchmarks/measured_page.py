"""docs/measured.md and its pictures, from results/*.json alone. Nothing is measured here.

python benchmarks/measured_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
Row = dict[str, Any]
CHAIN, TREE = "#3a6ea5", "#e08a2e"


def read(name: str) -> list[Row]:
    """Rows of one result file; none where it was never made."""
    path = RESULTS / f"{name}.json"
    found: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def number(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def verdict(row: Row) -> str:
    if row["bar"] is None:
        return "–"
    if row["ratio"] is None:
        return f"≥ {row['bar']:g}: open, not measured"
    return f"≥ {row['bar']:g}: {'met' if row['met'] else '**not met**'}"


def table(rows: list[Row]) -> list[str]:
    lines = ["| what | figure | against | ratio | bar |", "|---|---|---|---|---|"]
    for row in rows:
        unit = row["unit"].partition(" (p10")[0]
        ratio = "–" if row["ratio"] is None or row["peer"] == "-" else f"{row['ratio']:.3g}"
        peer = "–" if row["peer"] == "-" else row["peer"]
        figure = number(row["value"]) + ("" if row["value"] is None else f" {unit}")
        lines.append(f"| {row['name']} | {figure} | {peer} | {ratio} | {verdict(row)} |")
    return lines


def provenance(rows: list[Row]) -> str:
    """Machine, versions, seed, date and command of rows: a line for each run they come from."""
    return "\n\n".join(dict.fromkeys(map(origin, rows)))


def origin(row: Row) -> str:
    gpus = row["machine"].get("gpus") or []
    machine = gpus[0]["name"] if gpus else row["machine"]["cpu_model"]
    host = f"{len(gpus)} on the host, " if len(gpus) > 1 else ""
    versions = ", ".join(
        f"{name} {row['versions'][name]}" for name in ("torch", "transformers") if row["versions"].get(name)
    )
    return (
        f"{machine} ({host}{row['machine']['cpu_cores_usable']} cores); {versions}; seed {row['seed']}; "
        f"{row['date'][:16].replace('T', ' ')}; `{row['command']}`"
    )


def interval(values: list[float]) -> str:
    return f"{values[0]:.2f} to {values[1]:.2f}"


def ablation(rows: list[Row]) -> list[str]:
    """The table of recipes, the picture, and what may be concluded from how many seeds."""
    facts = next(row for row in rows if row["name"] == "ablation: target")
    seeds = int(next(row for row in rows if row["name"] == "ablation: seeds of every recipe")["value"])
    runs = {
        (recipe, mode): row
        for row in rows
        if "interval" in row.get("details", {})
        for recipe, mode in [row["name"].removeprefix("ablation: ").split(", ")]
    }
    recipes = list(dict.fromkeys(recipe for recipe, _ in runs))
    draw_ablation(runs, recipes)
    known = facts["details"]
    first = runs[recipes[0], "chain"]["details"]
    lines = [
        f"Target: {facts['value']:.2f} M parameters, trained on {known['target_tokens']:,} tokens "
        f"({known['target_steps']} steps, held-out accuracy {known['held_out']['assistant_accuracy']:.3f}, data sha256 "
        f"`{known['data_sha256'][:12]}`). Its greedy texts on the prompts: exact {known['guard']['exact_match']:.2f}, "
        f"repeated 4-grams {known['guard']['repeated_4grams']:.2f}, mean top-1 probability "
        f"{known['guard']['mean_top1_probability']:.3f}. "
        f"Every drafter saw {first['tokens_seen']:,} tokens of the target's own answers; {first['prompts']} held-out "
        f"prompts; {seeds} seed{'s' if seeds > 1 else ''} a recipe.",
        "",
        "![acceptance by recipe and kind of prompt](measured-ablation.png)",
        "",
        "| recipe | chain, tokens a pass | 95 % | over CE-decay | 95 % | bar | tree 64 | 95 % "
        "| drafts, tree over chain | texts equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for recipe in recipes:
        chain, tree = runs[recipe, "chain"], runs[recipe, "tree"]
        over = next(r for r in rows if r["name"] == f"ablation: {recipe}, drafts accepted a pass by the tree")
        same = sum(chain["details"]["identical"]) + sum(tree["details"]["identical"])
        count = 2 * chain["details"]["prompts"] * len(chain["details"]["identical"])
        lines.append(
            f"| {recipe} | {chain['value']:.2f} | {interval(chain['details']['interval'])} | {chain['ratio']:.2f} | "
            f"{interval(chain['details']['ratio_interval'])} | {verdict(chain)} | {tree['value']:.2f} | "
            f"{interval(tree['details']['interval'])} | {over['ratio']:.2f} ({verdict(over)}) | {same} of {count} |"
        )
    best = max(recipes, key=lambda recipe: runs[recipe, "chain"]["value"])
    tied = [
        recipe
        for recipe in recipes
        if runs[recipe, "chain"]["details"]["interval"][1] >= runs[best, "chain"]["details"]["interval"][0]
    ]
    lines += [
        "",
        f"Longest chain: **{best}**. Within its interval: {', '.join(tied)}."
        + (
            " Intervals are over prompts only: one seed says nothing of the spread between seeds." if seeds == 1 else ""
        ),
    ]
    return lines


def draw_ablation(runs: dict[tuple[str, str], Row], recipes: list[str]) -> None:
    kinds = list(runs[recipes[0], "chain"]["details"]["kinds"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), width_ratios=(1, 1.6))
    place = np.arange(len(recipes))
    for offset, mode, colour in ((-0.2, "chain", CHAIN), (0.2, "tree", TREE)):
        values = [runs[recipe, mode]["value"] for recipe in recipes]
        spans = np.array([runs[recipe, mode]["details"]["interval"] for recipe in recipes]).T
        errors = np.abs(spans - np.array(values))
        label = "tree, 64 drafts" if mode == "tree" else mode
        left.bar(place + offset, values, 0.38, yerr=errors, capsize=2, color=colour, label=label)
    left.set_xticks(place, recipes, rotation=30, ha="right", fontsize=8)
    left.set_ylabel("tokens a target pass")
    left.set_ylim(0, 1.25 * left.get_ylim()[1])
    left.legend(fontsize=8, frameon=False, ncols=2)
    left.set_title("all prompts, 95 % intervals", fontsize=9)
    width = 0.8 / len(recipes)
    shades = plt.get_cmap("viridis")(np.linspace(0.1, 0.9, len(recipes)))
    for number_, (recipe, shade) in enumerate(zip(recipes, shades, strict=True)):
        found = [runs[recipe, "chain"]["details"]["kinds"][kind] for kind in kinds]
        values = np.array([one[0] for one in found])
        errors = np.abs(np.array([one[1:] for one in found]).T - values)
        at = np.arange(len(kinds)) + (number_ - (len(recipes) - 1) / 2) * width
        right.bar(at, values, width, yerr=errors, color=shade, label=recipe, error_kw={"elinewidth": 0.7})
    right.set_xticks(np.arange(len(kinds)), kinds, fontsize=8)
    right.legend(fontsize=7, frameon=False)
    right.set_title("chain, by kind of prompt", fontsize=9)
    finish(figure, (left, right), "measured-ablation.png")


def decoding(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row["value"] is not None]
    names = [row["name"].removeprefix("decoding: ").removesuffix(", batch 1") for row in rows]
    figure, axes = plt.subplots(figsize=(6.2, 2.6))
    axes.barh(np.arange(len(rows)), [row["value"] for row in rows], color=CHAIN, height=0.6)
    axes.set_yticks(np.arange(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s at batch 1, after prefill", fontsize=8)
    for place, row in enumerate(rows):
        axes.text(row["value"], place, f" {row['value']:.0f} ({row['ratio']:.2f}×)", va="center", fontsize=8)
    axes.set_xlim(0, 1.25 * max(row["value"] for row in rows))
    finish(figure, (axes,), "measured-decoding.png")
    lines = ["![tokens a second at batch 1](measured-decoding.png)", ""]
    lines += [
        "| mode | tokens/s | over autoregressive | tokens a pass | ms a pass | texts equal |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in zip(names, rows, strict=True):
        more = row["details"]
        lines.append(
            f"| {name} | {row['value']:.0f} | {row['ratio']:.2f} | {more['tokens_a_pass']:.2f} | "
            f"{more['milliseconds_a_pass']:.1f} | {more['identical']} of {more['prompts']} |"
        )
    return lines


EXTRACTION = (
    "Random weights, 64 layers in bfloat16; shards in memory, deleted when they are whole. A name ends with the",
    "implementation of the gated delta rule (`src/drafthouse/target/recurrence.py`): `chunks` is ours, `substitution`",
    "transformers' reference. Speculators' offline path needs vLLM, which cannot run beside this torch; its writer",
    "runs here on the same forward: a stream that copies each sample to pinned memory, eight threads, a file a sample",
    "(no checks, no hashes).",
)
DECODING = (
    "Weights in bfloat16, greedy; the clock runs after prefill. A target of 33 M parameters is bound by launches, not",
    "by memory: a pass of the target costs 1.7 ms with CUDA graphs, a draft and its verification 2.7 to 4.0 ms, so",
    "that acceptance pays less than it would at the 27B's size (`roofline.md`). Without graphs the host launches every",
    "kernel: 39 ms a pass on this host, 15 in an earlier run on another.",
)
SERVED = (
    "A real SGLang 0.5.17 serves the ablation's target with our drafter by `DFLASH`. Texts count as equal where they",
    "part at two tokens that bfloat16 cannot tell apart (13 of 16 are equal to the last token; the other three part at",
    "gaps of at most 0.04 in the logit). States: relative error against our own capture; the nearest other layer is 60",
    "times as far. The canary's fourth question gets a text that repeats itself, as the target's own does.",
)
# Of bars that were missed: the beginning of their rows' names, and the cause.
CAUSES = (
    (
        "extraction: samples of 64",
        "Extraction against the naive way: the naive way is bound by launches, ours by the forward, so the ratio falls"
        " with the length of samples. Twenty times its 332 tokens/s would be more than the plain forward of long"
        " batches makes here (4,811 tokens/s).",
    ),
    (
        "extraction: 2 GPUs",
        "Two GPUs: 19 s of work each, of which one and a half go into starting and into the last shard.",
    ),
    (
        "training: ours",
        "Training against speculators: both do the same products, at 0.47 and 0.42 of the bf16 peak (a plain product"
        " reaches 0.8, so that no more than 1.9 times speculators' rate is there to be had). It keeps all logits, and"
        " takes 61.6 GiB where ours takes 38.0. Its step does not start by itself under this torch:"
        " `peer_trainers.py` gets it round two stops of the compiler. What the rest of our step waits for was not"
        " profiled.",
    ),
    (
        "target of the ablation: repeated",
        "The target's greedy texts: trained for four minutes, it repeats itself on code and prose, where the acceptance"
        " of all recipes is also lowest (see the picture below).",
    ),
    (
        "sglang: acceptance length",
        "SGLang's acceptance length: our evaluation runs in float32, the server in bfloat16; three of sixteen greedy"
        " texts part at near ties, and behind them other texts are drafted. Over the server's own texts our decoder"
        " takes as many passes (488 for 487; the same number for 15 of 16 texts).",
    ),
    (
        "tree verify",
        "Tree verification: the rival, a state a node, is itself a tuned Triton kernel here; against the same form in"
        " PyTorch see the table of layers below. Of our 35.7 us, 16.5 are the tiles of the system (10 programs of one"
        " warp a head, each a chain of small products that wait for each other) and 17.5 the rest, of which 7 are the"
        " products with the state. Eleven other cuts took 42 to 68 us, nine of them with these products formed beside"
        " the tiles in one launch (since removed).",
    ),
)


def reasons(rows: list[Row]) -> list[str]:
    """A line for each missed bar that has a known cause, and for each figure that is missing."""
    missed = [row["name"] for row in rows if row["met"] is False]
    lines = [f"- {why}" for begin, why in CAUSES if any(name.startswith(begin) for name in missed)]
    unexplained = [name for name in missed if not any(name.startswith(begin) for begin, _ in CAUSES)]
    lines += [f"- {name}: the cause is not known." for name in dict.fromkeys(unexplained)]
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row["value"] is None:
            peer = "" if row["peer"] == "-" else f" against {row['peer']}"
            missing.setdefault(row["details"]["why"], []).append(f"{row['name']}{peer}")
    return lines + [f"- Not measured: {'; '.join(names)}. The cause: {why}." for why, names in missing.items()]


def finish(figure: Any, axes: tuple[Any, ...], name: str) -> None:
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / name, dpi=110)
    plt.close(figure)


def page() -> str:
    extraction, training, ablated = (
        read("gpu_extraction") + read("gpu_extraction_ranks"),
        read("gpu_training"),
        read("gpu_ablation"),
    )
    decoded, verify, served = read("gpu_decoding"), read("tree_verify"), read("gpu_sglang")
    everything = [*extraction, *training, *ablated, *decoded, *verify, *served]
    lines = [
        "# What was measured",
        "",
        "Made by `benchmarks/measured_page.py` from `benchmarks/results/*.json`. A ratio says how many times better",
        "than the peer it is; every file names its command, machine, versions, seed and date.",
        "",
        "## Every bar",
        "",
        *table([row for row in everything if row["bar"] is not None]),
        "",
        "Why not, where not:",
        "",
        *reasons(everything),
    ]
    if ablated:
        lines += ["", "## Which loss", "", *ablation(ablated), "", provenance(ablated)]
    if decoded:
        lines += ["", "## Decoding at batch 1", "", *DECODING, "", *decoding(decoded), "", provenance(decoded)]
    if training:
        lines += ["", "## Training at the shape of the 27B's drafter", ""]
        lines += [
            "1.73 B parameters, five layers, block 16; random states; one document of 4,096 tokens and one step of",
            "AdamW at a time, timed one after the other on a device of their own. MFU is defined in",
            "`src/drafthouse/drafter/work.py`.",
            "",
            *table(training),
            "",
            provenance(training),
        ]
    if extraction:
        lines += ["", "## Extraction at the 27B's shape", "", *EXTRACTION, "", *table(extraction), ""]
        lines += [provenance(extraction)]
    if served:
        lines += ["", "## The export gate on SGLang", "", *SERVED, "", *table(served), "", provenance(served)]
    if verify:
        chosen = [row for row in verify if "ours" in row["name"] or "verify and commit" in row["name"]]
        lines += ["", "## Verifying a tree, by layer", "", *table(chosen), "", provenance(verify)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "measured.md").write_text(page(), encoding="utf-8")
