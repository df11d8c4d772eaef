"""From what the steps left in the run folder to `report.json` and `report.html`."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafthouse.config import digest_of
from drafthouse.corpus import CorpusReader
from drafthouse.drafter.metrics import read_metrics
from drafthouse.errors import ConfigError
from drafthouse.loop.folder import RunFolder
from drafthouse.loop.steps import ANSWERS, CORPUS, STATES, drafter_config, load_trained, wall_clock
from drafthouse.loop.tiny import EMBEDDED
from drafthouse.measure import collect_machine, write_report
from drafthouse.states import StatesReader
from drafthouse.store import Board
from drafthouse.target import Target

# Slot accuracies are means over this many of the last logged batches: one batch has too few blocks.
LAST_LOGGED = 10


def make_report(run: RunFolder, target: Target, facts: dict[str, Any]) -> tuple[Path, Path]:
    """Write report.json and report.html.

    Args:
        facts: what only the caller knows: `machine` (taken before the work), `command`, `killed_worker`,
            `peak_memory_bytes`.

    Raises:
        ConfigError: a step has not been run yet.
    """
    return write_report(assemble(run, target, facts), run.path)


def assemble(run: RunFolder, target: Target, facts: dict[str, Any]) -> dict[str, Any]:
    """The content of report.json."""
    names = list(run.settings.train)
    evaluations = {name: _result(run, f"evaluation-{name}") for name in names}
    first = evaluations[names[0]]
    machine = facts.get("machine") or collect_machine()
    config = run.settings.model_dump(mode="json")
    lengths = {name: {mode: evaluations[name]["modes"][mode]["micro"] for mode in ("chain", "tree")} for name in names}
    identical = {mode: min(e["identical"][mode] for e in evaluations.values()) for mode in ("chain", "tree")}
    seconds = run.read("seconds") or {}
    report = {
        "name": run.settings.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {key: value for key, value in machine.items() if key != "versions"},
        "versions": machine["versions"],
        "seeds": _seeds(run),
        "command": facts.get("command", "drafthouse report"),
        "config": config,
        "config_digest": digest_of(config),
        "seconds": {**seconds, "total": round(sum(seconds.values()), 2)},
        "corpus": _corpus(run),
        "target": _target(run, target, first["guard"]),
        "shards": _shards(run, facts.get("killed_worker")),
        "training": {name: _training(run, target, name) for name in names},
        "acceptance_length": lengths,
        "acceptance": {name: evaluations[name]["modes"] for name in names},
        "autoregressive": first["autoregressive"],
        "greedy_identical": min(identical.values()) == first["prompts"],
        "identical": {"prompts": first["prompts"], **identical},
        "wall_clock": wall_clock(run, target),
        "samples": _samples(evaluations),
        "verdict": verdict(lengths, identical, first["prompts"]),
    }
    if facts.get("peak_memory_bytes"):
        report["peak_memory_bytes"] = facts["peak_memory_bytes"]
    return report


def verdict(lengths: dict[str, dict[str, float]], identical: dict[str, int], prompts: int) -> str:
    """One honest sentence: who accepts more, and whether the texts are the target's own."""
    ours, base = lengths["ours"], lengths["baseline"]
    gain = ours["chain"] / base["chain"] - 1
    word = "more" if gain > 0 else "fewer"
    text = (
        f"Our recipe accepts {ours['chain']:.2f} tokens a target pass as a chain and {ours['tree']:.2f} as a"
        f" tree, {abs(gain):.0%} {word} than the baseline recipe on the same tokens"
        f" ({base['chain']:.2f} and {base['tree']:.2f})"
    )
    same = min(identical.values())
    if same == prompts:
        return f"{text}; every greedy text is the target's own, token for token."
    return f"{text}; but {prompts - same} of {prompts} greedy texts differ from the target's own."


def _result(run: RunFolder, name: str) -> dict[str, Any]:
    found = run.read(name)
    if found is None:
        raise ConfigError(f"there is no {name}.json yet", where=str(run.path), fix="run `drafthouse evaluate` first")
    return found


def _seeds(run: RunFolder) -> dict[str, Any]:
    settings = run.settings
    return {
        "corpus": settings.corpus.seed,
        "answers": settings.answers.seed,
        "probe": settings.probe.seed,
        **{f"train.{name}": recipe.seed for name, recipe in settings.train.items()},
    }


