"""What of the graph decoder runs without a GPU: its walk, and its refusal. The rest is under tests/gpu."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthouse.decode.graphs import GraphDecoder, _walk
from drafthouse.decode.proposal import Proposal, walk
from drafthouse.decode.topology import Topology
from drafthouse.errors import TargetError
from tests.unit.decode.pairs import Pair


@settings(max_examples=40, deadline=None)
@given(data=st.data(), nodes=st.integers(1, 12))
def test_the_walk_is_that_of_proposals(data: st.DataObject, nodes: int) -> None:
    parents = [-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, nodes))]
    tokens, draws = (data.draw(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes)) for _ in range(2))
    proposal = Proposal(torch.tensor([tokens]), Topology.forest(torch.tensor([parents])))
    path, counts, _ = walk(proposal, torch.tensor([draws]))
    assert _walk(tokens, parents, draws) == path[0, : int(counts)].tolist()


def test_a_cpu_is_refused(dense_pair: Pair) -> None:
    with pytest.raises(TargetError, match="CUDA graphs cannot run on cpu"):
        GraphDecoder(dense_pair.stepper, None, None, 64)
