"""Test doubles for the extraction: a small causal torch model with taps, and a corpus in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


class TinyTaps(nn.Module):
    """Layers that mix each token with the mean of those before it: causal, cheap, different everywhere."""

    def __init__(self, *, layers: int = 4, hidden: int = 16, vocab: int = 97, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(vocab, hidden, generator=generator), requires_grad=False)
        self.weights = nn.Parameter(
            torch.randn(layers, hidden, hidden, generator=generator) / hidden**0.5, requires_grad=False
        )
        self.num_layers, self.hidden_size = layers, hidden
        self.identity = f"tiny-{layers}-{hidden}-{seed}"
        self.spoil: Callable[[Tensor], None] | None = None
        """Called with the captured states, to damage them."""
        self.before: Callable[[Tensor], None] | None = None
        """Called with the token ids of each batch, to fail, wait or count."""

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @torch.no_grad()
    def capture(
        self, input_ids: Tensor, lengths: Tensor, layer_ids: Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        if self.before is not None:
            self.before(input_ids)
        rows, seq = input_ids.shape
        if out is None:
            out = torch.empty(rows, seq, len(layer_ids) + 1, self.hidden_size, device=self.device)
        states = self.embedding[input_ids]
        steps = torch.arange(1, seq + 1, device=self.device)[None, :, None]
        for layer, weight in enumerate(self.weights):
            states = states + torch.tanh((states.cumsum(1) / steps + states) @ weight)
            for slot, wanted in enumerate(layer_ids):
                if wanted == layer:
                    out[:, :, slot].copy_(states)
        out[:, :, -1].copy_(states)
        if self.spoil is not None:
            self.spoil(out)
        return out


@dataclass(frozen=True)
class Sample:
    id: str
    kind: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Manifest:
    digest: str
    tokens: int


class MemoryCorpus:
    """Random samples of different lengths, the same for the same arguments."""

    def __init__(self, *, shards: int = 3, samples: int = 5, longest: int = 40, seed: int = 0) -> None:
        random = np.random.RandomState(seed)
        self.shards: dict[str, list[Sample]] = {}
        for shard in range(shards):
            made = []
            for index in range(samples):
                length = int(random.randint(2, longest + 1))
                ids = random.randint(0, 97, length).astype(np.int32)
                mask = (random.rand(length) < 0.5).astype(np.uint8)
                made.append(Sample(f"{shard}/{index}", ("code", "chat")[index % 2], ids, mask))
            text = b"".join(sample.input_ids.tobytes() for sample in made)
            self.shards[hashlib.sha256(text).hexdigest()] = made
        self.manifest = Manifest(hashlib.sha256("".join(self.shards).encode()).hexdigest(), self.tokens)

    @property
    def shard_names(self) -> list[str]:
        return list(self.shards)

    def shard(self, name: str) -> list[Sample]:
        return self.shards[name]

    @property
    def tokens(self) -> int:
        return sum(len(sample.input_ids) for made in self.shards.values() for sample in made)
