"""What the target remembers of the committed text: KV of attention layers, window and state of GDN layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class AttentionState:
    """Keys and values `[rows, kv_heads, capacity + 1, head_dim]`, rotated; valid up to the row's length."""

    key: Tensor
    value: Tensor

    def select(self, rows: Tensor) -> AttentionState:
        return AttentionState(self.key[rows], self.value[rows])


@dataclass
class DeltaState:
    """Last inputs of the convolution `[rows, width - 1, channels]`, oldest first, and the float32 recurrent
    state `[rows, heads, key_dim, value_dim]`."""

    window: Tensor
    recurrent: Tensor

    def select(self, rows: Tensor) -> DeltaState:
        return DeltaState(self.window[rows], self.recurrent[rows])


LayerState = AttentionState | DeltaState


@dataclass
class TargetState:
    """One entry a decoder layer, and the number of committed tokens of each row `[rows]` int64."""

    layers: list[LayerState]
    lengths: Tensor
    capacity: int

    @property
    def rows(self) -> int:
        return int(self.lengths.shape[0])

    def select(self, rows: Tensor) -> TargetState:
        """Keep only these rows: finished ones leave the batch."""
        return TargetState([layer.select(rows) for layer in self.layers], self.lengths[rows], self.capacity)


def scatter_rows(cache: Tensor, new: Tensor, starts: Tensor, path: Tensor, counts: Tensor) -> None:
    """Write nodes `path[r, :counts[r]]` of `new` behind position `starts[r]` of `cache`, in place.

    Args:
        cache: `[rows, heads, capacity + 1, dim]`; the last slot is never read.
        new: `[rows, heads, T, dim]`.
        starts, counts: `[rows]`; path: `[rows, P]`.
    """
    # Of fixed shape, so that a CUDA graph can hold it: nodes that are not kept go to the spare slot at the end.
    steps = torch.arange(path.shape[1], device=path.device)
    spare = cache.shape[2] - 1
    places = torch.where(steps < counts.unsqueeze(1), starts.unsqueeze(1) + steps, spare)
    row = torch.arange(path.shape[0], device=path.device).unsqueeze(1)
    cache[row, :, places] = new[row, :, path]
