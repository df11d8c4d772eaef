"""The evaluator on the embedded target: every mode decodes the same prompts and must say the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from drafthouse.config import validate
from drafthouse.corpus import CorpusSettings, Prompt, prompts
from drafthouse.decode import DecodeSettings, Generation, decode, evaluate
from drafthouse.decode.evaluate import (
    Baseline,
    EvaluateSettings,
    Evaluation,
    answer_text,
    evaluate_drafter,
    evaluate_target,
)
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.errors import ConfigError
from drafthouse.target import Target
from tests.unit.decode.pairs import drafter_config
from tests.unit.target.short_run import EMBEDDED

SETTINGS = EvaluateSettings(budgets=(4, 10), budget=10, max_new_tokens=48, rows=6)


@dataclasses.dataclass
class Made:
    target: Target
    drafter: DFlashDrafter
    questions: list[Prompt]
    baseline: Baseline
    evaluation: Evaluation


@pytest.fixture(scope="module")
def made() -> Made:
    """A drafter with random weights: what is evaluated is the evaluator."""
    target = Target.load(EMBEDDED)
    questions = prompts(CorpusSettings(heldout=1, seed=5), target.tokenizer)
    drafter = DFlashDrafter(drafter_config(target, target_layer_ids=(0, 1, 3), block_size=8)).eval()
    baseline = evaluate_target(target, questions, SETTINGS)
    evaluation = evaluate_drafter(target, drafter, questions, baseline, SETTINGS)
    return Made(target, drafter, questions, baseline, evaluation)


def test_the_baseline_answers_in_text(made: Made) -> None:
    assert len(made.baseline.answers) == len(made.questions) == 6
    right = [a == q.reference for a, q in zip(made.baseline.answers, made.questions, strict=True)]
    assert made.baseline.guard["exact_match"] == round(sum(right) / 6, 4) >= 0.5
    assert not any("<|im_end|>" in answer for answer in made.baseline.answers)
    assert all(generation.rounds == [1] * (len(generation.tokens) - 1) for generation in made.baseline.generations)
    assert made.baseline.seconds > 0


def test_answers_keep_their_markup_and_lose_their_end(made: Made) -> None:
    ids = made.target.tokenizer.encode("<tool_call>\nx</tool_call>", add_special_tokens=False)
    assert answer_text(made.target, [*ids, *made.target.eos_ids]) == "<tool_call>\nx</tool_call>"


def test_every_mode_says_what_the_target_says(made: Made) -> None:
    evaluation = made.evaluation
    assert evaluation.identical == {"chain": 6, "tree": 6}
    assert set(evaluation.modes) == set(evaluation.generations) == set(evaluation.seconds) == {"chain", "tree"}
    for generations in evaluation.generations.values():
        assert [g.tokens for g in generations] == [g.tokens for g in made.baseline.generations]


def test_budgets_are_raised_to_the_spine_and_reported_each(made: Made) -> None:
    tree = made.evaluation.modes["tree"]
    assert set(tree["by_budget"]) == {"7", "10"}
    assert tree["budget"] == 10
    assert tree["by_budget"]["10"] == {"micro": tree["micro"], "macro": tree["macro"], "identical": 6}
    assert tree["by_budget"]["7"]["micro"] == made.evaluation.modes["chain"]["micro"]  # the spine alone
    assert set(tree["by_kind"]) == {question.kind for question in made.questions}
    assert len(tree["per_position"]) == 7


def test_a_text_that_differs_is_counted(made: Made) -> None:
    """Against a baseline with one token changed: one text fewer is identical in every mode."""
    changed = [dataclasses.replace(g, tokens=list(g.tokens)) for g in made.baseline.generations]
    changed[2].tokens[-2] += 1
    other = dataclasses.replace(made.baseline, generations=changed)
    settings = SETTINGS.model_copy(update={"budgets": (10,)})
    evaluation = evaluate_drafter(made.target, made.drafter, made.questions, other, settings)
    assert evaluation.identical == {"chain": 5, "tree": 5}


def test_a_difference_under_any_budget_is_one_of_the_tree(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tree is made to differ in one text; the headline budget is not."""

    def other(stepper: Any, drafter: Any, asked: Any, plan: DecodeSettings, **others: Any) -> list[Generation]:
        generations = decode(stepper, drafter, asked, plan, **others)
        if plan.mode == "tree" and plan.budget == 7:
            generations[0].tokens[0] += 1
        return generations

    monkeypatch.setattr(evaluate, "decode", other)
    evaluation = evaluate_drafter(made.target, made.drafter, made.questions, made.baseline, SETTINGS)
    by_budget = evaluation.modes["tree"]["by_budget"]
    assert {budget: entry["identical"] for budget, entry in by_budget.items()} == {"7": 5, "10": 6}
    assert evaluation.identical == {"chain": 6, "tree": 5}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"budgets": []}, "'budgets'"),
        ({"rows": 0}, "'rows': should be greater than or equal to 1"),
        ({"temperature": 1}, "unknown key 'temperature'"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate(EvaluateSettings, values, "evaluate")
