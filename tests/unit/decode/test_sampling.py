"""Sampled text has the target's own distribution in every mode, whatever the drafter thinks.

A target of eight tokens, so that every text of four tokens can be given its exact probability, and some
thousand rows of one prompt. Chi-square with fixed seeds; the drafter's tastes differ from the target's.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import stats

from drafthouse.decode import Generation, Stepper, decode
from drafthouse.decode.generate import DecodeSettings, Mode
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.target import Target
from tests.unit.decode.pairs import drafter_config
from tests.unit.target.tiny_models import dense, hybrid, randomise

VOCAB, LENGTH, ROWS = 8, 4, 4000
PROMPT = [1, 4, 2]
MAKERS = {"hybrid": hybrid, "dense": dense}


@cache
def small_target(kind: str) -> Target:
    return Target(MAKERS[kind](3, vocab_size=VOCAB, eos_token_id=None, hidden_size=16))


@cache
def reference_logits(kind: str) -> torch.Tensor:
    """Transformers' logits after the prompt and after all but the last token of each text, in text order."""
    ids = torch.tensor([[*PROMPT, *text] for text in product(range(VOCAB), repeat=LENGTH - 1)])
    with torch.no_grad():
        return cast(torch.Tensor, cast(Any, small_target(kind).model)(input_ids=ids).logits[:, len(PROMPT) - 1 :])


def probabilities(kind: str, temperature: float) -> np.ndarray:
    """Exact probability of every text of `LENGTH` tokens after the prompt `[VOCAB] * LENGTH`."""
    steps = (reference_logits(kind) / temperature).double().softmax(-1)
    texts = torch.tensor(list(product(range(VOCAB), repeat=LENGTH)))
    beginnings = torch.arange(len(texts)) // VOCAB
    chances = [steps[beginnings, place, texts[:, place]] for place in range(LENGTH)]
    return torch.stack(chances).prod(0).reshape((VOCAB,) * LENGTH).numpy()


@cache
def sampled(kind: str, mode: Mode, temperature: float) -> list[Generation]:
    target = small_target(kind)
    config = drafter_config(target, block_size=4, mask_token_id=VOCAB - 1)
    drafter = DFlashDrafter(config)
    randomise(drafter, 1)
    settings = DecodeSettings(mode=mode, budget=7, max_new_tokens=LENGTH, temperature=temperature, rows=ROWS, seed=17)
    asked = [np.array(PROMPT)] * ROWS
    return decode(Stepper(target, config.target_layer_ids), drafter, asked, settings)


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts against probabilities; cells of fewer than five expected counts are merged."""
    wanted = expected.flatten() * observed.sum()
    rare = wanted < 5
    counts = np.append(observed.flatten()[~rare], observed.flatten()[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    kept = wanted > 0
    assert kept.sum() >= 4
    return float(stats.chisquare(counts[kept], wanted[kept] * counts.sum() / wanted[kept].sum()).pvalue)


def counts_of(generations: list[Generation], places: tuple[int, ...]) -> np.ndarray:
    tokens = np.array([generation.tokens for generation in generations])
    counts = np.zeros((VOCAB,) * len(places))
    np.add.at(counts, tuple(tokens[:, place] for place in places), 1)
    return counts


def marginal(kind: str, temperature: float, places: tuple[int, ...]) -> np.ndarray:
    others = tuple(place for place in range(LENGTH) if place not in places)
    return cast(np.ndarray, probabilities(kind, temperature).sum(axis=others))


MODES = [("hybrid", "autoregressive"), ("hybrid", "chain"), ("hybrid", "tree"), ("dense", "tree")]


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_tokens_and_pairs_of_tokens_are_the_targets_own(kind: str, mode: Mode) -> None:
    generations = sampled(kind, mode, 1.0)
    for places in ((0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3), (1, 3)):
        p = p_value(counts_of(generations, places), marginal(kind, 1.0, places))
        assert p > 1e-3, (places, p)


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_whole_texts_are_the_targets_own(mode: Mode) -> None:
    generations = sampled("hybrid", mode, 1.0)
    assert p_value(counts_of(generations, (0, 1, 2, 3)), probabilities("hybrid", 1.0)) > 1e-3


def test_other_temperatures_are_met_too() -> None:
    generations = sampled("hybrid", "tree", 0.6)
    for places in ((1,), (1, 2), (2, 3)):
        assert p_value(counts_of(generations, places), marginal("hybrid", 0.6, places)) > 1e-3


def test_the_test_would_see_a_difference() -> None:
    """Drafts that are accepted or emitted by their own taste shift the distribution at least this far."""
    generations = sampled("hybrid", "tree", 1.0)
    assert p_value(counts_of(generations, (1, 2)), marginal("hybrid", 0.85, (1, 2))) < 1e-9
    drafted = [g for g in generations if g.drafted[0] > 0]
    assert p_value(counts_of(drafted, (1,)), marginal("hybrid", 1.0, (1,))) < 1e-9


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_drafts_are_accepted_and_rejected(mode: Mode) -> None:
    first = [generation.drafted[0] for generation in sampled("hybrid", mode, 1.0)]
    accepted = np.bincount(first, minlength=4) / ROWS
    assert accepted[0] > 0.1
    assert accepted[1] > 0.03
    assert accepted[2:].sum() > 0.003
