"""The arithmetic of a training step, counted, so that a rate can be given as a share of the device's peak.

    MFU = floating-point operations that the loss needs / (seconds x peak of the device in bf16)

Counted are products only, 2 operations a multiply-add, and only what has to be done (recomputation and masked slots do
not count). With H hidden, K taps, q and kv the widths of queries and of keys, F feed-forward, L layers, V vocabulary:

    context token   4 K H^2 (fc: forward, weight gradient) + 6 L 2 H kv (keys and values: also input gradient)
    block slot      6 L (2 H q + 2 H kv + 3 H F)
    pair            12 q   a query and a key that it sees: 4 q forward, 8 q backward
    label           4 H V  (lm_head: forward, input gradient; it is frozen)
    taught position 2 H V  (the target's own logits, for soft labels; a position may teach several blocks)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthouse.drafter.config import SLIDING, DrafterConfig

# Dense bf16 peaks of NVIDIA's data sheets, operations a second, by a part of the device's name.
PEAKS = (
    ("H200", 989.5e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.5e12),
    ("A100", 312e12),
    ("RTX A6000", 154.8e12),
)


@dataclass(frozen=True)
class Work:
    """Counts of a step as one vector, on the device of the batch until they are read.

    Attributes:
        counts: [5], context tokens; valid blocks; sum over them of the context tokens that they see on a full layer,
            and on a sliding one; target positions whose distribution is needed, each once.
    """

    counts: Tensor

    @classmethod
    def zeros(cls, device: torch.device) -> Work:
        return cls(torch.zeros(5, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, lengths: Tensor, anchors: Tensor, config: DrafterConfig, *, teacher: bool) -> Work:
        """`lengths` [rows], `anchors` ascending [rows, anchors] with -1 for none at the end."""
        valid = anchors >= 0
        reach = anchors.clamp_min(0)
        near = reach.clamp_max(config.sliding_window) if config.sliding_window else reach
        # Slots 1..B-1 of the block at a are taught by positions a..a+B-2; those of the next block are its own.
        ends = torch.minimum(reach + config.block_size - 1, lengths[:, None] - 1)
        following = torch.cat([anchors[:, 1:], torch.full_like(anchors[:, :1], -1)], dim=1)
        ends = torch.where(following >= 0, torch.minimum(ends, following), ends)
        taught = ((ends - reach).clamp_min(0) * valid).sum() * int(teacher)
        counts = [lengths.sum(), valid.sum(), (reach * valid).sum(), (near * valid).sum(), taught]
        return cls(torch.stack(counts).double())

    def __add__(self, other: Work) -> Work:
        return Work(self.counts + other.counts)

    def flops(self, config: DrafterConfig, labels: float) -> float:
        """Operations of forward and backward; `labels` that met the lm_head."""
        context, blocks, reach, near, taught = self.counts.tolist()
        h, block = config.hidden_size, config.block_size
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        depth = config.num_hidden_layers
        total = context * (4 * config.num_taps * h * h + 12 * depth * h * keys)
        per_slot = 2 * h * queries + 2 * h * keys + 3 * h * config.intermediate_size
        total += blocks * block * 6 * depth * per_slot
        for kind in config.layer_types:
            own = block * (block + 1) / 2 if kind == SLIDING else block * block
            total += 12 * queries * (block * (near if kind == SLIDING else reach) + blocks * own)
        return float(total + config.vocab_size * h * (4 * labels + 2 * taught))


def peak_of(device: torch.device) -> float | None:
    """Dense bf16 peak of the device in operations a second; None where the data sheet is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS if part in name), None)
