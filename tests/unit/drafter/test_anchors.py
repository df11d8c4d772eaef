"""Where blocks start and what they are fed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthouse.drafter.anchors import block_tokens, draw_anchors, generator_for, valid_anchors


def test_an_anchor_and_its_successor_are_supervised() -> None:
    #                     prompt  answer    user  answer
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0, 0, 0, 0, 1]])
    valid = valid_anchors(mask)
    # 3 is the first generated token: its context is exactly the prompt. 2, the last prompt token, is no
    # anchor.
    assert valid[0].nonzero().flatten().tolist() == [3, 4, 8]
    assert not valid[1].any()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=12, max_size=12), min_size=1, max_size=4),
    count=st.integers(1, 15),
    step=st.integers(0, 99),
)
def test_draws_are_distinct_valid_sorted_and_padded(rows: list[list[int]], count: int, step: int) -> None:
    mask = torch.tensor(rows)
    drawn = draw_anchors(mask, count, generator_for(7, step, "anchors"))
    assert drawn.shape == (len(rows), count)
    for row, valid in zip(drawn.tolist(), valid_anchors(mask), strict=True):
        possible = set(valid.nonzero().flatten().tolist())
        real = [a for a in row if a >= 0]
        assert row == real + [-1] * (count - len(real))
        assert real == sorted(set(real))
        assert set(real) <= possible
        assert len(real) == min(count, len(possible))


def test_every_document_gets_its_own_share() -> None:
    """A long document beside a short one does not take the short one's anchors."""
    mask = torch.zeros(2, 200, dtype=torch.int64)
    mask[0] = 1
    mask[1, :9] = 1
    drawn = draw_anchors(mask, 8, generator_for(0, 0, "anchors"))
    assert (drawn >= 0).all()
    assert drawn[1].tolist() == list(range(8))


def test_draws_follow_seed_and_step_only() -> None:
    mask = torch.ones(2, 50)
    torch.manual_seed(1)
    first = draw_anchors(mask, 6, generator_for(3, 11, "anchors"))
    torch.manual_seed(2)
    assert torch.equal(first, draw_anchors(mask, 6, generator_for(3, 11, "anchors")))
    assert not torch.equal(first, draw_anchors(mask, 6, generator_for(3, 12, "anchors")))
    assert not torch.equal(first, draw_anchors(mask, 6, generator_for(4, 11, "anchors")))


def test_draws_are_uniform() -> None:
    mask = torch.ones(1, 11)
    counts = torch.zeros(11)
    for step in range(2000):
        counts[draw_anchors(mask, 3, generator_for(0, step, "anchors"))[0]] += 1
    assert counts[10] == 0
    expected = 2000 * 3 / 10
    assert float(((counts[:10] - expected) ** 2 / expected).sum()) < 30  # chi-square, 9 degrees of freedom


def test_blocks_hold_the_anchor_token_and_masks() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    tokens = block_tokens(ids, torch.tensor([[0, 3, -1]]), 3, 99)
    assert tokens.tolist() == [[[5, 99, 99], [8, 99, 99], [99, 99, 99]]]
