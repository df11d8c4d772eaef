"""Rows of the loss ablation: acceptance of every recipe with bootstrap intervals over prompts and seeds together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rows import Rows

BASELINE, BUDGET = "ce-decay", 64
RECIPES: dict[str, dict[str, Any]] = {
    "ce-decay": {"loss": {"weights": "decay", "soft_weight": 0.0}},
    "ce-dpace": {"loss": {"weights": "dpace", "soft_weight": 0.0}},
    "kl-decay": {"loss": {"weights": "decay", "soft_weight": 1.0}},
    "kl-streak": {"loss": {"weights": "streak", "soft_weight": 1.0}},
    "kl-streak-noise": {
        "loss": {"weights": "streak", "soft_weight": 1.0},
        "noise": {"kind": "cosine", "sigma": 0.05},
    },
}
# What the target has to be for its drafters to say anything.
LEAST_ACCURACY, MOST_REPEATED = 0.5, 0.2


def bootstrap(results: list[dict[str, Any]], mode: str, chosen: np.ndarray, draws: int = 2000) -> tuple[float, ...]:
    """Micro acceptance (tokens a target pass) over prompts `chosen` and all seeds, with its 95 % interval."""
    tokens = np.array([one[mode]["tokens"] for one in results])[:, chosen]
    passes = np.array([one[mode]["passes"] for one in results])[:, chosen]
    random = np.random.RandomState(0)
    seeds = random.randint(0, len(results), (draws, len(results)))
    places = random.randint(0, tokens.shape[1], (draws, tokens.shape[1]))
    spread = [
        tokens[np.ix_(s, p)].sum() / max(1, passes[np.ix_(s, p)].sum()) for s, p in zip(seeds, places, strict=True)
    ]
    low, high = np.percentile(spread, [2.5, 97.5])
    return float(tokens.sum() / max(1, passes.sum())), float(low), float(high)


def gain(ours: list[dict[str, Any]], base: list[dict[str, Any]], mode: str, draws: int = 2000) -> tuple[float, ...]:
    """Ratio of micro acceptances with its 95 % interval; prompts and seeds are paired."""
    both = [[np.array([one[mode][key] for one in side]) for key in ("tokens", "passes")] for side in (ours, base)]
    random = np.random.RandomState(0)
    count, prompts = both[0][0].shape

    def ratio(s: np.ndarray, p: np.ndarray) -> float:
        at = np.ix_(s, p)
        rates = [side[0][at].sum() / max(1, side[1][at].sum()) for side in both]
        return float(rates[0] / rates[1])

    spread = [ratio(random.randint(0, count, count), random.randint(0, prompts, prompts)) for _ in range(draws)]
    low, high = np.percentile(spread, [2.5, 97.5])
    return ratio(np.arange(count), np.arange(prompts)), float(low), float(high)


def finished(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Results of every recipe by rising seed: the seeds alone that every recipe was given, where each has one.

    A seed that not every recipe had time for would make the comparison unequal.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("result-*.json")):
        one = json.loads(path.read_text())
        found.setdefault(one["recipe"], []).append(one)
    common = set.intersection(*({one["seed"] for one in found.get(name, [])} for name in RECIPES))
    return {
        name: sorted((one for one in found[name] if one["seed"] in common), key=lambda one: int(one["seed"]))
        for name in RECIPES
        if common
    }


def add_rows(rows: Rows, facts: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> None:
    """Rows of the target, and of every recipe, kind of prompt and mode that `finished` returned."""
    kinds = np.array(facts["kinds"])
    rows.add("ablation: target", facts["parameters"] / 1e6, "M parameters", peer="-", ratio=1.0, details=facts)
    if facts["held_out"]:
        accuracy = facts["held_out"]["assistant_accuracy"]
        name = "target of the ablation: held-out accuracy"
        peer = f"a usable target, {LEAST_ACCURACY}"
        rows.add(name, accuracy, "share of tokens", peer=peer, ratio=accuracy / LEAST_ACCURACY, bar=1.0)
        repeated = max(facts["guard"]["repeated_4grams"], 1e-4)
        name = "target of the ablation: repeated 4-grams of its greedy texts"
        peer = f"a usable target, {MOST_REPEATED}"
        rows.add(name, repeated, "share of 4-grams", peer=peer, ratio=MOST_REPEATED / repeated, bar=1.0)
    if not runs:
        return
    rows.add("ablation: seeds of every recipe", len(runs[BASELINE]), "seeds", peer="-", ratio=1.0)
    for recipe in runs:
        acceptances = {mode: add_recipe(rows, runs, recipe, mode, kinds) for mode in ("chain", "tree")}
        rows.add(
            f"ablation: {recipe}, drafts accepted a pass by the tree",
            acceptances["tree"] - 1,
            "drafts a pass",
            peer="chain",
            ratio=(acceptances["tree"] - 1) / max(1e-9, acceptances["chain"] - 1),
            bar=1.25,
        )


def add_recipe(rows: Rows, runs: dict[str, list[dict[str, Any]]], recipe: str, mode: str, kinds: np.ndarray) -> float:
    """One row; returns the acceptance."""
    own = runs[recipe]
    value, low, high = bootstrap(own, mode, np.arange(len(kinds)))
    ratio, worst, best = gain(own, runs[BASELINE], mode)
    details = {
        "interval": [low, high],
        "ratio_interval": [worst, best],
        "seeds": [sum(one[mode]["tokens"]) / sum(one[mode]["passes"]) for one in own],
        "identical": [one[mode]["identical"] for one in own],
        "prompts": len(kinds),
        "tokens_seen": own[0]["tokens_seen"],
        "loss": [one["loss"] for one in own],
        "train_s": [one["train_s"] for one in own],
        "kinds": {str(kind): bootstrap(own, mode, np.flatnonzero(kinds == kind)) for kind in dict.fromkeys(kinds)},
    }
    bar = 1.1 if mode == "chain" and recipe.startswith("kl-streak") else None
    rows.add(
        f"ablation: {recipe}, {mode}", value, "tokens a pass", peer=BASELINE, ratio=ratio, bar=bar, details=details
    )
    return value
