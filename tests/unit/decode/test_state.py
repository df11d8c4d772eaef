"""The target's memory: writing accepted nodes behind the committed text, and keeping some rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.decode.state import AttentionState, DeltaState, TargetState, scatter_rows


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4), st.data())
def test_nodes_are_written_behind_each_rows_own_length(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    nodes, capacity = 5, 8
    starts = torch.tensor([start for start, _ in rows])
    counts = torch.tensor([count for _, count in rows])
    path = torch.tensor([[data.draw(st.integers(0, nodes - 1)) for _ in range(3)] for _ in rows])
    new = torch.randn(len(rows), 2, nodes, 3, generator=torch.Generator().manual_seed(0))
    cache = torch.zeros(len(rows), 2, capacity + 1, 3)
    expected = cache.clone()
    for row, (start, count) in enumerate(rows):
        for step in range(count):
            expected[row, :, start + step] = new[row, :, path[row, step]]
    scatter_rows(cache, new, starts, path, counts)
    assert torch.equal(cache[:, :, :capacity], expected[:, :, :capacity])  # the last slot is never read


def test_select_keeps_rows_and_does_not_share_them() -> None:
    attention = AttentionState(torch.arange(3.0)[:, None, None, None], torch.arange(3.0)[:, None, None, None])
    delta = DeltaState(torch.arange(3.0)[:, None, None], torch.arange(3.0)[:, None, None, None])
    state = TargetState([attention, delta], torch.tensor([5, 6, 7]), capacity=9)
    kept = state.select(torch.tensor([2, 0]))
    assert (kept.rows, kept.capacity, kept.lengths.tolist()) == (2, 9, [7, 5])
    for layer in kept.layers:
        for tensor in vars(layer).values():
            assert tensor.flatten().tolist() == [2.0, 0.0]
            tensor.zero_()
    assert state.rows == 3
    assert attention.key.flatten().tolist() == delta.recurrent.flatten().tolist() == [0.0, 1.0, 2.0]
