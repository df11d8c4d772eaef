"""The vocabulary loss of drafted slots: hard labels, the target's distribution, or a blend, weighted by slot.

Slot k (1..B-1) of the block anchored at a predicts token a+k. Its hard label is that token; its soft label is
what the target predicted at position a+k-1, softmax(lm_head(final_norm(h_{a+k-1}))), where h is the PRE-norm
output of the target's last layer and the norm is applied here, exactly once.

    l_k  = (1 - s) CE(tok[a+k]) + s T^2 KL(p_T || q_T)          s = soft_weight, T = temperature
    loss = sum w_k l_k / sum w_k                                over all labels that count

The lm_head is frozen, so all that the drafter needs is d loss / d hidden. It is computed chunk by chunk of blocks
inside the forward pass: logits, loss and gradient of a chunk (`vocabulary.py`) are made, used and dropped. A
[slots, vocabulary] tensor of the whole batch never exists, slots without a label never meet the lm_head, and nothing
is recomputed. (The idea of Liger's fused linear cross-entropy, arXiv 2410.10989.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from drafthouse.config import Settings
from drafthouse.drafter.metrics import SlotSums
from drafthouse.drafter.vocabulary import Soft, Terms, gradient, judge
from drafthouse.drafter.weights import decay_weights, default_gamma, dpace_weights, streak_weights

Head = Callable[[Tensor], Tensor]


class LossSettings(Settings):
    """What a slot's loss is and how slots are weighted. The defaults are what won on an H200 (docs/measured.md): the
    streak's weights, 19 % over fixed decay with hard labels; whether labels are soft made no difference."""

    soft_weight: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="share of the target's distribution (KL); 0: hard labels only",
    )
    temperature: float = Field(default=1.0, gt=0.0, description="T of the KL term, which is scaled by T squared")
    weights: Literal["uniform", "decay", "dpace", "streak"] = Field(
        default="streak", description="rule of the slot weights"
    )
    gamma: float | None = Field(
        default=None, gt=0.0, description="decay constant in slots; none: 7 for B=16, 4 for B=8"
    )
    alpha: float = Field(default=0.5, ge=0.0, le=1.0, description="dpace, streak: smoothing of the acceptance estimate")
    streak_decay: bool = Field(default=False, description="streak: multiply by the fixed decay as well")
    acceptance: Literal["label", "overlap"] = Field(
        default="label",
        description="dpace, streak: q is the label's probability (as accepted by greedy decoding), or the "
        "overlap sum(min(p, q)) with the target's distribution (as accepted by sampling)",
    )
    chunk_blocks: int = Field(default=64, gt=0, description="blocks whose logits exist at one time")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.acceptance == "overlap" and self.soft_weight == 0.0:
            raise ValueError("acceptance 'overlap' needs the target's distribution: set soft_weight > 0")
        if self.streak_decay and self.weights != "streak":
            raise ValueError(f"streak_decay has no meaning with weights '{self.weights}'")
        return self


@dataclass(frozen=True)
class Teacher:
    """Where soft labels come from.

    Attributes:
        last_hidden: [rows, length, hidden], pre-norm output of the target's last layer.
        final_norm: the target's final norm.
        lm_head: the target's lm_head.
    """

    last_hidden: Tensor
    final_norm: Head
    lm_head: Head


@dataclass(frozen=True)
class BlockLoss:
    """A masked sum, kept as numerator and denominator so that micro-batches and ranks add up exactly.

    Attributes:
        numerator: sum of w l, differentiable with respect to the hidden states.
        weight: sum of w, without gradient.
        sums: sums for metrics.
    """

    numerator: Tensor
    weight: Tensor
    sums: SlotSums

    @property
    def mean(self) -> Tensor:
        """sum w l / sum w; 0 when no label counts."""
        return self.numerator / self.weight.clamp_min(torch.finfo(self.weight.dtype).tiny)


