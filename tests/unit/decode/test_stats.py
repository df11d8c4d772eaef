"""Acceptance numbers of hand-made generations, and the guard against a target that babbles."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch

from drafthouse.corpus import CorpusSettings, GrammarSource, prompts
from drafthouse.decode import Generation
from drafthouse.decode.evaluate import EvaluateSettings, evaluate_target
from drafthouse.decode.stats import acceptance, degeneracy_guard, repeated_4grams
from drafthouse.target import Target
from tests.unit.target.short_run import EMBEDDED


def generation(rounds: list[int], drafted: list[int], top1: float = 0.5) -> Generation:
    tokens = list(range(1 + sum(rounds)))
    return Generation(tokens, rounds, drafted, [top1] * len(tokens))


LONG = generation([4, 1, 4, 3], [3, 0, 3, 3])  # ended by a draft
SHORT = generation([4], [3])
NONE = generation([], [])  # ended in its prefill


def test_acceptance_counts_tokens_over_target_passes() -> None:
    result = acceptance([LONG, SHORT, NONE], ["chat", "code", "code"], 4)
    assert (result.tokens, result.target_passes) == (16, 5)
    assert result.micro == pytest.approx(16 / 5)
    assert result.macro == pytest.approx((12 / 4 + 4 / 1) / 2)
    assert result.per_position == pytest.approx([0.8, 0.8, 0.8, 0.0])
    assert result.by_kind == {
        "chat": {"micro": 3.0, "prompts": 1, "tokens": 12, "target_passes": 4},
        "code": {"micro": 4.0, "prompts": 2, "tokens": 4, "target_passes": 1},
    }


def test_shares_by_position_fall() -> None:
    result = acceptance([generation([1, 2, 3, 1], [0, 1, 2, 0])], ["chat"], 3)
    assert result.per_position == [0.5, 0.25, 0.0]
    assert result.as_dict() == {
        "micro": 1.75,
        "macro": 1.75,
        "tokens": 7,
        "target_passes": 4,
        "per_position": [0.5, 0.25, 0.0],
        "by_kind": {"chat": {"micro": 1.75, "prompts": 1, "tokens": 7, "target_passes": 4}},
    }


def test_autoregressive_text_has_acceptance_one() -> None:
    result = acceptance([generation([1] * 9, [0] * 9)], ["chat"], 2)
    assert (result.micro, result.macro, result.per_position) == (1.0, 1.0, [0.0, 0.0])


def test_nothing_decoded_is_nothing_accepted() -> None:
    for generations, kinds in (([], []), ([NONE], ["chat"])):
        result = acceptance(generations, kinds, 2)
        assert (result.micro, result.macro, result.per_position) == (0.0, 0.0, [0.0, 0.0])


def test_a_kind_is_needed_for_every_text() -> None:
    with pytest.raises(ValueError, match="zip"):
        acceptance([LONG, SHORT], ["chat"], 4)


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ([[1, 2, 3, 4, 5, 6]], 0.0),
        ([[1] * 13], 0.9),  # ten 4-grams, all the same
        ([[1, 2, 3, 4, 1, 2, 3, 4]], 0.2),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.0),  # each text for itself
        ([[1, 2, 3]], 0.0),
        ([], 0.0),
    ],
)
def test_repeated_4grams(texts: list[list[int]], share: float) -> None:
    assert repeated_4grams(texts) == pytest.approx(share)


def test_the_guard_of_hand_made_answers() -> None:
    generations = [generation([3], [2], 0.9), generation([7], [6], 0.3)]
    assert degeneracy_guard(generations, ["a", "b"], ["a", "c"], ["chat", "code"]) == {
        "exact_match": 0.5,
        "repeated_4grams": 0.0,
        "mean_top1_probability": 0.5,
        "by_kind": {
            "chat": {"prompts": 1, "exact_match": 1.0},
            "code": {"prompts": 1, "exact_match": 0.0},
        },
    }


@pytest.fixture(scope="module")
def learned() -> Target:
    return Target.load(EMBEDDED)


def guard_of(target: Target) -> dict[str, Any]:
    corpus = CorpusSettings(sources=(GrammarSource(kind="repeat"),), heldout=4)
    questions = prompts(corpus, target.tokenizer)
    return evaluate_target(target, questions, EvaluateSettings(rows=4, max_new_tokens=40)).guard


def test_the_guard_tells_a_babbling_target_from_a_learned_one(learned: Target) -> None:
    """With one favourite token any drafter would look good: nothing is answered and everything repeats."""
    babbling = Target(copy.deepcopy(learned.model), learned.tokenizer)
    with torch.no_grad():
        cast(Any, babbling.model).lm_head.weight.zero_()
    guard = guard_of(babbling)
    assert guard["exact_match"] == 0.0
    assert guard["repeated_4grams"] > 0.9
    assert guard["mean_top1_probability"] == pytest.approx(1 / 1024, rel=0.1)
    good = guard_of(learned)
    assert good["exact_match"] >= 0.75
    assert good["repeated_4grams"] < 0.2
