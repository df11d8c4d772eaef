"""Training texts as three flat arrays, and their mixing into full rows."""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
import torch

from drafthouse.errors import TargetError
from drafthouse.target.packed import ANSWER, NO_LABEL, OTHER, PackedRows

# Texts that wait for a row with room: the more, the fuller the rows, and the less mixed.
WAITING = 128


class Text(Protocol):
    """One training text: token ids int32 `[length]` and the assistant mask uint8 `[length]`."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def loss_mask(self) -> np.ndarray: ...


@dataclass(frozen=True)
class FlatTexts:
    """Texts one behind another: a hundred million tokens are three arrays, not a million objects.

    Attributes:
        ids: uint16 `[tokens]` (vocabularies up to 65,536).
        mask: uint8 `[tokens]`, 1 on assistant tokens.
        ends: int64 `[texts]`, where each text ends.
    """

    ids: np.ndarray
    mask: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[Text]) -> FlatTexts:
        lengths = [len(text.input_ids) for text in texts]
        ids = [text.input_ids.astype(np.uint16) for text in texts] or [np.zeros(0, np.uint16)]
        masks = [text.loss_mask.astype(np.uint8) for text in texts] or [np.zeros(0, np.uint8)]
        return cls(np.concatenate(ids), np.concatenate(masks), np.cumsum(lengths, dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[FlatTexts]) -> FlatTexts:
        shifts = np.cumsum([0, *(len(part.ids) for part in parts)])
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.mask for part in parts]),
            np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=False)]),
        )

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def text(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask of one text (views)."""
        first, last = self.ends[number - 1] if number else 0, self.ends[number]
        return self.ids[first:last], self.mask[first:last]

    def sha256(self) -> str:
        """sha256 (hex) over ids, mask and borders."""
        digest = hashlib.sha256()
        for array in (self.ids.astype("<u2"), self.mask, self.ends.astype("<i8")):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def packed_rows(texts: FlatTexts, rows: int, width: int, seed: int, pad_id: int) -> Iterator[PackedRows]:
    """Endless batches of full rows; every epoch is a new order of all texts of at most `width` tokens.

    A row begins with the text that has waited longest, and takes the longest of `WAITING` texts that still fits, again
    and again: some hundredth of it stays empty, and none waits for ever.

    Raises:
        TargetError: no text is as short as a row.
    """
    lengths = texts.lengths
    usable = np.flatnonzero(lengths <= width)
    if not len(usable):
        raise TargetError(f"no text of at most {width} tokens", where="width", fix="give wider rows or shorter texts")
    random = np.random.default_rng(seed)

    def order() -> Iterator[tuple[int, int, int]]:
        """Length, place in the order, and number of each text."""
        for epoch in count():
            for place, number in enumerate(random.permutation(usable), start=epoch * len(usable)):
                yield int(lengths[number]), place, int(number)

    source = order()
    waiting = sorted(next(source) for _ in range(WAITING))
    while True:
        ids = np.full((rows, width), pad_id, dtype=np.int64)
        positions = np.zeros((rows, width), dtype=np.int64)
        roles = np.full((rows, width), NO_LABEL, dtype=np.uint8)
        for row in range(rows):
            filled, chosen = 0, min(range(WAITING), key=lambda at: waiting[at][1])
            while chosen >= 0:
                length, _, number = waiting.pop(chosen)
                own, mask = texts.text(number)
                span = slice(filled, filled + length)
                ids[row, span], positions[row, span] = own, np.arange(length)
                roles[row, filled : filled + length - 1] = np.where(mask[1:], ANSWER, OTHER)
                filled += length
                insort(waiting, next(source))
                chosen = bisect_right(waiting, width - filled, key=lambda text: text[0]) - 1
            positions[row, filled:] = np.arange(width - filled)
        labels = np.roll(ids, -1, axis=1)
        yield PackedRows(*(torch.from_numpy(array) for array in (ids, positions, labels, roles)))