@dataclass(frozen=True)
class _Labels:
    """The blocks of a batch that have a label at all, flattened to [blocks]; slots are 1..B-1.

    Attributes:
        block: int [blocks], index into rows * anchors.
        tokens: int [blocks, slots].
        valid: bool [blocks, slots].
        teacher: int [blocks, slots], index into rows * length of the position whose logits predict the label.
    """

    block: Tensor
    tokens: Tensor
    valid: Tensor
    teacher: Tensor

    @classmethod
    def of(cls, anchors: Tensor, input_ids: Tensor, loss_mask: Tensor, slots: int) -> _Labels:
        rows, length = input_ids.shape
        positions = anchors[..., None] + torch.arange(1, slots + 1, device=anchors.device)
        inside = (anchors[..., None] >= 0) & (positions < length)
        row = torch.arange(rows, device=anchors.device)[:, None, None]
        flat = (row * length + positions.clamp(1, length - 1)).flatten(0, 1)
        valid = inside.flatten(0, 1) & loss_mask.bool().flatten()[flat]
        block = valid.any(-1).nonzero().squeeze(-1)
        flat = flat[block]
        return cls(block, input_ids.flatten()[flat], valid[block], flat - 1)


def block_loss(
    hidden: Tensor,
    anchors: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    lm_head: Head,
    settings: LossSettings,
    *,
    teacher: Teacher | None = None,
    entropy: bool = False,
    compiled: bool = False,
) -> BlockLoss:
    """Loss and metrics of all blocks of a batch.

    Args:
        hidden: [rows, anchors, block, hidden], the drafter's output.
        anchors: int64 [rows, anchors], -1 = invalid block. Ascending anchors make neighbouring blocks share
            teacher rows.
        input_ids: int64 [rows, length].
        loss_mask: [rows, length], non-zero where the token is supervised; labels beyond the row are masked
            too.
        lm_head: the target's, frozen: [n, hidden] → [n, vocabulary].
        settings: loss and weights.
        teacher: needed when `soft_weight` > 0.
        entropy: also sum the entropy of the drafter's distributions (one more pass over the logits).
        compiled: use compiled kernels (CUDA).
    """
    if settings.soft_weight > 0 and teacher is None:
        raise ValueError("a soft-label loss needs a teacher")
    slots = hidden.shape[2] - 1
    labels = _Labels.of(anchors, input_ids, loss_mask, slots)
    chunks = _Chunks(labels, lm_head, settings, teacher if settings.soft_weight > 0 else None, slots, entropy, compiled)
    selected = hidden.flatten(0, 1)[:, 1:][labels.block][labels.valid]
    numerator: Tensor = _ChunkedSum.apply(selected, chunks)  # type: ignore[no-untyped-call]
    return BlockLoss(numerator, chunks.sums.weight.sum(), chunks.sums)


