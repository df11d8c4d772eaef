"""One evaluator for every drafter: the same prompts, decoded in every mode, texts compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from drafthouse.config import Settings
from drafthouse.decode.forward import Stepper
from drafthouse.decode.generate import DecodeSettings, Generation, decode
from drafthouse.decode.stats import acceptance, degeneracy_guard
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.progress import Progress
from drafthouse.target import Target


class Question(Protocol):
    """A held-out prompt: token ids up to the generation prompt, and the text that is right."""

    @property
    def id(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def reference(self) -> str: ...


class EvaluateSettings(Settings):
    """How drafters are evaluated."""

    budgets: tuple[int, ...] = Field((8, 16, 32), min_length=1, description="drafts of a tree, rising")
    budget: int = Field(16, description="the tree budget of the headline; one of `budgets`")
    max_new_tokens: int = Field(96, ge=1)
    rows: int = Field(32, ge=1, description="prompts decoded side by side")
    samples: int = Field(6, ge=0, description="prompts whose texts are kept for the report")
    wall_clock_prompts: int = Field(6, ge=1, description="prompts that are timed one by one")

    def decode_settings(self, **changes: Any) -> DecodeSettings:
        return DecodeSettings(max_new_tokens=self.max_new_tokens, rows=self.rows, **changes)


@dataclass
class Baseline:
    """The target alone: its greedy texts, which every other mode must reproduce."""

    generations: list[Generation]
    answers: list[str]
    guard: dict[str, Any]
    seconds: float


@dataclass
class Evaluation:
    """One drafter: statistics of each mode, and how many texts equal the target's own."""

    modes: dict[str, dict[str, Any]] = field(default_factory=dict)
    identical: dict[str, int] = field(default_factory=dict)
    generations: dict[str, list[Generation]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def answer_text(target: Target, tokens: Sequence[int]) -> str:
    """The text of an answer without its end-of-turn token, special tokens written out."""
    ends = set(target.eos_ids)
    kept = [token for token in tokens if token not in ends]
    return str(target.tokenizer.decode(kept, skip_special_tokens=False))


def evaluate_target(
    target: Target,
    questions: Sequence[Question],
    settings: EvaluateSettings,
    progress: Progress | None = None,
) -> Baseline:
    """Greedy autoregressive texts of the target, and the degeneracy guard over them."""
    began = time.perf_counter()
    generations = decode(
        Stepper(target),
        None,
        [question.input_ids for question in questions],
        settings.decode_settings(mode="autoregressive"),
        progress=progress,
    )
    seconds = time.perf_counter() - began
    answers = [answer_text(target, generation.tokens) for generation in generations]
    guard = degeneracy_guard(generations, answers, [q.reference for q in questions], [q.kind for q in questions])
    return Baseline(generations, answers, guard, seconds)


def evaluate_drafter(
    target: Target,
    drafter: DFlashDrafter,
    questions: Sequence[Question],
    baseline: Baseline,
    settings: EvaluateSettings,
    progress: Progress | None = None,
) -> Evaluation:
    """Chain, and trees of every budget; `tree` is the one of the headline budget."""
    result = Evaluation()
    stepper = Stepper(target, drafter.config.target_layer_ids)
    prompts = [question.input_ids for question in questions]
    kinds = [question.kind for question in questions]
    spine = drafter.config.block_size - 1
    plans = {"chain": settings.decode_settings(mode="chain")}
    for budget in sorted({max(budget, spine) for budget in (*settings.budgets, settings.budget)}):
        plans[f"tree/{budget}"] = settings.decode_settings(mode="tree", budget=budget)
    by_budget = {}
    for name, plan in plans.items():
        began = time.perf_counter()
        generations = decode(stepper, drafter, prompts, plan, progress=progress)
        seconds = time.perf_counter() - began
        stats = acceptance(generations, kinds, spine).as_dict()
        same = sum(a.tokens == b.tokens for a, b in zip(generations, baseline.generations, strict=True))
        if name != "chain":
            by_budget[str(plan.budget)] = {
                "micro": stats["micro"],
                "macro": stats["macro"],
                "identical": same,
            }
        if name == "chain" or plan.budget == max(settings.budget, spine):
            mode = name.split("/")[0]
            result.modes[mode] = stats if mode == "chain" else {**stats, "budget": plan.budget}
            result.generations[mode] = generations
            result.seconds[mode] = seconds
            result.identical[mode] = same
    # A text that differs under any budget is a difference of tree decoding.
    result.identical["tree"] = min(entry["identical"] for entry in by_budget.values())
    result.modes["tree"]["by_budget"] = by_budget
    return result
