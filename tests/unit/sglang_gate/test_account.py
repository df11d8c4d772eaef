from __future__ import annotations

import math

import pytest
import torch
from sglang_gate import account

from drafthouse.decode import decode
from tests.unit.decode.pairs import NEW_TOKENS, Pair, make_pair
from tests.unit.target.tiny_models import hybrid


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(hybrid, seed=0)


def test_passes_over_our_own_text_are_those_of_decoding_it(pair: Pair) -> None:
    decoded = decode(pair.stepper, pair.drafter, pair.prompts, pair.settings("chain"))
    rounds = account.replayed(pair.stepper, pair.drafter, pair.prompts, [text.tokens for text in decoded])
    assert rounds == [text.rounds for text in decoded]
    assert max(map(max, rounds)) > 1


def test_a_foreign_text_costs_passes_where_it_leaves_ours(pair: Pair) -> None:
    own = [list(text) for text in pair.references]
    other = [[*text[:6], *((token + 1) % 90 for token in text[6:])] for text in own]
    rounds = account.replayed(pair.stepper, pair.drafter, pair.prompts, other)
    assert [sum(each) for each in rounds] == [NEW_TOKENS - 1] * len(own)
    kept = account.replayed(pair.stepper, pair.drafter, pair.prompts, own)
    assert sum(map(len, rounds)) > sum(map(len, kept))


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)]
)
def test_the_first_difference(one: list[int], other: list[int], place: int | None) -> None:
    assert account.first_difference(one, other) == place


def test_a_parting_tells_how_close_the_tokens_were(pair: Pair) -> None:
    prompt, text = pair.prompts[0], pair.references[0]
    ids = torch.tensor([[*prompt.tolist(), *text[:5]]])
    logits = pair.target.model(input_ids=ids).logits[0, -1].float()
    second = int(logits.topk(2).indices[1])
    found = account.parting(pair.target, prompt, text, [*text[:5], second, *text[6:]])
    assert found is not None
    assert found.place == 5
    assert found.gap == pytest.approx(float(logits[text[5]] - logits[second]), abs=1e-4)
    step = 2.0 ** (math.floor(math.log2(float(logits[text[5]].abs().maximum(logits[second].abs())))) - 7)
    assert found.steps == pytest.approx(found.gap / step)
    assert account.parting(pair.target, prompt, text, text) is None


def test_a_text_that_ends_early_is_no_tie(pair: Pair) -> None:
    found = account.parting(pair.target, pair.prompts[0], [5, 6, 7], [5, 6])
    assert found is not None
    assert not found.near_tie
