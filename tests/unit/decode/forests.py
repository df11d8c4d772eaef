"""Random forests for property tests, and plain walks over them."""

from __future__ import annotations

from hypothesis import strategies as st


def parent_lists(longest: int = 10) -> st.SearchStrategy[list[int]]:
    """Parents of 1 to `longest` nodes, each -1 or an earlier node."""
    return st.integers(1, longest).flatmap(
        lambda length: st.tuples(*(st.integers(-1, node - 1) for node in range(length))).map(list)
    )


def parent_rows(rows: int, longest: int = 10) -> st.SearchStrategy[list[list[int]]]:
    """Parents of `rows` forests of one size."""
    return st.integers(1, longest).flatmap(
        lambda length: st.lists(
            st.tuples(*(st.integers(-1, node - 1) for node in range(length))).map(list),
            min_size=rows,
            max_size=rows,
        )
    )


def root_path(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, root first."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
