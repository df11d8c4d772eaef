"""How much each slot of a block counts in the loss.

A draft at slot k is worth something only if slots 1..k-1 were accepted, so later slots deserve less weight.
Four rules:

* `uniform`  w_k = 1.
* `decay`    w_k = exp(-(k-1)/gamma), DFlash's own (arXiv 2602.06036).
* `dpace`    w_k = sum over m >= k of prod_{i<=m} q~_i (D-PACE, arXiv 2605.18810): the expected number of
             accepted tokens that hang on slot k, slot k's own acceptance included.
* `streak`   w_k = prod_{i<k} q~_i: the probability that the block is still alive when slot k is judged.
             Unlike dpace it does not multiply by q_k itself, so a slot that is wrong now keeps its full
             weight as long as its prefix stands, and slot 1 always weighs 1. Optionally times the fixed
             decay.

q_i is the drafter's own acceptance estimate of slot i, without gradient, and q~ = (1 - alpha) q + alpha keeps
late slots from starving early in training. Masked labels weigh 0; from a masked label on, no streak
continues.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

# gamma by block size of the published recipes: 4 for 7 and 8, 5 for 10, 7 for 16.
_GAMMAS = ((7, 4.0), (8, 4.0), (10, 5.0), (16, 7.0))


def default_gamma(block_size: int) -> float:
    """Decay constant (in slots) for a block size: the published values, linear between, proportional
    outside."""
    first, last = _GAMMAS[0], _GAMMAS[-1]
    if block_size <= first[0]:
        return first[1] * block_size / first[0]
    if block_size >= last[0]:
        return last[1] * block_size / last[0]
    for (left, low), (right, high) in pairwise(_GAMMAS):
        if block_size <= right:
            return low + (high - low) * (block_size - left) / (right - left)
    raise AssertionError("the table covers its own range")


def decay_weights(slots: int, gamma: float) -> Tensor:
    """exp(-(k-1)/gamma) for k = 1..slots, fp32 [slots]."""
    return torch.exp(-torch.arange(slots, dtype=torch.float32) / gamma)


def _smoothed(acceptance: Tensor, valid: Tensor, alpha: float) -> Tensor:
    return torch.where(valid, (1 - alpha) * acceptance + alpha, 0.0)


def dpace_weights(acceptance: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """D-PACE weights, [blocks, slots].

    Args:
        acceptance: q, [blocks, slots] in [0, 1], without gradient.
        valid: bool [blocks, slots], labels that count.
        alpha: smoothing, 0 = pure q, 1 = uniform acceptance.
    """
    alive = _smoothed(acceptance, valid, alpha).cumprod(-1)
    return alive.flip(-1).cumsum(-1).flip(-1) * valid


def streak_weights(acceptance: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """Streak weights, [blocks, slots]; arguments as in `dpace_weights`."""
    alive = _smoothed(acceptance, valid, alpha).cumprod(-1)
    before = torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], dim=-1)
    return before * valid
