"""Value heads that share a key head: every form gives what it gives when the key heads are written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafthouse.decode import gdn
from drafthouse.decode.topology import Topology

ROWS, KEY_HEADS, GROUPS, KEY, VALUE = 2, 2, 3, 6, 4
PARENTS = [[-1, 0, 0, 1, 2, 4], [-1, -1, 1, 0, 2, 3]]


@pytest.fixture(scope="module")
def shared() -> tuple[gdn.DeltaInputs, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    length, heads = len(PARENTS[0]), KEY_HEADS * GROUPS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(ROWS, *shape, generator=generator)

    inputs = gdn.DeltaInputs(
        query=torch.nn.functional.normalize(normal(length, KEY_HEADS, KEY), dim=-1),
        key=torch.nn.functional.normalize(normal(length, KEY_HEADS, KEY), dim=-1),
        value=normal(length, heads, VALUE),
        g=-normal(length, heads).abs(),
        beta=normal(length, heads).sigmoid(),
    )
    return inputs, normal(heads, KEY, VALUE)


@pytest.fixture(scope="module")
def written_out(shared: tuple[gdn.DeltaInputs, torch.Tensor]) -> gdn.DeltaInputs:
    """Key head i serves value heads 3i to 3i + 2."""
    inputs, _ = shared
    at = [0, 0, 0, 1, 1, 1]
    return dataclasses.replace(inputs, query=inputs.query[:, :, at], key=inputs.key[:, :, at])


def test_passes_over_a_forest(shared: tuple[gdn.DeltaInputs, torch.Tensor], written_out: gdn.DeltaInputs) -> None:
    inputs, state = shared
    topology = Topology.forest(torch.tensor(PARENTS))
    for form in (gdn.forest_forward, gdn.chunk_form):
        for found, expected in zip(form(inputs, state, topology), form(written_out, state, topology), strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(gdn.per_node(inputs, state, topology), gdn.per_node(written_out, state, topology))


def test_commits(shared: tuple[gdn.DeltaInputs, torch.Tensor], written_out: gdn.DeltaInputs) -> None:
    inputs, state = shared
    topology = Topology.forest(torch.tensor(PARENTS))
    _, updates = gdn.forest_forward(inputs, state, topology)
    leaf = torch.tensor([5, 4])
    folded = gdn.fold(inputs, updates, state, topology, leaf)
    assert torch.equal(folded, gdn.fold(written_out, updates, state, topology, leaf))
    path, counts = torch.tensor([[0, 2, 4, 5], [1, 2, 4, 0]]), torch.tensor([4, 3])
    replayed = gdn.replay(inputs, state, path, counts)
    assert torch.equal(replayed, gdn.replay(written_out, state, path, counts))
    torch.testing.assert_close(folded, replayed, rtol=5e-5, atol=5e-5)


def test_on_a_cpu_the_definitions_run(shared: tuple[gdn.DeltaInputs, torch.Tensor]) -> None:
    inputs, state = shared
    topology = Topology.forest(torch.tensor(PARENTS))
    assert torch.equal(gdn.forest_forward(inputs, state, topology)[0], gdn.chunk_form(inputs, state, topology)[0])
