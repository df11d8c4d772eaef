from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_report import make_report

from drafthouse.errors import DrafthouseError
from drafthouse.measure import ReportError, parse_report

OPTIONAL = {
    "wall_clock",
    "peak_memory_bytes",
    "samples",
    "corpus.drops",
    "shards.killed_worker",
    "shards.table.0.seconds",
    "wall_clock.modes.chain",
    "wall_clock.modes.tree",
}
OPTIONAL_NAMES = {"acceptance", "accuracy", "lr", "noise", "by_budget"}
# free-form: their keys are the writer's
FREE = {
    "machine",
    "versions",
    "seeds",
    "config",
    "recipe",
    "seconds",
    "kinds",
    "by_kind",
    "drops",
    "by_budget",
    "runs",
}


def _required(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of keys that the contract requires; of a list only its first item is walked."""
    if isinstance(value, dict):
        for key, below in value.items():
            here = (*path, key)
            free = bool(path) and path[-1] in FREE
            leaf_optional = len(here) > 1 and key in OPTIONAL_NAMES and not free
            if ".".join(map(str, here)) not in OPTIONAL and not free and not leaf_optional:
                yield here
            if key not in {"machine", "versions", "seeds", "config", "recipe"}:
                yield from _required(below, here)
    elif isinstance(value, list) and value:
        yield from _required(value[0], (*path, 0))


REQUIRED = sorted({*_required(make_report()), ("seconds", "total")}, key=str)


def test_walk_found_the_contract() -> None:
    named = {".".join(map(str, path)) for path in REQUIRED}
    assert {
        "verdict",
        "shards.table.0.sha256",
        "acceptance.ours.tree.per_position",
        "target.exact_match",
    } <= named
    assert len(REQUIRED) > 120


@pytest.mark.parametrize("path", REQUIRED, ids=lambda path: ".".join(map(str, path)))
def test_a_missing_required_key_is_named(path: tuple[Any, ...]) -> None:
    report = make_report()
    node: Any = report
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    with pytest.raises(ReportError) as caught:
        parse_report(report)
    assert f"lacks the key '{'.'.join(map(str, path))}'" in str(caught.value)
    assert isinstance(caught.value, DrafthouseError)
    assert "\n" not in str(caught.value)


def test_the_double_is_a_valid_report(report: dict[str, Any]) -> None:
    parsed = parse_report(report)
    assert list(parsed.seconds.steps) == ["corpus", "generate", "extract", "train", "evaluate"]
    assert parsed.acceptance["ours"].tree.budget == 16


def test_optional_sections_may_be_absent(report: dict[str, Any]) -> None:
    for key in ("wall_clock", "peak_memory_bytes", "samples"):
        del report[key]
    parsed = parse_report(report)
    assert parsed.wall_clock is None
    assert parsed.samples == []


def test_leaves_accept_more_and_structure_does_not(report: dict[str, Any]) -> None:
    report["target"]["perplexity"] = 1.78
    report["shards"]["table"][0]["host"] = "n1"
    parse_report(report)
    report["wall_clok"] = {}
    with pytest.raises(ReportError, match="unknown key 'wall_clok'"):
        parse_report(report)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("target.exact_match", 71.1, "'target.exact_match'"),
        ("seconds.train", -1.0, "'seconds.train'"),
        ("seconds.train", "long", "'seconds.train'"),
        ("created", "yesterday", "'created'"),
        ("acceptance.ours.chain.per_position", [0.5, 0.6], "cannot grow with k"),
        (
            "acceptance.ours.tree.by_budget",
            {"many": {"micro": 2.0, "macro": 2.0}},
            "by_budget has the key 'many'",
        ),
        ("acceptance_length.ours.chain", 9.0, "'acceptance_length.ours.chain' is 9 but"),
        ("identical.tree", 255, "'greedy_identical' is true"),
        ("samples.0.runs.ours/chain.tokens.0.source", "guess", "'samples.0.runs.ours/chain.tokens.0.source'"),
        ("training.ours.curve", [], "'training.ours.curve'"),
        ("wall_clock.modes.chain.seconds", 0, "'wall_clock.modes.chain.seconds'"),
        ("training.ours.recipe.gamma", math.nan, "'training.ours.recipe.gamma' is nan"),
        ("peak_memory_bytes", np.int64(5), "'peak_memory_bytes' is a numpy.int64"),
        ("config.path", Path("a"), "'config.path' is a pathlib"),
        ("config.table", {3: "x"}, "has the key 3, which is not text"),
        ("samples.0.prompt", "half \ud83d", "'samples.0.prompt' holds half of a character"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_its_path(report: dict[str, Any], path: str, value: Any, words: str) -> None:
    node: Any = report
    *parents, last = path.split(".")
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[int(last) if isinstance(node, list) else last] = value
    with pytest.raises(ReportError) as caught:
        parse_report(report)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rounded_headline_agrees(report: dict[str, Any]) -> None:
    for lengths in report["acceptance_length"].values():
        for mode in lengths:
            lengths[mode] = round(lengths[mode], 2)
    parse_report(report)


def test_both_drafters_are_needed(report: dict[str, Any]) -> None:
    del report["training"]["baseline"]
    with pytest.raises(ReportError, match=r"lacks the key 'training\.baseline'"):
        parse_report(report)
