"""Near-duplicates by MinHash and locality-sensitive hashing, in memory that does not grow with the corpus.

Broder 1997 ("On the resemblance and containment of documents"): the share of equal entries of two signatures
estimates the Jaccard similarity of the two sets of shingles. Signatures are made by `rensa` (Rust) and lie on disk;
bands (Leskovec et al., "Mining of Massive Datasets", 3.4) are compared one at a time, a slice of their values at a
time. Of a pair that is similar enough, the later one goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from drafthouse.errors import CorpusError

Signatures = npt.NDArray[np.uint32]

PERMUTATIONS = 128
BANDS = 16  # of 8 rows: a pair of Jaccard similarity s meets in a band with 1 - (1 - s^8)^16, i.e. 0.95 at 0.8
SHINGLE = 3  # words
_SEED = 42
_WORDS = re.compile(r"\w+")
_MOST_AT_ONCE = 1 << 16  # band values sorted in one go


def words(text: str) -> list[str]:
    """The words of a text without case and punctuation."""
    return _WORDS.findall(text.lower())


def shingles(said: Sequence[str]) -> list[str]:
    """Three words in a row, of all places; of a shorter text itself."""
    if len(said) <= SHINGLE:
        return [" ".join(said)]
    return [f"{one} {two} {three}" for one, two, three in zip(said, said[1:], said[2:], strict=False)]


def signatures(texts: Sequence[Sequence[str]]) -> Signatures:
    """MinHash signatures uint32 [n, 128] of texts that are given as words.

    Raises:
        CorpusError: rensa is not installed.
    """
    if not texts:
        return np.empty((0, PERMUTATIONS), dtype=np.uint32)
    try:
        from rensa import RMinHash  # type: ignore[import-untyped]
    except ImportError:
        raise CorpusError(
            "near-duplicates are found by the package rensa, which is not installed",
            where="filters.near_duplicates",
            fix="pip install 'drafthouse[corpus]', or set it to null",
        ) from None
    matrix = RMinHash.digest_matrix_from_token_sets([shingles(said) for said in texts], PERMUTATIONS, _SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32)


def band_values(made: Signatures) -> npt.NDArray[np.uint64]:
    """A 64-bit value a band, uint64 [16, n]: equal values mean equal rows (but for collisions of the hash)."""
    rows = PERMUTATIONS // BANDS
    bands = made.reshape(len(made), BANDS, rows).astype(np.uint64)
    value = np.zeros((len(made), BANDS), dtype=np.uint64)
    for row in range(rows):  # FNV-1a over 32-bit words, then a finaliser: neighbours must not share their high bits
        value = (value ^ bands[:, :, row]) * np.uint64(0x100000001B3) + np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return np.ascontiguousarray((value * np.uint64(0xBF58476D1CE4E5B9)).T)


def later_duplicates(
    alive: npt.NDArray[np.bool_],
    band: Callable[[int], Iterable[tuple[int, npt.NDArray[np.uint64]]]],
    signature: Callable[[npt.NDArray[np.int64]], Signatures],
    threshold: float,
) -> npt.NDArray[np.bool_]:
    """Which of the records are near-duplicates of an earlier one.

    Args:
        alive: records that count, bool [n].
        band: the values of one band, uint64, part after part, each with the number of its first record.
        signature: rows of the signatures of some records (ascending numbers), uint32 [m, 128].
        threshold: estimated Jaccard similarity from which a record is dropped.
    """
    dropped = np.zeros(len(alive), dtype=bool)
    slices = max(1, -(-len(alive) // _MOST_AT_ONCE))
    for number in range(BANDS):
        for wanted in range(slices):
            members: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
            values: list[npt.NDArray[np.uint64]] = [np.empty(0, dtype=np.uint64)]
            for first, part in band(number):
                here = slice(first, first + len(part))
                mine = (part >> np.uint64(32)) % np.uint64(slices) == np.uint64(wanted)
                mine &= alive[here] & ~dropped[here]
                members.append(np.flatnonzero(mine) + first)
                values.append(part[mine])
            _compare(np.concatenate(members), np.concatenate(values), signature, threshold, dropped)
    return dropped


def _compare(
    members: npt.NDArray[np.int64],
    values: npt.NDArray[np.uint64],
    signature: Callable[[npt.NDArray[np.int64]], Signatures],
    threshold: float,
    dropped: npt.NDArray[np.bool_],
) -> None:
    """Mark what resembles the first record of its value; `members` ascend, so the first is the earliest."""
    order = np.argsort(values, kind="stable")
    members, values = members[order], values[order]
    first = np.concatenate([[True], values[1:] != values[:-1]]) if len(values) else np.zeros(0, dtype=bool)
    leaders = members[np.maximum.accumulate(np.where(first, np.arange(len(members)), 0))] if len(members) else members
    later, leader = members[~first], leaders[~first]
    for start in range(0, len(later), 4096):
        some, theirs = later[start : start + 4096], leader[start : start + 4096]
        wanted, back = np.unique(np.concatenate([some, theirs]), return_inverse=True)
        rows = signature(wanted)
        alike = (rows[back[: len(some)]] == rows[back[len(some) :]]).mean(axis=1)
        dropped[some[alike >= threshold]] = True
