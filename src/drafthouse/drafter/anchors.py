"""Where blocks start: anchors drawn from the tokens that the target must produce.

The anchor is slot 0 of a block: the token that is already known when the drafter runs. In decoding that token
was produced by the target (sampled after the prompt's prefill, or the bonus token of the last verification)
and the target has not processed it yet, so the context ends strictly before it. Hence a training anchor is a
supervised token whose successor is supervised too. The first token of an answer is an anchor with exactly the
prompt as its context, which is the first block of every generation. The last prompt token is none: no decoder
ever drafts from it, because prefill itself yields the token after it. A block may run past the end of its
document; those labels are masked.

Rows are documents: every row gets its own `count` anchors, so that short documents are not starved by long
ones.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator_for(seed: int, step: int, purpose: str, device: torch.device | None = None) -> torch.Generator:
    """A generator (of the CPU, unless a device is named) that depends on nothing but its arguments, so that a resumed
    run draws what it would have drawn."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return torch.Generator(device or "cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def valid_anchors(loss_mask: Tensor) -> Tensor:
    """True where a block may start: this token and the next are supervised.

    Args:
        loss_mask: [rows, length], non-zero on tokens that the target must produce; 0 on padding.

    Returns:
        bool [rows, length].
    """
    supervised = loss_mask.bool()
    following = torch.zeros_like(supervised)
    following[:, :-1] = supervised[:, 1:]
    return supervised & following


def draw_anchors(loss_mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` distinct anchors for each row, uniformly from its valid positions.

    Args:
        loss_mask: [rows, length] as in `valid_anchors`.
        count: anchors a row; a row with fewer valid positions takes all of them.
        generator: a CPU generator, see `generator_for`.

    Returns:
        int64 [rows, count], ascending within each row, the missing ones -1 at the end.
    """
    rows, length = loss_mask.shape
    valid = valid_anchors(loss_mask)
    keys = torch.rand(rows, length, generator=generator).to(valid.device).masked_fill_(~valid, -1.0)
    best = keys.topk(min(count, length), dim=1)
    drawn = best.indices.masked_fill(best.values < 0, length).sort(dim=1).values
    anchors = torch.full((rows, count), -1, dtype=torch.int64, device=valid.device)
    anchors[:, : drawn.shape[1]] = drawn.masked_fill(drawn == length, -1)
    return anchors


def block_tokens(input_ids: Tensor, anchors: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Input ids of each block: the anchor token, then mask tokens (ground truth after the anchor is never
    fed).

    Args:
        input_ids: int64 [rows, length].
        anchors: int64 [rows, anchors], -1 = invalid (gets only mask tokens).

    Returns:
        int64 [rows, anchors, block_size].
    """
    tokens = torch.full((*anchors.shape, block_size), mask_token_id, dtype=input_ids.dtype, device=input_ids.device)
    known = input_ids.gather(1, anchors.clamp_min(0))
    tokens[..., 0] = torch.where(anchors >= 0, known, mask_token_id)
    return tokens
