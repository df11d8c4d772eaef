"""Shares of a quota, and the order that follows from keys alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.corpus.choosing import mixed, shares


@given(
    wanted=st.integers(0, 500),
    sources=st.lists(st.tuples(st.integers(0, 200), st.floats(0.1, 10)), min_size=1, max_size=6),
)
def test_shares_are_filled_as_far_as_there_is_anything(wanted: int, sources: list[tuple[int, float]]) -> None:
    given_ = shares(wanted, sources)
    assert sum(given_) == min(wanted, sum(available for available, _ in sources))
    assert all(0 <= part <= available for part, (available, _) in zip(given_, sources, strict=True))


def test_shares_follow_weights_and_what_one_lacks_the_others_give() -> None:
    assert shares(100, [(1000, 3.0), (1000, 1.0)]) == [75, 25]
    assert shares(100, [(10, 3.0), (1000, 1.0), (1000, 2.0)]) == [10, 30, 60]
    assert shares(7, [(5, 1.0), (5, 1.0)]) == [4, 3]
    assert shares(5, [(0, 1.0)]) == [0]


def test_mixing_is_a_bijection_that_leaves_no_order() -> None:
    keys = np.arange(10_000, dtype=np.uint64)
    made = mixed(keys)
    assert len(np.unique(made)) == 10_000
    assert abs(float(np.corrcoef(np.arange(10_000), made.astype(np.float64))[0, 1])) < 0.05
