"""Stand-ins for a target and its hidden states, small enough that a drafter learns them in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafthouse.config import Settings
from drafthouse.drafter.anchors import generator_for
from drafthouse.drafter.config import DrafterConfig


def tiny_config(**changes: object) -> DrafterConfig:
    values: dict[str, object] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "vocab_size": 20,
        "mask_token_id": 19,
        "max_position_embeddings": 512,
    }
    return DrafterConfig.model_validate(values | changes)


class Head:
    """Embedding, final norm and lm_head with random frozen weights."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, vocab: int, hidden: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(vocab, hidden, generator=generator)
        self.output = torch.randn(vocab, hidden, generator=generator) * hidden**-0.5
        self.scale = 1 + 0.3 * torch.randn(hidden, generator=generator)
        self.lm_head_rows: list[int] = []

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding[ids]

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * self.scale

    def lm_head(self, hidden: Tensor) -> Tensor:
        self.lm_head_rows.append(hidden.shape[0])
        return hidden @ self.output.T


class Spec(Settings):
    target: str
    layer_ids: tuple[int, ...]
    hidden_size: int


@dataclass
class Batch:
    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    hidden_states: Tensor
    last_hidden_state: Tensor


class Source:
    """Documents of an arithmetic token walk, with states that name their token.

    The last hidden state of position t is the one whose logits put most mass on token t+1, so hard and soft
    labels agree. `pause` seconds pass before each batch; before batch number `held_at` it stands still until there is
    a file `go`, so that it is hit between two steps.
    """

    held_at, go = -1, Path()

    def __init__(
        self, config: DrafterConfig, head: Head, *, length: int = 24, prompt: int = 6, pause: float = 0.0
    ) -> None:
        self.config, self.head, self.length, self.prompt, self.pause = config, head, length, prompt, pause
        self.spec = Spec(
            target=config.target_identity, layer_ids=config.target_layer_ids, hidden_size=config.hidden_size
        )
        generator = torch.Generator().manual_seed(5)
        hidden = config.hidden_size
        self.maps = torch.randn(config.num_taps, hidden, hidden, generator=generator) * hidden**-0.5

    def batch(self, rows: int, seed: int, number: int) -> Batch:
        generator = generator_for(seed, number, "data")
        vocab, length = self.config.vocab_size - 1, self.length
        start = torch.randint(0, vocab, (rows, 1), generator=generator)
        stride = torch.randint(1, 4, (rows, 1), generator=generator)
        ids = (start + stride * torch.arange(length + 1)) % vocab
        lengths = torch.randint(length // 2, length + 1, (rows,), generator=generator)
        inside = torch.arange(length) < lengths[:, None]
        mask = inside & (torch.arange(length) >= self.prompt)
        taps = torch.einsum("rsh,khg->rskg", self.head.embed(ids[:, :-1]), self.maps) * inside[..., None, None]
        last = 4 * self.head.output[ids[:, 1:]] * inside[..., None]
        return Batch(ids[:, :-1] * inside, mask.to(torch.uint8), lengths, taps, last)

    def batches(self, rows: int, seed: int, start_step: int) -> Iterator[Batch]:
        number = start_step
        while True:
            time.sleep(self.pause)
            while number == self.held_at and not self.go.exists():
                time.sleep(0.01)
            yield self.batch(rows, seed, number)
            number += 1
