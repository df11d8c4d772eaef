"""The vocabulary loss of drafted slots: hard labels, the target's distribution, or a blend, weighted by slot.

Slot k (1..B-1) of the block anchored at a predicts token a+k. Its hard label is that token; its soft label is
what the target predicted at position a+k-1, softmax(lm_head(final_norm(h_{a+k-1}))), where h is the PRE-norm
output of the target's last layer and the norm is applied here, exactly once.

    l_k  = (1 - s) CE(tok[a+k]) + s T^2 KL(p_T || q_T)          s = soft_weight, T = temperature
    loss = sum w_k l_k / sum w_k                                over all labels that count

The lm_head is frozen, so all that the drafter needs is d loss / d hidden. It is computed chunk by chunk of
blocks inside
the forward pass: logits, loss and gradient of a chunk are made, used and dropped. A [slots, vocabulary]
tensor of the whole batch never exists and nothing is recomputed. (The same idea as Liger's fused linear
cross-entropy, arXiv 2410.10989, for any loss that autograd can differentiate.)
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
from drafthouse.drafter.weights import decay_weights, default_gamma, dpace_weights, streak_weights

Head = Callable[[Tensor], Tensor]


class LossSettings(Settings):
    """What a slot's loss is and how slots are weighted."""

    soft_weight: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="share of the target's distribution (KL); 0: hard labels only",
    )
    temperature: float = Field(default=1.0, gt=0.0, description="T of the KL term, which is scaled by T squared")
    weights: Literal["uniform", "decay", "dpace", "streak"] = Field(
        default="decay", description="rule of the slot weights"
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
    """
    if settings.soft_weight > 0 and teacher is None:
        raise ValueError("a soft-label loss needs a teacher")
    slots = hidden.shape[2] - 1
    labels = _Labels.of(anchors, input_ids, loss_mask, slots)
    chunks = _Chunks(labels, lm_head, settings, teacher if settings.soft_weight > 0 else None, slots, entropy)
    selected = hidden.flatten(0, 1)[:, 1:][labels.block]
    numerator: Tensor = _ChunkedSum.apply(selected, chunks)  # type: ignore[no-untyped-call]
    return BlockLoss(numerator, chunks.sums.weight.sum(), chunks.sums)


class _ChunkedSum(torch.autograd.Function):
    """Sum of a function over chunks of its input, with the gradient taken chunk by chunk in the forward
    pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunks: _Chunks) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden) if wanted else None
        total = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.shape[0], chunks.size):
            part = slice(start, start + chunks.size)
            with torch.set_grad_enabled(wanted):
                leaf = hidden[part].detach().requires_grad_(wanted)
                value = chunks.weighted_loss(leaf, part)
            if gradient is not None:
                (gradient[part],) = torch.autograd.grad(value, leaf)
            total += value.detach()
        ctx.save_for_backward(gradient)
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
    ) -> None:
        self.labels, self.lm_head, self.settings, self.teacher = labels, lm_head, settings, teacher
        self.size = settings.chunk_blocks
        self.entropy = entropy
        self.sums = SlotSums.zeros(slots, labels.block.device)
        self.decay = decay_weights(slots, settings.gamma or default_gamma(slots + 1)).to(labels.block.device)

    def weighted_loss(self, hidden: Tensor, part: slice) -> Tensor:
        """sum of w l of the blocks `part`, from their hidden states [blocks, slots, hidden]."""
        settings, valid = self.settings, self.labels.valid[part]
        tokens = self.labels.tokens[part][valid]
        logits = self.lm_head(hidden[valid]).float()  # [labels, vocabulary]: only slots with a label
        log_q = logits.log_softmax(-1)
        label_log_q = log_q.gather(-1, tokens[:, None]).squeeze(-1)
        loss = -(1 - settings.soft_weight) * label_log_q
        accepted = label_log_q.detach().exp()
        divergence: Tensor | None = None
        if self.teacher is not None:
            divergence, overlap = self._soft(logits, log_q, self.labels.teacher[part][valid])
            loss = loss + settings.soft_weight * settings.temperature**2 * divergence
            accepted = accepted if overlap is None else overlap
        with torch.no_grad():
            weights = self._weights(_scatter(accepted, valid), valid)
            self._count(logits, log_q, label_log_q, divergence, tokens, valid, weights)
        return (weights[valid] * loss).sum()

    def _soft(self, logits: Tensor, log_q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """KL(p_T || q_T) of each label, and sum(min(p, q)) when the weights ask for it."""
        assert self.teacher is not None
        temperature = self.settings.temperature
        with torch.no_grad():
            # Neighbouring blocks overlap: each target position is put through the lm_head once a chunk.
            needed, where = torch.unique(positions, return_inverse=True)
            states = self.teacher.last_hidden.flatten(0, 1)[needed]
            target = self.teacher.lm_head(self.teacher.final_norm(states)).float()
            log_p = (target / temperature if temperature != 1 else target).log_softmax(-1)
            p = log_p.exp()
            negative_entropy = (p * log_p).sum(-1)[where]
            p = p[where]
            overlap = None
            if self.settings.acceptance == "overlap":
                plain = p if temperature == 1 else target.softmax(-1)[where]
                overlap = torch.minimum(plain, log_q.exp()).sum(-1)
        log_q_t = log_q if temperature == 1 else (logits / temperature).log_softmax(-1)
        return negative_entropy - (p * log_q_t).sum(-1), overlap

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

    def _count(
        self,
        logits: Tensor,
        log_q: Tensor,
        label_log_q: Tensor,
        divergence: Tensor | None,
        tokens: Tensor,
        valid: Tensor,
        weights: Tensor,
    ) -> None:
        sums = self.sums
        correct = _scatter((logits.argmax(-1) == tokens).float(), valid)
        sums.blocks += valid.shape[0]
        sums.labels += valid.sum(0)
        sums.correct += correct.sum(0)
        sums.weight += weights.sum(0)
        sums.cross_entropy -= label_log_q.sum()
        sums.streak += correct.cumprod(-1).sum()
        sums.expected_streak += _scatter(label_log_q.exp(), valid).cumprod(-1).sum()
        if divergence is not None:
            sums.divergence += divergence.sum()
        if self.entropy:
            sums.entropy -= (log_q.exp() * log_q).sum()


def _scatter(values: Tensor, valid: Tensor) -> Tensor:
    """Values of the valid slots back in their places, 0 elsewhere: [labels] → [blocks, slots]."""
    out = torch.zeros(valid.shape, dtype=values.dtype, device=values.device)
    out[valid] = values
    return out