def _corpus(run: RunFolder) -> dict[str, Any]:
    manifest = CorpusReader(run.store, ANSWERS).manifest
    asked = CorpusReader(run.store, CORPUS).manifest
    return {
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "kinds": {kind: count.model_dump() for kind, count in manifest.kinds.items()},
        "drops": asked.drops,
        "digest": manifest.digest,
    }


def _target(run: RunFolder, target: Target, guard: dict[str, Any]) -> dict[str, Any]:
    path = run.settings.target.path
    name = "embedded small hybrid" if path == EMBEDDED else Path(path).name
    return {
        "name": "trained from scratch" if run.settings.target.from_scratch else name,
        "identity": target.identity,
        "parameters": target.parameters,
        "layer_types": target.layer_types,
        **guard,
    }


def _shards(run: RunFolder, killed_worker: str | None) -> dict[str, Any]:
    """Counted from what a reader sees, not from what workers said."""
    expected = CorpusReader(run.store, ANSWERS)
    done = {marker.shard: marker for marker in Board(run.store, STATES).all_done()}
    reader = StatesReader(run.store, STATES, allow_incomplete=True)
    seen = Counter(reader.sample(index).id for index in range(len(reader)))
    owners = {sample.id: name for name in expected.shard_names for sample in expected.shard(name)}
    lost = {owner for sample, owner in owners.items() if seen[sample] == 0}
    duplicated = {owners[sample] for sample, count in seen.items() if count > 1 and sample in owners}
    rows = [done[name] for name in expected.shard_names if name in done]
    return {
        "expected": len(expected.shard_names),
        "committed": len(rows),
        "lost": len(lost),
        "duplicated": len(duplicated),
        "redone": sum(row.epoch > 1 for row in rows),
        "killed_worker": killed_worker,
        "table": [
            {
                "shard": row.shard,
                "samples": row.extra["samples"],
                "tokens": row.tokens,
                "bytes": row.size,
                "worker": row.worker,
                "epoch": row.epoch,
                "seconds": row.extra.get("capture_s"),
                "sha256": row.sha256,
                "redone": row.epoch > 1,
            }
            for row in rows
        ],
    }


def _training(run: RunFolder, target: Target, name: str) -> dict[str, Any]:
    recipe = run.settings.train[name]
    rows = read_metrics(run.drafter_path(name) / "metrics.jsonl")
    acceptance = {row["step"]: row["evaluation"]["acceptance"] for row in rows if "evaluation" in row}
    logged = [row for row in rows if "loss" in row]
    curve: list[dict[str, Any]] = []
    for row in logged:
        point = {
            "step": row["step"],
            "tokens": row["tokens"],
            "loss": row["loss"],
            "accuracy": float(np.mean(row["accuracy"])),
            "lr": row["lr"],
            "noise": row["noise"],
        }
        if row["step"] in acceptance:
            point["acceptance"] = acceptance[row["step"]]
        curve.append(point)
    slots = np.mean([row["accuracy"] for row in logged[-LAST_LOGGED:]], axis=0)
    return {
        "label": name,
        "recipe": _recipe(recipe.model_dump(mode="json")),
        "parameters": sum(p.numel() for p in load_trained(run, target, name).parameters()),
        "steps": logged[-1]["step"],
        "tokens": logged[-1]["tokens"],
        "curve": curve,
        "slot_accuracy": [round(float(value), 4) for value in slots],
        "taps": list(drafter_config(run, target).target_layer_ids),
    }


def _recipe(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that make a recipe, as flat names."""
    flat: dict[str, Any] = {}
    for section in ("loss", "noise", "optimizer", "schedule"):
        for key, value in settings[section].items():
            if value is not None:
                flat[f"{section} {key}"] = value
    return flat | {key: settings[key] for key in ("rows", "anchors", "accumulate", "seed", "autocast")}


def _samples(evaluations: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The same prompts under every drafter, runs merged."""
    merged: dict[str, dict[str, Any]] = {}
    for evaluation in evaluations.values():
        for sample in evaluation["samples"]:
            there = merged.setdefault(sample["id"], {**sample, "runs": {}})
            there["runs"] |= sample["runs"]
    return list(merged.values())


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The few figures that a terminal or a script wants."""
    keys = ("acceptance_length", "greedy_identical", "seconds", "verdict")
    shards = {key: value for key, value in report["shards"].items() if key != "table"}
    guard = {key: report["target"][key] for key in ("exact_match", "repeated_4grams", "mean_top1_probability")}
    picked = {key: report[key] for key in keys}
    return {**picked, "shards": shards, "target": guard, "torch_threads": torch.get_num_threads()}
