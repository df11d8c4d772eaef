"""Our own account of what a server did: passes over its text, and how close the call was where two texts part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafthouse.decode import Stepper, proposal
from drafthouse.decode.draft import DraftContext
from drafthouse.drafter import DFlashDrafter
from drafthouse.target import Target

# Two kernels may order two tokens differently when their logits lie this many bfloat16 steps apart: one step is the
# rounding of each logit, the others what the layers before have rounded.
TIE_STEPS = 4


@dataclass(frozen=True)
class Parting:
    """The first place where two greedy texts differ.

    Attributes:
        place: index into the texts.
        gap: logit of the one token less that of the other, by our float32 pass over the common prefix; absolute.
        steps: the same in steps of bfloat16 at that size.
    """

    place: int
    gap: float
    steps: float

    @property
    def near_tie(self) -> bool:
        return self.steps <= TIE_STEPS


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; a text that ends early differs at its end. None: equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


@torch.no_grad()
def parting(target: Target, prompt: np.ndarray, one: Sequence[int], other: Sequence[int]) -> Parting | None:
    """Where two texts of a prompt part and how close the two tokens were; None: they are equal.

    A text that is the beginning of the other has no second token to compare: its gap is infinite.
    """
    place = first_difference(one, other)
    if place is None:
        return None
    if place >= min(len(one), len(other)):
        return Parting(place, math.inf, math.inf)
    ids = torch.tensor([[*prompt.tolist(), *one[:place]]], device=target.device)
    hidden = target.capture(ids, torch.tensor([ids.shape[1]]), ())[:, -1, -1]
    logits = target.lm_head(target.final_norm(hidden)).float()[0]
    first, second = float(logits[one[place]]), float(logits[other[place]])
    step = 2.0 ** (math.floor(math.log2(max(abs(first), abs(second), 1e-6))) - 7)
    return Parting(place, abs(first - second), abs(first - second) / step)


@torch.no_grad()
def replayed(
    stepper: Stepper, drafter: DFlashDrafter, prompts: Sequence[np.ndarray], texts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Tokens of each pass with which a chain of drafts would have come to the given texts.

    As `drafthouse.decode` in mode chain, but the target's tokens are those of the text: what another engine's rounding
    did to the text does not count, what the drafter proposes does.

    Args:
        prompts: ids `[length]`.
        texts: generated ids, the first of them from prefill.
    """
    rows, device = len(prompts), stepper.target.device
    longest, most, block = max(map(len, prompts)), max(map(len, texts)), drafter.config.block_size
    tokens = torch.zeros(rows, longest, dtype=torch.int64)
    told = torch.full((rows, most + block), -1, dtype=torch.int64)  # no draft equals -1: nothing follows the end
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        tokens[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        told[row, : len(text)] = torch.tensor(list(text))
    tokens, told = tokens.to(device), told.to(device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ends = torch.tensor([len(text) for text in texts], device=device)
    capacity = longest + most + block
    state = stepper.new_state(rows, capacity)
    _, taps = stepper.prefill(state, tokens, lengths)
    context = DraftContext(drafter, stepper.target, rows, capacity)
    context.extend(taps, torch.arange(longest, device=device).expand(rows, longest), lengths)
    done = torch.ones(rows, dtype=torch.int64, device=device)
    rounds: list[list[int]] = [[] for _ in texts]
    row_index = torch.arange(rows, device=device)
    while bool((done < ends).any()):
        last = told[row_index, done - 1].clamp_min(0)
        offer = proposal.chain(last, context.propose(last))
        passed = stepper.forward(state, offer.tokens, offer.topology)
        ahead = done.unsqueeze(1) + torch.arange(block, device=device)
        path, counts, _ = proposal.walk(offer, told.gather(1, ahead.clamp_max(told.shape[1] - 1)))
        counts = torch.minimum(counts, ends - done)
        stepper.commit(state, passed, path, counts)
        context.extend(passed.taps, path, counts)
        for row, count in enumerate(counts.tolist()):
            if count:
                rounds[row].append(count)
        done = done + counts
    return rounds
