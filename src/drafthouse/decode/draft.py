"""The drafter while decoding: context keys and values of committed tokens, and one block at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from drafthouse.decode.state import scatter_rows
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.target import Target


class DraftContext:
    """What the drafter remembers of the text that the target has processed.

    Only context keys and values persist; those of a block are recomputed each round. The last known token is
    not part of the context: the target has not seen it yet.
    """

    def __init__(self, drafter: DFlashDrafter, target: Target, rows: int, capacity: int) -> None:
        config = drafter.config
        shape = (rows, config.num_key_value_heads, capacity + 1, config.head_dim)
        weight = drafter.fc.weight
        self.drafter, self.target = drafter, target
        self.layers = [
            (torch.zeros(shape, dtype=weight.dtype, device=weight.device),) * 2 for _ in range(config.num_hidden_layers)
        ]
        self.layers = [(key.clone(), value.clone()) for key, value in self.layers]
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=weight.device)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        self.layers = [(key[rows], value[rows]) for key, value in self.layers]
        self.lengths = self.lengths[rows]

    @torch.no_grad()
    def extend(self, taps: Tensor, path: Tensor, counts: Tensor, width: int | None = None) -> None:
        """Append the first `counts` `[rows]` nodes of `path` `[rows, P]`; taps `[rows, T, K, hidden]`.

        Args:
            width: nodes of `path` to look at; None: the largest count, which is asked of the device.
        """
        width = int(counts.max()) if width is None else width
        if width == 0:
            return
        row = torch.arange(path.shape[0], device=path.device).unsqueeze(1)
        picked = taps[row, path[:, :width]]
        step = torch.arange(width, device=path.device)
        positions = self.lengths.unsqueeze(1) + step
        context = self.drafter.context(picked.flatten(2).to(self.drafter.fc.weight.dtype))
        order = step.expand(path.shape[0], width)
        for (key, value), (new_key, new_value) in zip(
            self.layers, self.drafter.context_kv(context, positions), strict=True
        ):
            scatter_rows(key, new_key, self.lengths, order, counts)
            scatter_rows(value, new_value, self.lengths, order, counts)
        self.lengths = self.lengths + counts

    @torch.no_grad()
    def propose(self, last: Tensor, width: int | None = None) -> Tensor:
        """Log-probabilities `[rows, block_size - 1, vocab]`, float32, of the tokens after `last` `[rows]`.

        Args:
            width: slots of the context to look at; None: as many as the longest row holds.
        """
        config = self.drafter.config
        block = last.new_full((last.shape[0], 1, config.block_size), config.mask_token_id)
        block[:, 0, 0] = last
        width = int(self.lengths.max()) if width is None else width
        index = torch.arange(width, device=last.device)
        positions = torch.where(index < self.lengths.unsqueeze(1), index, -1)
        hidden = self.drafter.blocks(
            self.target.embed(block).to(self.drafter.fc.weight.dtype),
            self.lengths.unsqueeze(1),
            [(key[:, :, :width], value[:, :, :width]) for key, value in self.layers],
            positions,
        )
        logits = self.target.lm_head(hidden[:, 0, 1:].to(self.target.dtype))
        return logits.float().log_softmax(dim=-1)
