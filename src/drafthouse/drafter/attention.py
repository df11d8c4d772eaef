"""Who sees whom in a DFlash block, and three exact ways to compute it.

The rule (arXiv 2602.06036; SpecForge and z-lab agree). A query at slot j of the block anchored at a has
position p = a + j. It sees

* a context key at position t when t < a (strictly: at inference the target has not yet processed the anchor
  token), and t > p - W on a sliding layer;
* a key at slot i of its OWN block: any i on a full layer; i <= j and j - i < W on a sliding layer;
* nothing of other blocks, of other rows, or of padding.

`dense` hands one boolean mask over [context | all blocks] to PyTorch's scaled dot-product attention. `split`
scores the shared context and the own block only, so that the (blocks x slots)^2 pairs which are always masked
are never computed; both parts share one softmax. `flex` (`flex.py`) compiles the rule into a block-sparse kernel for
long contexts on accelerators. They give the same numbers; `dense` is the reference.

Several documents may share a row (packing): then anchors and context tokens carry document numbers, and nothing of
another document is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from drafthouse.drafter.flex import flex_attend, flex_mask

Implementation = Literal["split", "dense", "flex"]
Documents = tuple[Tensor, Tensor]

_FLOOR = -80.0


@dataclass(frozen=True)
class BlockMask:
    """What the queries of one layer type may see. True = visible.

    Attributes:
        context: bool [rows, anchors, 1 or block, context]; the slot axis is 1 where all slots see the same.
        own: bool [block (query), block (key)].
    """

    context: Tensor
    own: Tensor

    def context_bias(self, dtype: torch.dtype) -> Tensor:
        """0 where visible, -inf elsewhere, [rows, 1, anchors, 1, 1 or block, context]."""
        bias = torch.zeros(self.context.shape, dtype=dtype, device=self.context.device)
        return bias.masked_fill_(~self.context, float("-inf"))[:, None, :, None]

    def own_bias(self, dtype: torch.dtype) -> Tensor:
        """0 where visible, -inf elsewhere, [block, block]."""
        bias = torch.zeros(self.own.shape, dtype=dtype, device=self.own.device)
        return bias.masked_fill_(~self.own, float("-inf"))

    def dense(self) -> Tensor:
        """The whole mask, bool [rows, 1, anchors * block, context + anchors * block]."""
        rows, anchors, _, length = self.context.shape
        block = self.own.shape[0]
        context = self.context.expand(rows, anchors, block, length).reshape(rows, 1, anchors * block, length)
        same = torch.eye(anchors, dtype=torch.bool, device=self.own.device)
        own = (same[:, None, :, None] & self.own[None, :, None, :]).reshape(anchors * block, anchors * block)
        return torch.cat([context, own.expand(rows, 1, -1, -1)], dim=-1)


def block_mask(
    anchors: Tensor,
    context_positions: Tensor,
    block_size: int,
    window: int | None,
    documents: Documents | None = None,
) -> BlockMask:
    """Build the mask of one layer type.

    Args:
        anchors: int [rows, anchors], absolute position of slot 0; -1 marks an invalid block, which sees only
            itself.
        context_positions: int [rows, context], absolute position of each context key; -1 marks padding.
        block_size: slots of a block.
        window: W of a sliding layer; None for a full layer.
        documents: document number of each anchor [rows, anchors] and of each context token [rows, context]; None:
            a row is one document.
    """
    slots = torch.arange(block_size, device=anchors.device)
    keys = context_positions[:, None, None, :]
    visible = (keys >= 0) & (keys < anchors[:, :, None, None])
    if documents is not None:
        visible &= documents[0][:, :, None, None] == documents[1][:, None, None, :]
    if window is None:
        own = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
        return BlockMask(visible, own)
    queries = anchors[:, :, None] + slots
    visible = visible & (keys > (queries - window)[..., None])
    distance = slots[:, None] - slots[None, :]
    return BlockMask(visible, (distance >= 0) & (distance < window))


@dataclass(frozen=True)
class Bias:
    """A mask in the form that one implementation consumes, built once a forward and shared by its layers."""

    context: Tensor | FlexMask
    own: Tensor | None

    @classmethod
    def of(
        cls,
        anchors: Tensor,
        context_positions: Tensor,
        block_size: int,
        window: int | None,
        implementation: Implementation,
        dtype: torch.dtype,
        documents: Documents | None = None,
    ) -> Bias:
        """Arguments as in `block_mask`; `dtype` is that of the scores."""
        # FlexAttention trains on accelerators only; SDPA takes its place elsewhere, with the same numbers.
        if implementation == "flex" and (anchors.device.type != "cpu" or not torch.is_grad_enabled()):
            return cls(flex_mask(anchors, context_positions, block_size, window, documents), None)
        mask = block_mask(anchors, context_positions, block_size, window, documents)
        if implementation == "split":
            return cls(mask.context_bias(dtype), mask.own_bias(dtype))
        return cls(mask.dense(), None)


def attend(q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], bias: Bias) -> Tensor:
    """Attention of block queries over the shared context and their own block.

    Args:
        q: [rows, anchors, block, heads, d], normed and rotated.
        context: keys and values, each [rows, kv_heads, context, d].
        own: keys and values, each [rows, anchors, block, kv_heads, d].
        bias: from `Bias.of`; it carries the implementation.

    Returns:
        [rows, anchors, block, heads * d].
    """
    if isinstance(bias.context, FlexMask):
        return flex_attend(q, *context, *own, bias.context)
    if bias.own is None:
        return _dense(q, *context, *own, bias.context)
    return _split(q, *context, *own, bias.context, bias.own)


def _split(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, context_bias: Tensor, own_bias: Tensor
) -> Tensor:
    rows, anchors, block, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # Query heads that share a kv head become rows of one matrix product: no key or value is repeated.
    q = (q * d**-0.5).view(rows, anchors, block, kv_heads, group, d).permute(0, 3, 1, 4, 2, 5).contiguous()
    own_k, own_v = own_k.permute(0, 3, 1, 2, 4), own_v.permute(0, 3, 1, 2, 4)
    out: Tensor = _SharedContext.apply(q, k, v, own_k, own_v, context_bias, own_bias)  # type: ignore[no-untyped-call]
    return out.permute(0, 2, 4, 1, 3, 5).reshape(rows, anchors, block, heads * d)


class _SharedContext(torch.autograd.Function):
    """softmax([q k' + context bias | q own_k' + own bias]) [v; own_v], without ever joining the two score
    tensors.

    Written by hand because scores are the largest tensors of a step: forward and backward touch them in
    place, keep one unnormalised copy, and normalise on the [.., d] side.

    Shapes: q, out [rows, kv_heads, anchors, group, block, d]; k, v [rows, kv_heads, context, d]; own_k, own_v
    [rows, kv_heads, anchors, block, d]. Every query sees at least itself, so the row maximum is finite.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        context_bias: Tensor,
        own_bias: Tensor,
    ) -> Tensor:
        far, near = q.flatten(2, 4), q.flatten(3, 4)
        to_context = torch.matmul(far, k.transpose(-1, -2)).to(context_bias.dtype)
        to_own = torch.matmul(near, own_k.transpose(-1, -2)).to(own_bias.dtype)
        by_slot = to_context.view(*q.shape[:-1], k.shape[2])  # a view: what follows writes into to_context
        own_by_slot = to_own.view(*q.shape[:-1], -1)
        by_slot.add_(context_bias)
        own_by_slot.add_(own_bias)
        top = own_by_slot.amax(-1, keepdim=True)
        if by_slot.shape[-1]:
            top = torch.maximum(top, by_slot.amax(-1, keepdim=True))
        # exp of -inf takes a path five times slower on x86; exp(_FLOOR) is far below fp32 resolution of a
        # weight.
        by_slot.sub_(top).clamp_(min=_FLOOR).exp_().mul_(context_bias == 0)
        own_by_slot.sub_(top).clamp_(min=_FLOOR).exp_().mul_(own_bias == 0)
        total = by_slot.sum(-1, keepdim=True).add_(own_by_slot.sum(-1, keepdim=True))
        out = torch.matmul(to_context.to(v.dtype), v).view(q.shape)
        out = out + torch.matmul(to_own.to(v.dtype), own_v).view(q.shape)
        out = (out / total).to(v.dtype)
        ctx.save_for_backward(q, k, v, own_k, own_v, to_context, to_own, total, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, to_context, to_own, total, out = ctx.saved_tensors
        grad = grad / total
        dot = (grad * out).sum(-1, keepdim=True)
        grad = grad.to(v.dtype)
        far, near = grad.flatten(2, 4), grad.flatten(3, 4)
        grad_v = torch.matmul(to_context.to(v.dtype).transpose(-1, -2), far)
        grad_own_v = torch.matmul(to_own.to(v.dtype).transpose(-1, -2), near)
        # d scores = weights * (grad v' - grad . out); the weights' normaliser already sits in grad.
        scores = torch.matmul(far, v.transpose(-1, -2)).to(dot.dtype)
        scores.sub_(dot.flatten(2, 4)).mul_(to_context)
        own_scores = torch.matmul(near, own_v.transpose(-1, -2)).to(dot.dtype)
        own_scores.sub_(dot.flatten(3, 4)).mul_(to_own)
        scores, own_scores = scores.to(q.dtype), own_scores.to(q.dtype)
        grad_q = torch.matmul(scores, k).view(q.shape) + torch.matmul(own_scores, own_k).view(q.shape)
        grad_k = torch.matmul(scores.transpose(-1, -2), q.flatten(2, 4))
        grad_own_k = torch.matmul(own_scores.transpose(-1, -2), q.flatten(3, 4))
        return grad_q, grad_k, grad_v, grad_own_k, grad_own_v, None, None


def _dense(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, mask: Tensor) -> Tensor:
    rows, anchors, block, heads, d = q.shape
    keys = torch.cat([k, own_k.flatten(1, 2).transpose(1, 2)], dim=2)
    values = torch.cat([v, own_v.flatten(1, 2).transpose(1, 2)], dim=2)
    out = F.scaled_dot_product_attention(q.flatten(1, 2).transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(rows, anchors, block, heads * d)
