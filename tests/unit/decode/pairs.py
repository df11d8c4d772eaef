"""Tiny random targets with drafters that were fitted to their greedy texts for a second.

A random drafter is hardly ever accepted, and then nothing of what happens to accepted paths is under test.
After sixty steps on the texts themselves between none and all of a block's drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthouse.decode import DecodeSettings, Stepper
from drafthouse.decode.generate import Mode
from drafthouse.drafter.config import DrafterConfig
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.target import Target

BLOCK = 6
TAPS = (0, 1, 2)
NEW_TOKENS = 24
MASK = 96
# Greedy texts of different implementations can only be compared where rounding does not decide.
CLEAR_MARGIN = 5e-4
MODES: tuple[tuple[Mode, int], ...] = (("autoregressive", 1), ("chain", 1), ("tree", 14))


@dataclass(frozen=True)
class Pair:
    """A target, a drafter for it, prompts, and transformers' own greedy continuations of them."""

    target: Target
    drafter: DFlashDrafter
    prompts: list[np.ndarray]
    references: list[list[int]]

    @property
    def stepper(self) -> Stepper:
        return Stepper(self.target, TAPS)

    def settings(self, mode: Mode, budget: int = 14, **changes: Any) -> DecodeSettings:
        return DecodeSettings(**{"mode": mode, "budget": budget, "max_new_tokens": NEW_TOKENS, "rows": 32} | changes)


def make_pair(make: Callable[..., nn.Module], seed: int, count: int = 11) -> Pair:
    """Prompts of 3 to 89 tokens: shorter and longer than a prefill chunk."""
    target = Target(make(seed, eos_token_id=None))
    random = np.random.default_rng(seed)
    prompts, references = [], []
    for length in random.integers(3, 90, count):
        prompt = random.integers(6, MASK, length)
        text = greedy_by_transformers(target, prompt, NEW_TOKENS)
        if smallest_margin(target, prompt, text) >= CLEAR_MARGIN:
            prompts.append(prompt)
            references.append(text)
    assert len(prompts) >= 8
    return Pair(target, fitted_drafter(target, prompts, references), prompts, references)


def greedy_by_transformers(target: Target, prompt: np.ndarray, count: int, eos: list[int] | None = None) -> list[int]:
    """The continuation that the library itself gives, prompt by prompt."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    whole = cast(Any, target.model).generate(
        ids, max_new_tokens=count, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    return cast(list[int], whole[0, len(prompt) :].tolist())


def smallest_margin(target: Target, prompt: np.ndarray, text: Sequence[int]) -> float:
    """Least distance between the best and the second logit along a text."""
    ids = torch.tensor([[*prompt.tolist(), *text]])
    logits = cast(Any, target.model)(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def drafter_config(target: Target, **changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "block_size": BLOCK,
        "target_layer_ids": TAPS,
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "mask_token_id": MASK,
        "rope_theta": 10_000.0,
    }
    return DrafterConfig.model_validate(values | changes)


def fitted_drafter(target: Target, prompts: list[np.ndarray], texts: list[list[int]], steps: int = 60) -> DFlashDrafter:
    drafter = DFlashDrafter(drafter_config(target))
    rows, length = len(prompts), max(len(p) + len(t) for p, t in zip(prompts, texts, strict=True)) + BLOCK
    starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    ends = starts + torch.tensor([len(text) for text in texts])[:, None]
    ids = torch.zeros(rows, length, dtype=torch.int64)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids[row, : len(prompt) + len(text)] = torch.tensor([*prompt.tolist(), *text])
    taps = target.capture(ids, ends[:, 0], TAPS)[:, :, :-1]
    positions = torch.arange(length).expand(rows, length)
    positions = torch.where(positions < ends, positions, -1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        anchors = starts + (torch.rand(rows, 8, generator=generator) * (ends - starts - 1)).long()
        places = anchors[..., None] + torch.arange(BLOCK)
        labels = ids[torch.arange(rows)[:, None, None], places.clamp_max(length - 1)]
        blocks = torch.full_like(labels, MASK)
        blocks[..., 0] = labels[..., 0]
        hidden = drafter(taps, target.embed(blocks), anchors, positions)
        loss = _mean_nats(target.lm_head(hidden[:, :, 1:]), labels[..., 1:], places[..., 1:] < ends[..., None])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def _mean_nats(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    nats = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return (nats * counts.flatten()).sum() / counts.sum()
