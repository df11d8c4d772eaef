"""MinHash: what is found, what is not, and that the earlier one stays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from drafthouse.corpus import similar
from drafthouse.corpus.similar import BANDS, band_values, later_duplicates, shingles, signatures, words

DRAW = random.Random(0)
VOCABULARY = [f"w{n}" for n in range(5000)]


def text(count: int = 60) -> list[str]:
    return DRAW.choices(VOCABULARY, k=count)


def parts(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    return [(at, values[at : at + 5]) for at in range(0, len(values), 5)]


def dropped(texts: list[list[str]], threshold: float = 0.8, alive: list[bool] | None = None) -> list[int]:
    made = signatures(texts)
    bands = band_values(made)
    living = np.array(alive if alive is not None else [True] * len(texts))
    found = later_duplicates(living, lambda number: parts(bands[number]), lambda rows: made[rows], threshold)
    return np.flatnonzero(found).tolist()


def jaccard(one: list[str], other: list[str]) -> float:
    mine, theirs = set(shingles(one)), set(shingles(other))
    return len(mine & theirs) / len(mine | theirs)


def test_words_without_case_and_punctuation() -> None:
    assert words("It's  ÜBER-good, isn't_it?\n42") == ["it", "s", "über", "good", "isn", "t_it", "42"]


def test_the_later_of_two_near_duplicates_goes() -> None:
    base, other = text(), text()
    near = [*base[:-1], "changed"]
    assert jaccard(base, near) > 0.9
    assert dropped([base, other, near, other]) == [2, 3]
    assert dropped([near, other, base]) == [2]


def test_what_is_merely_alike_stays() -> None:
    base = text()
    half = [*base[:40], *text(20)]
    assert 0.3 < jaccard(base, half) < 0.6
    assert dropped([base, half]) == []


def test_what_was_dropped_before_drops_nobody() -> None:
    base = text()
    assert dropped([base, base], alive=[False, True]) == []


def test_short_texts() -> None:
    assert shingles(["a"]) == ["a"]
    assert shingles([]) == [""]
    assert dropped([["yes"], ["no"], ["yes"]]) == [2]


def test_the_estimate_is_near_the_similarity() -> None:
    base = text(400)
    for share in (0.5, 0.8, 0.95):
        other = base[: int(400 * share)] + text(400 - int(400 * share))
        rows = signatures([base, other])
        assert abs((rows[0] == rows[1]).mean() - jaccard(base, other)) < 0.15


def test_slices_find_what_one_pass_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text() for _ in range(40)]
    texts += [[*one[:-1], "x"] for one in texts[::3]]
    whole = dropped(texts)
    assert len(whole) == 14
    monkeypatch.setattr(similar, "_MOST_AT_ONCE", 7)
    assert dropped(texts) == whole


def test_bands_are_a_row_each() -> None:
    assert band_values(signatures([text(), text(), text()])).shape == (BANDS, 3)
    assert band_values(signatures([])).shape == (BANDS, 0)
