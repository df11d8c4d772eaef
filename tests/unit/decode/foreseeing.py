"""A test double of the drafter's context that knows the target's greedy text, or nearly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from drafthouse.decode import generate
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.target import Target


class ForeseeingContext:
    """Stands where `DraftContext` stands; most of the mass of every position is on the text's own token.

    Args:
        texts: prompt and continuation of every row, in the order of the batch.
        ranks: for every row and absolute position, how many other tokens come before the right one.
    """

    def __init__(self, texts: list[list[int]], ranks: list[list[int]], vocab: int, depth: int) -> None:
        self.texts, self.ranks, self.vocab, self.depth = texts, ranks, vocab, depth
        self.lengths = torch.zeros(len(texts), dtype=torch.int64)

    def select(self, rows: Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]
        self.ranks = [self.ranks[row] for row in rows.tolist()]
        self.lengths = self.lengths[rows]

    def extend(self, taps: Tensor, path: Tensor, counts: Tensor) -> None:
        assert taps.shape[0] == path.shape[0] == counts.shape[0] == len(self.texts)
        self.lengths = self.lengths + counts

    def propose(self, last: Tensor) -> Tensor:
        scores = torch.zeros(len(self.texts), self.depth, self.vocab)
        for row, (text, ranks, length) in enumerate(zip(self.texts, self.ranks, self.lengths.tolist(), strict=True)):
            for step in range(self.depth):
                place = length + 1 + step
                if place < len(text):
                    scores[row, step, text[place]] = 6.0
                    for other in range(ranks[place]):
                        scores[row, step, (text[place] + 1 + other) % self.vocab] = 7.0 + other
        return scores.log_softmax(-1)


def foresee(
    monkeypatch: pytest.MonkeyPatch,
    prompts: Sequence[np.ndarray],
    references: Sequence[Sequence[int]],
    ranks: Sequence[Sequence[int]] | None = None,
) -> None:
    """Let `decode` draft with the references; all prompts must fit one batch.

    Args:
        ranks: of each token of each reference; none: always right.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))

    def make(drafter: DFlashDrafter, target: Target, rows: int, capacity: int) -> ForeseeingContext:
        assert rows == len(order)
        assert capacity > max(len(prompt) for prompt in prompts)
        texts = [[*prompts[i].tolist(), *references[i]] for i in order]
        by_place = [
            [0] * len(prompts[i]) + list(ranks[i] if ranks is not None else [0] * len(references[i])) for i in order
        ]
        return ForeseeingContext(texts, by_place, target.vocab_size, drafter.config.block_size - 1)

    monkeypatch.setattr(generate, "DraftContext", make)


def chain_passes(ranks: Sequence[int], tokens: int, block: int) -> int:
    """Target passes that a chain needs for `tokens` tokens when drafts of rank 0 are the right ones."""
    done, passes = 1, 0
    while done < tokens:
        accepted = 0
        while accepted < block - 1 and done + accepted < tokens and ranks[done + accepted] == 0:
            accepted += 1
        done, passes = done + accepted + 1, passes + 1
    return passes
