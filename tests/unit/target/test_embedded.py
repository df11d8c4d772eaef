"""The small target that travels with the package: it is a real model, and it says how it was made."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from drafthouse.corpus import CorpusSettings, prompts, tokenizer_sha256
from drafthouse.decode.evaluate import Baseline, EvaluateSettings, evaluate_target
from drafthouse.target import Target
from drafthouse.target.adapter import identity_of
from tests.unit.target.short_run import EMBEDDED


@pytest.fixture(scope="module")
def embedded() -> Target:
    return Target.load(EMBEDDED)


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((EMBEDDED / "training.json").read_text(encoding="utf-8"))
    return kept


@pytest.fixture(scope="module")
def answered(embedded: Target, training: dict[str, Any]) -> Baseline:
    """Eight held-out prompts of each kind that it was trained on."""
    corpus = CorpusSettings.model_validate(training["corpus"] | {"heldout": 8})
    questions = prompts(corpus, embedded.tokenizer)
    assert len(questions) == 48
    return evaluate_target(embedded, questions, EvaluateSettings(rows=48))


def test_it_is_a_hybrid_of_about_a_million_parameters(embedded: Target, training: dict[str, Any]) -> None:
    assert embedded.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert embedded.parameters == training["parameters"] == 1_170_828
    assert (embedded.hidden_size, embedded.vocab_size) == (128, 1024)
    assert embedded.identity == identity_of(EMBEDDED)
    size = sum(file.stat().st_size for file in EMBEDDED.iterdir())
    assert size < 4 << 20


def test_its_tokenizer_knows_the_end_of_a_turn_and_an_unused_mask(embedded: Target) -> None:
    tokenizer = embedded.tokenizer
    assert embedded.eos_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert embedded.mask_token_id == tokenizer.convert_tokens_to_ids("<|mask|>")
    assert len(tokenizer) == embedded.vocab_size
    assert "<tool_call>" in tokenizer.chat_template


def test_it_answers_held_out_prompts(answered: Baseline) -> None:
    """At least 60 % of them exactly and without looping: what makes acceptance on it mean anything."""
    guard = answered.guard
    assert guard["exact_match"] >= 0.6
    assert guard["repeated_4grams"] < 0.3
    kinds = {kind: entry["exact_match"] for kind, entry in guard["by_kind"].items()}
    assert set(kinds) == {"tool_call", "tool_answer", "lookup", "repeat", "code", "docs"}
    assert min(kinds.values()) > 0.3, kinds
    assert guard["mean_top1_probability"] > 0.8


def test_its_answers_end_by_themselves(embedded: Target, answered: Baseline) -> None:
    ended = [generation.tokens[-1] in embedded.eos_ids for generation in answered.generations]
    assert sum(ended) >= 0.9 * len(ended)


def test_it_says_how_it_was_made(embedded: Target, training: dict[str, Any]) -> None:
    assert training["training"]["seed"] >= 0
    assert len(training["data_sha256"]) == 64
    assert training["tokenizer_sha256"] == tokenizer_sha256(embedded.tokenizer)
    assert training["command"].startswith("drafthouse target train-tiny")
    assert set(training["versions"]) >= {"torch", "transformers"}
    assert CorpusSettings.model_validate(training["corpus"]).samples == training["samples"]
    assert training["guard"]["exact_match"] >= 0.6


def test_its_loss_curve_begins_at_a_uniform_guess_and_ends_low(training: dict[str, Any]) -> None:
    curve = training["curve"]
    assert curve[0]["loss"] == pytest.approx(math.log(1024), abs=0.1)
    assert curve[-1]["step"] == training["training"]["steps"] - 1
    assert curve[-1]["tokens"] == training["tokens"]
    assert curve[-1]["assistant_loss"] < 0.1
    steps = [entry["step"] for entry in curve]
    assert steps == sorted(set(steps))
