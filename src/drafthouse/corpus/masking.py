"""Masks of whole batches: borders of answers in bytes against borders of tokens in bytes, and the proof."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from drafthouse.corpus.frames import Filled
from drafthouse.corpus.records import Ids, Mask
from drafthouse.corpus.token_bytes import TokenBytes


def masked(
    encodings: Sequence[Encoding], filled: Sequence[Filled], table: TokenBytes, is_control: npt.NDArray[np.bool_]
) -> list[tuple[Ids, Mask] | None]:
    """input_ids int32 [T] and loss_mask uint8 [T] of every rendering, proven by decoding the batch.

    None for one that is not proven here: its tokens stand for other bytes than its text (a normaliser), a token
    crosses the border of an answer, the mask is empty, or a text of the conversation holds a control token.
    """
    counts = np.array([len(encoding) for encoding in encodings], dtype=np.int64)
    total = int(counts.sum())
    ids = np.fromiter(itertools.chain.from_iterable(one.ids for one in encodings), dtype=np.int32, count=total)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    ends = np.cumsum(table.lengths[ids])
    edges = np.concatenate([[0], ends])  # byte at which token i begins; the last one is the end
    base = edges[bounds]
    sizes = np.array([one.size for one in filled], dtype=np.int64)
    good = np.diff(base) == sizes
    controls = np.concatenate([[0], np.cumsum(is_control[ids])])[bounds]
    good &= np.diff(controls) == np.array([one.controls for one in filled], dtype=np.int64)

    spans = np.array([len(one.borders) for one in filled], dtype=np.int64)
    owner = np.repeat(np.arange(len(filled)), spans)
    borders = np.fromiter(itertools.chain.from_iterable(one.borders for one in filled), dtype=np.int64)
    borders += base[:-1][owner]
    tokens = np.searchsorted(edges, borders)
    crossed = (tokens > total) | (edges[np.minimum(tokens, total)] != borders)
    good[owner[crossed]] = False

    kept = good[owner]
    switch = np.zeros(total + 1, dtype=np.int8)
    np.add.at(switch, tokens[kept & (np.arange(len(borders)) % 2 == 0)], 1)
    np.add.at(switch, tokens[kept & (np.arange(len(borders)) % 2 == 1)], -1)
    mask = np.cumsum(switch[:-1], dtype=np.int8).astype(np.uint8)
    on = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[bounds]
    good &= np.diff(on) > 0

    # The lengths agree sample by sample, so that one comparison speaks for each of them.
    chosen = mask.astype(bool) & np.repeat(good, counts)
    expected = b"".join(one.answers for one, fine in zip(filled, good.tolist(), strict=True) if fine)
    if table.joined(ids[chosen]) != expected:
        for place in np.flatnonzero(good).tolist():
            first, last = bounds[place], bounds[place + 1]
            said = table.joined(ids[first:last][mask[first:last].astype(bool)])
            good[place] = said == filled[place].answers
    starts = bounds.tolist()
    return [
        (ids[first:last], mask[first:last]) if fine else None
        for first, last, fine in zip(starts[:-1], starts[1:], good.tolist(), strict=True)
    ]
