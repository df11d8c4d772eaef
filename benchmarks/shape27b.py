"""The shape of Qwen3.6-27B with random weights, and corpora of random tokens: only time is measured with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from drafthouse.target import Target

SEED = 0
TAPS_27B = (1, 16, 31, 46, 61)  # the layers that the published drafter for Qwen3.6-27B reads
SHAPE_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248_320,
}
SHAPE_SMALL = SHAPE_27B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Sample:
    """Random tokens in the form that the extraction takes."""

    id: str
    kind: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Manifest:
    digest: str
    tokens: int


class RandomCorpus:
    """Shards of random tokens; lengths are given, so that every contender gets the same work."""

    def __init__(self, shards: Sequence[Sequence[int]], vocabulary: int) -> None:
        random = np.random.default_rng(SEED)
        self.manifest = Manifest("0" * 64, sum(map(sum, shards)))
        self._shards = {
            f"shard-{s:05d}": [
                Sample(f"{s}-{i}", "random", random.integers(0, vocabulary, n, dtype=np.int32), np.ones(n, np.uint8))
                for i, n in enumerate(lengths)
            ]
            for s, lengths in enumerate(shards)
        }

    @property
    def shard_names(self) -> list[str]:
        return list(self._shards)

    def shard(self, name: str) -> list[Sample]:
        return self._shards[name]

    @property
    def tokens(self) -> int:
        return sum(len(sample.input_ids) for shard in self._shards.values() for sample in shard)


def long_shards(tokens: int, width: int) -> list[list[int]]:
    """An even number of shards of eight samples of width/2 to width tokens, at least `tokens` together."""
    random = np.random.default_rng(SEED)
    shards: list[list[int]] = []
    while len(shards) % 2 or sum(map(sum, shards)) < tokens:
        shards.append(random.integers(width // 2, width + 1, 8).tolist())
    return shards


def target_of(small: bool, layers: int, device: str) -> Target:
    """A hybrid of the 27B's shape with random weights, made on the device: 54 GB are not copied through the host."""
    shape = SHAPE_SMALL if small else SHAPE_27B
    config = Qwen3_5TextConfig(**shape, num_hidden_layers=layers, tie_word_embeddings=False)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model, identity="random")


def taps_of(layers: int) -> tuple[int, ...]:
    return TAPS_27B if layers == 64 else tuple(sorted({1, layers // 2, layers - 3}))
