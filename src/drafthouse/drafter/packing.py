"""Many documents in one row: no padding in the context and no empty blocks.

Documents are short and of all lengths, so rows that are padded to the longest waste much of the drafter's work. Packed,
a micro-batch is one row; document numbers keep the attention of each block in its own document (`attention.py`), and
positions start anew with each document, so that the result is the padded one's to the last rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthouse.drafter.attention import Documents

# Sizes are rounded up to these, so that kernels see few different shapes.
CONTEXT_STEP, BLOCK_STEP = 128, 8


@dataclass(frozen=True)
class Packed:
    """One row with the context and the blocks of all documents.

    Attributes:
        taps: [1, context, K, hidden].
        positions: int64 [1, context], within the document; -1 marks padding.
        anchors: int64 [1, blocks], within the document; -1 marks padding.
        tokens: int64 [1, blocks, block].
        documents: numbers of each block's and each context token's document.
        source: int64 [blocks without padding], index into rows * anchors of the padded batch.
    """

    taps: Tensor
    positions: Tensor
    anchors: Tensor
    tokens: Tensor
    documents: Documents
    source: Tensor

    def restore(self, hidden: Tensor, rows: int, anchors: int) -> Tensor:
        """[1, blocks, block, hidden] back to [rows, anchors, block, hidden], empty blocks zero."""
        out = hidden.new_zeros(rows * anchors, *hidden.shape[2:])
        return out.index_copy(0, self.source, hidden[0, : self.source.shape[0]]).view(rows, anchors, *hidden.shape[2:])


def pack(taps: Tensor, lengths: Tensor, anchors: Tensor, tokens: Tensor) -> Packed:
    """Pack a padded micro-batch.

    Args:
        taps: [rows, seq, K, hidden].
        lengths: int64 [rows].
        anchors: int64 [rows, anchors], -1 = none.
        tokens: int64 [rows, anchors, block], the blocks' input ids.
    """
    seq = taps.shape[1]
    # No block looks beyond its anchor: what follows a document's last one is left out too.
    seen = torch.minimum(lengths, anchors.amax(1).clamp_min(0))
    places = torch.arange(seq, device=taps.device)
    row, place = torch.nonzero(places < seen[:, None], as_tuple=True)
    block_row, block = torch.nonzero(anchors >= 0, as_tuple=True)
    extra = -len(row) % CONTEXT_STEP or (CONTEXT_STEP if not len(row) else 0)
    empty = -len(block_row) % BLOCK_STEP or (BLOCK_STEP if not len(block_row) else 0)

    def padded(values: Tensor, count: int, fill: int) -> Tensor:
        return torch.cat([values, values.new_full((count, *values.shape[1:]), fill)])[None]

    return Packed(
        taps=padded(taps[row, place], extra, 0),
        positions=padded(place, extra, -1),
        anchors=padded(anchors[block_row, block], empty, -1),
        tokens=padded(tokens[block_row, block], empty, 0),
        documents=(padded(block_row, empty, -1), padded(row, extra, -1)),
        source=block_row * anchors.shape[1] + block,
    )
