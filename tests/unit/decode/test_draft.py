"""The drafter's memory while decoding: what it proposes must be what it would say about the bare text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafthouse.decode.draft import DraftContext
from drafthouse.drafter.model import DFlashDrafter
from tests.unit.decode.pairs import BLOCK, MASK, TAPS, Pair, drafter_config

NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def captured(pair: Pair, length: int, rows: int = 3) -> Tensor:
    """Taps `[rows, length, K, hidden]` of random texts."""
    ids = torch.randint(6, MASK, (rows, length), generator=torch.Generator().manual_seed(8))
    return pair.target.capture(ids, torch.full((rows,), length), TAPS)[:, :, :-1]


def proposed_anew(pair: Pair, taps: Tensor, last: int) -> Tensor:
    """Log-probabilities `[block - 1, vocab]` after `last`, by the training forward over one whole text."""
    length = taps.shape[0]
    block = torch.full((1, 1, BLOCK), MASK)
    block[0, 0, 0] = last
    hidden = pair.drafter(taps[None], pair.target.embed(block), torch.tensor([[length]]), torch.arange(length)[None])
    return pair.target.lm_head(hidden[0, 0, 1:]).log_softmax(-1)


def extend(context: DraftContext, taps: Tensor, counts: list[int]) -> None:
    path = torch.arange(taps.shape[1]).expand(taps.shape[:2])
    context.extend(taps, path, torch.tensor(counts))


def test_a_proposal_is_the_drafters_own_forward_over_the_text(pair: Pair) -> None:
    taps = captured(pair, 30)
    context = DraftContext(pair.drafter, pair.target, 3, 30)
    lengths = [30, 11, 1]
    extend(context, taps, lengths)
    last = torch.tensor([7, 8, 9])
    log_probs = context.propose(last)
    assert log_probs.shape == (3, BLOCK - 1, 97)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, BLOCK - 1))
    for row, length in enumerate(lengths):
        expected = proposed_anew(pair, taps[row, :length], int(last[row]))
        torch.testing.assert_close(log_probs[row], expected, **NEAR)


def test_context_grows_by_the_accepted_paths_alone(pair: Pair) -> None:
    """A prefill and two rounds of trees, of which each row accepts other nodes, one row none."""
    taps = captured(pair, 20)
    context = DraftContext(pair.drafter, pair.target, 3, 20)
    extend(context, taps[:, :6], [6, 3, 5])
    kept = [taps[0, :6], taps[1, :3], taps[2, :5]]
    for paths in ([[0, 2, 4], [0], []], [[0, 3], [0, 1, 2, 4], [0, 4]]):
        nodes = taps[:, 8:13]
        padded = torch.tensor([path + [0] * (5 - len(path)) for path in paths])
        context.extend(nodes, padded, torch.tensor([len(path) for path in paths]))
        kept = [torch.cat([old, nodes[row, path]]) for row, (old, path) in enumerate(zip(kept, paths, strict=True))]
    assert context.lengths.tolist() == [len(own) for own in kept] == [11, 8, 7]
    log_probs = context.propose(torch.tensor([7, 8, 9]))
    for row, own in enumerate(kept):
        torch.testing.assert_close(log_probs[row], proposed_anew(pair, own, 7 + row), **NEAR)


def test_extending_by_nothing_changes_nothing(pair: Pair) -> None:
    taps = captured(pair, 9)
    context = DraftContext(pair.drafter, pair.target, 3, 9)
    extend(context, taps, [9, 4, 2])
    before = context.propose(torch.tensor([7, 8, 9]))
    extend(context, taps, [0, 0, 0])
    assert torch.equal(context.propose(torch.tensor([7, 8, 9])), before)


def test_select_keeps_rows(pair: Pair) -> None:
    taps = captured(pair, 9)
    context = DraftContext(pair.drafter, pair.target, 3, 9)
    extend(context, taps, [9, 4, 2])
    before = context.propose(torch.tensor([7, 8, 9]))
    context.select(torch.tensor([2, 0]))
    assert context.lengths.tolist() == [2, 9]
    torch.testing.assert_close(context.propose(torch.tensor([9, 7])), before[[2, 0]], **NEAR)


def test_sliding_layers_see_the_same_window_as_in_training(hybrid_pair: Pair) -> None:
    config = drafter_config(hybrid_pair.target, layer_types=("sliding_attention", "full_attention"), sliding_window=4)
    drafter = DFlashDrafter(config)
    drafter.load_state_dict(hybrid_pair.drafter.state_dict())
    pair = Pair(hybrid_pair.target, drafter, [], [])
    taps = captured(pair, 12)
    context = DraftContext(drafter, pair.target, 3, 12)
    extend(context, taps, [12, 9, 2])
    log_probs = context.propose(torch.tensor([7, 8, 9]))
    for row, length in enumerate((12, 9, 2)):
        expected = proposed_anew(pair, taps[row, :length], 7 + row)
        torch.testing.assert_close(log_probs[row], expected, **NEAR)
    full = DraftContext(hybrid_pair.drafter, pair.target, 3, 12)
    extend(full, taps, [12, 9, 2])
    assert not torch.allclose(full.propose(torch.tensor([7, 8, 9]))[0], log_probs[0], atol=0.01)
