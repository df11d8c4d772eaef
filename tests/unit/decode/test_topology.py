"""Visibility, depth and convolution windows against plain walks up the tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.decode.topology import Topology
from tests.unit.decode.forests import parent_lists, parent_rows, root_path


@given(parent_rows(rows=2))
def test_a_forest_knows_ancestors_and_depths(rows: list[list[int]]) -> None:
    topology = Topology.forest(torch.tensor(rows))
    assert topology.length == len(rows[0])
    for row, parents in enumerate(rows):
        for node in range(len(parents)):
            path = root_path(parents, node)
            assert int(topology.depth[row, node]) == len(path) - 1
            assert topology.visible[row, node].nonzero().flatten().tolist() == sorted(path)


@given(parent_lists(), st.integers(1, 5))
def test_a_window_holds_the_last_inputs_of_the_nodes_own_path(parents: list[int], width: int) -> None:
    topology = Topology.forest(torch.tensor([parents, parents]))
    windows = topology.window(width)
    assert windows.shape == (2, len(parents), width)
    for node in range(len(parents)):
        # Inputs in the order of the text: the committed window, then the path; the node itself comes last.
        text = [*range(width - 1), *(width - 1 + step for step in root_path(parents, node))]
        assert windows[0, node].tolist() == windows[1, node].tolist() == text[-width:]


@given(parent_rows(rows=3), st.data())
def test_a_path_is_the_node_and_its_ancestors(rows: list[list[int]], data: st.DataObject) -> None:
    nodes = [data.draw(st.integers(0, len(parents) - 1)) for parents in rows]
    paths = Topology.forest(torch.tensor(rows)).path(torch.tensor(nodes))
    for row, (parents, node) in enumerate(zip(rows, nodes, strict=True)):
        assert paths[row].nonzero().flatten().tolist() == root_path(parents, node)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_chain_is_the_forest_in_which_each_follows_the_last(length: int) -> None:
    chain = Topology.chain(3, length)
    forest = Topology.forest((torch.arange(length) - 1).expand(3, length))
    assert torch.equal(chain.parents, forest.parents)
    assert torch.equal(chain.depth, forest.depth)
    assert torch.equal(chain.visible, forest.visible)


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 0, 2], [-1, 3, 0, 0], [-2]])
def test_a_parent_after_its_child_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="a parent must come before its child"):
        Topology.forest(torch.tensor([[-1] * len(parents), parents]))