class _ChunkedSum(torch.autograd.Function):
    """Sum of the chunks' losses, with the gradient taken chunk by chunk in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunks: _Chunks) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        into = torch.zeros_like(hidden) if wanted else None
        total = torch.zeros((), device=hidden.device)
        for blocks, labels in chunks.parts():
            total += chunks.weighted_loss(hidden[labels], blocks, labels, None if into is None else into[labels])
        ctx.save_for_backward(into)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None


class _Chunks:
    """Computes the weighted loss of one chunk of blocks and gathers the sums of all of them."""

    def __init__(
        self,
        labels: _Labels,
        lm_head: Head,
        settings: LossSettings,
        teacher: Teacher | None,
        slots: int,
        entropy: bool,
        compiled: bool,
    ) -> None:
        self.labels, self.lm_head, self.settings, self.teacher = labels, lm_head, settings, teacher
        self.entropy, self.compiled = entropy, compiled
        self.sums = SlotSums.zeros(slots, labels.block.device)
        self.decay = decay_weights(slots, settings.gamma or default_gamma(slots + 1)).to(labels.block.device)
        self.tokens, self.positions = labels.tokens[labels.valid], labels.teacher[labels.valid]

    def parts(self) -> list[tuple[slice, slice]]:
        """Chunks as (their blocks, their labels); one look at the device for all of them."""
        size, blocks = self.settings.chunk_blocks, self.labels.block.shape[0]
        if not blocks:
            return []
        ends = [*range(size, blocks, size), blocks]
        counted = self.labels.valid.sum(1).cumsum(0)[[end - 1 for end in ends]].tolist()
        starts = [0, *ends[:-1]]
        return [
            (slice(start, end), slice(first, last))
            for start, end, first, last in zip(starts, ends, [0, *counted[:-1]], counted, strict=True)
        ]

    def weighted_loss(self, hidden: Tensor, blocks: slice, labels: slice, into: Tensor | None) -> Tensor:
        """sum of w l of one chunk, from the hidden states of its labels [labels, hidden]; its gradient goes `into`."""
        settings, valid, tokens = self.settings, self.labels.valid[blocks], self.tokens[labels]
        with torch.set_grad_enabled(into is not None):
            leaf = hidden.detach().requires_grad_(into is not None)
            logits = self.lm_head(leaf)
        seen, soft = logits.detach(), self._soft(self.positions[labels])
        terms = judge(
            seen,
            tokens,
            soft,
            overlap=settings.acceptance == "overlap",
            entropy=self.entropy,
            compiled=self.compiled,
        )
        accepted = terms.log_q.exp() if terms.overlap is None else terms.overlap
        by_slot = self._weights(_scatter(accepted, valid), valid)
        weights = by_slot[valid]
        if into is not None:
            slope = gradient(
                seen, tokens, soft, weights, settings.soft_weight, terms.normaliser, compiled=self.compiled
            )
            into.copy_(torch.autograd.grad(logits, leaf, slope)[0])
        self._count(terms, valid, by_slot)
        loss = -(1 - settings.soft_weight) * terms.log_q
        if terms.divergence is not None:
            loss = loss + settings.soft_weight * settings.temperature**2 * terms.divergence
        return (weights * loss).sum()

    def _soft(self, positions: Tensor) -> Soft | None:
        if self.teacher is None:
            return None
        with torch.no_grad():
            # Neighbouring blocks overlap: each target position is put through the lm_head once a chunk.
            needed, where = torch.unique(positions, return_inverse=True)
            states = self.teacher.last_hidden.flatten(0, 1)[needed]
            return Soft(self.teacher.lm_head(self.teacher.final_norm(states)), where, self.settings.temperature)

    def _weights(self, accepted: Tensor, valid: Tensor) -> Tensor:
        settings = self.settings
        if settings.weights == "uniform":
            return valid.float()
        if settings.weights == "decay":
            return valid * self.decay
        if settings.weights == "dpace":
            return dpace_weights(accepted, valid, settings.alpha)
        weights = streak_weights(accepted, valid, settings.alpha)
        return weights * self.decay if settings.streak_decay else weights

    def _count(self, terms: Terms, valid: Tensor, weights: Tensor) -> None:
        sums = self.sums
        correct = _scatter(terms.correct, valid)
        sums.blocks += valid.shape[0]
        sums.labels += valid.sum(0)
        sums.correct += correct.sum(0)
        sums.weight += weights.sum(0)
        sums.cross_entropy -= terms.log_q.sum()
        sums.streak += correct.cumprod(-1).sum()
        sums.expected_streak += _scatter(terms.log_q.exp(), valid).cumprod(-1).sum()
        if terms.divergence is not None:
            sums.divergence += terms.divergence.sum()
        if terms.entropy is not None:
            sums.entropy += terms.entropy.sum()


def _scatter(values: Tensor, valid: Tensor) -> Tensor:
    """Values of the valid slots back in their places, 0 elsewhere: [labels] → [blocks, slots]."""
    out = torch.zeros(valid.shape, dtype=values.dtype, device=values.device)
    out[valid] = values
    return out
