"""Softmax over the vocabulary for the drafter's loss: its terms, and its gradient in closed form.

    l    = (1 - s) CE + s T^2 KL(p_T || q_T)
    dl/dz = (1 - s) (q - onehot) + s T (q_T - p_T)         z the drafter's logits, p the target's distribution

Written out so that the logits of a chunk are read twice and written once. Under autograd the same loss keeps and reads
some eight float32 copies of them, which costs as much as half of the lm_head's products. On CUDA both passes can be
compiled into fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Soft:
    """The target's side of a chunk.

    Attributes:
        logits: [positions, vocabulary], each target position once.
        where: int64 [labels], row of `logits` that predicts each label.
        temperature: T.
    """

    logits: Tensor
    where: Tensor
    temperature: float


@dataclass(frozen=True)
class Terms:
    """What a chunk's logits say about its labels, each fp32 [labels]; None where it was not asked for.

    Attributes:
        log_q: log-probability of the label.
        correct: 1 where the label is the argmax.
        divergence: KL(p_T || q_T).
        overlap: sum(min(p, q)), without temperature.
        entropy: of q, in nats.
        normaliser: log-sum-exp of the logits.
    """

    log_q: Tensor
    correct: Tensor
    divergence: Tensor | None
    overlap: Tensor | None
    entropy: Tensor | None
    normaliser: Tensor


@torch.no_grad()
def judge(
    logits: Tensor, tokens: Tensor, soft: Soft | None, *, overlap: bool, entropy: bool, compiled: bool = False
) -> Terms:
    """Terms of `logits` [labels, vocabulary] for the labels `tokens` [labels]."""
    hard = _maybe(_hard, compiled)(logits, tokens, entropy)
    divergence = common = None
    if soft is not None:
        divergence = _maybe(_divergence, compiled)(logits, soft.logits, soft.where, soft.temperature)
        if overlap:
            common = _maybe(_overlap, compiled)(logits, soft.logits, soft.where)
    return Terms(hard[0], hard[1], divergence, common, hard[2], hard[3])


@torch.no_grad()
def gradient(
    logits: Tensor,
    tokens: Tensor,
    soft: Soft | None,
    weights: Tensor,
    soft_weight: float,
    normaliser: Tensor,
    *,
    compiled: bool = False,
) -> Tensor:
    """d(sum of weights x l) / d logits, in the dtype of `logits`; `normaliser` is that of `Terms`."""
    if soft is None:
        hard: Tensor = _maybe(_hard_gradient, compiled)(logits, tokens, weights, normaliser)
        return hard
    blend: Tensor = _maybe(_blend_gradient, compiled)(
        logits, tokens, soft.logits, soft.where, weights, normaliser, soft_weight, soft.temperature
    )
    return blend


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # The number of labels differs from chunk to chunk: one kernel for all of them.
    return torch.compile(function, dynamic=True)


def _maybe(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return _compiled(function) if compiled else function


def _hard(logits: Tensor, tokens: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    z = logits.float()
    normaliser = z.logsumexp(-1)
    log_q = z.gather(-1, tokens[:, None]).squeeze(-1) - normaliser
    correct = (z.argmax(-1) == tokens).float()
    if not entropy:
        return log_q, correct, None, normaliser
    surprise = normaliser - ((z - normaliser[:, None]).exp() * z).sum(-1)
    return log_q, correct, surprise, normaliser


def _divergence(logits: Tensor, teacher: Tensor, where: Tensor, temperature: float) -> Tensor:
    z, t = logits.float() / temperature, teacher.float() / temperature
    log_p = t - t.logsumexp(-1, keepdim=True)
    p = log_p.exp()
    negative_entropy = (p * log_p).sum(-1)
    expected = (p[where] * z).sum(-1) - z.logsumexp(-1)
    return negative_entropy[where] - expected


def _overlap(logits: Tensor, teacher: Tensor, where: Tensor) -> Tensor:
    p = teacher.float().softmax(-1)
    return torch.minimum(p[where], logits.float().softmax(-1)).sum(-1)


def _hard_gradient(logits: Tensor, tokens: Tensor, weights: Tensor, normaliser: Tensor) -> Tensor:
    q = (logits.float() - normaliser[:, None]).exp()
    label = torch.arange(logits.shape[-1], device=logits.device) == tokens[:, None]
    return ((q - label.to(q.dtype)) * weights[:, None]).to(logits.dtype)


def _blend_gradient(
    logits: Tensor,
    tokens: Tensor,
    teacher: Tensor,
    where: Tensor,
    weights: Tensor,
    normaliser: Tensor,
    soft_weight: float,
    temperature: float,
) -> Tensor:
    z = logits.float()
    p = (teacher.float() / temperature).softmax(-1)[where]
    q = (z - normaliser[:, None]).exp()
    q_t = q if temperature == 1 else (z / temperature).softmax(-1)
    label = torch.arange(logits.shape[-1], device=logits.device) == tokens[:, None]
    hard = (q - label.to(q.dtype)) * (1 - soft_weight)
    return ((hard + soft_weight * temperature * (q_t - p)) * weights[:, None]).to(logits.dtype)
