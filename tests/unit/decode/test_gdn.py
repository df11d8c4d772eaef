"""The delta rule over forests against transformers' recurrence on each root path, and against one state a
node.

Tolerance: outputs and states are of order 1, float32 sums over paths of up to 12 nodes differ by less than
5e-5 between the chunk form and the recurrence. Replay repeats the recurrence and is held to 1e-6.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from drafthouse.decode import gdn
from drafthouse.decode.topology import Topology
from tests.unit.decode.forests import parent_rows, root_path

CHUNK: dict[str, Any] = {"rtol": 5e-5, "atol": 5e-5}
EXACT: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
HEADS, KEY, VALUE = 3, 6, 4


def drawn(
    seed: int, rows: int, length: int, *, scale_g: float = 1.0, zero_state: bool = False
) -> tuple[gdn.DeltaInputs, Tensor]:
    """Inputs as a layer makes them: unit keys, scaled unit queries, decays in (0, 1), beta in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, length, HEADS, *shape, generator=generator)

    inputs = gdn.DeltaInputs(
        query=torch.nn.functional.normalize(normal(KEY), dim=-1) * KEY**-0.5,
        key=torch.nn.functional.normalize(normal(KEY), dim=-1),
        value=normal(VALUE),
        g=-scale_g * normal().abs(),
        beta=normal().sigmoid(),
    )
    state = torch.randn(rows, HEADS, KEY, VALUE, generator=generator)
    return inputs, state * 0 if zero_state else state


def recurrence(inputs: gdn.DeltaInputs, state: Tensor, row: int, path: list[int]) -> tuple[Tensor, Tensor]:
    """Transformers' own step-by-step rule over one path: outputs `[len, heads, value]` and the last state."""
    # Its queries come unscaled.
    outputs, last = cast(Any, torch_recurrent_gated_delta_rule)(
        inputs.query[row : row + 1, path] * KEY**0.5,
        inputs.key[row : row + 1, path],
        inputs.value[row : row + 1, path],
        g=inputs.g[row : row + 1, path],
        beta=inputs.beta[row : row + 1, path],
        initial_state=state[row : row + 1].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
    )
    return outputs[0], last[0]


@settings(max_examples=30, deadline=None)
@given(parent_rows(rows=2, longest=12), st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 20.0]))
def test_every_node_gets_what_its_path_run_alone_would_give(rows: list[list[int]], seed: int, scale_g: float) -> None:
    inputs, state = drawn(seed, 2, len(rows[0]), scale_g=scale_g)
    topology = Topology.forest(torch.tensor(rows))
    outputs, _ = gdn.forest_forward(inputs, state, topology)
    torch.testing.assert_close(outputs, gdn.per_node(inputs, state, topology), **CHUNK)
    for row, parents in enumerate(rows):
        for node in range(len(parents)):
            alone, _ = recurrence(inputs, state, row, root_path(parents, node))
            torch.testing.assert_close(outputs[row, node], alone[-1], **CHUNK)


@settings(max_examples=30, deadline=None)
@given(parent_rows(rows=3, longest=12), st.integers(0, 10_000), st.data())
def test_fold_and_replay_commit_the_state_of_the_accepted_path(
    rows: list[list[int]], seed: int, data: st.DataObject
) -> None:
    length = len(rows[0])
    inputs, state = drawn(seed, 3, length)
    topology = Topology.forest(torch.tensor(rows))
    _, updates = gdn.forest_forward(inputs, state, topology)
    leaves = [data.draw(st.integers(-1, length - 1)) for _ in rows]
    paths = [root_path(parents, leaf) for parents, leaf in zip(rows, leaves, strict=True)]
    padded = torch.tensor([path + [0] * (length - len(path)) for path in paths])
    counts = torch.tensor([len(path) for path in paths])
    folded = gdn.fold(inputs, updates, state, topology, torch.tensor(leaves))
    replayed = gdn.replay(inputs, state, padded, counts)
    for row, path in enumerate(paths):
        if path:
            _, expected = recurrence(inputs, state, row, path)
            torch.testing.assert_close(folded[row], expected, **CHUNK)
            torch.testing.assert_close(replayed[row], expected, **EXACT)
        else:
            assert torch.equal(folded[row], state[row])
            assert torch.equal(replayed[row], state[row])


@pytest.mark.parametrize("zero_state", [True, False])
def test_a_chain_as_long_as_a_prefill_chunk_keeps_its_precision(zero_state: bool) -> None:
    inputs, state = drawn(7, 1, 64, scale_g=0.05, zero_state=zero_state)
    topology = Topology.chain(1, 64)
    outputs, updates = gdn.forest_forward(inputs, state, topology)
    expected, last = recurrence(inputs, state, 0, list(range(64)))
    torch.testing.assert_close(outputs[0], expected, rtol=1e-4, atol=1e-4)
    folded = gdn.fold(inputs, updates, state, topology, torch.tensor([63]))
    torch.testing.assert_close(folded[0], last, rtol=1e-4, atol=1e-4)


def test_strong_decay_neither_overflows_nor_gives_nan() -> None:
    """Between branches the difference of path sums can be large and positive; it must not be exponentiated."""
    inputs, state = drawn(1, 1, 4)
    g = torch.tensor([-1.0, -500.0, -500.0, -1.0])[None, :, None].expand(1, 4, HEADS)
    inputs = gdn.DeltaInputs(inputs.query, inputs.key, inputs.value, g, inputs.beta)
    topology = Topology.forest(torch.tensor([[-1, 0, 1, 0]]))
    outputs, updates = gdn.forest_forward(inputs, state, topology)
    assert bool(outputs.isfinite().all())
    torch.testing.assert_close(outputs, gdn.per_node(inputs, state, topology), **CHUNK)
    folded = gdn.fold(inputs, updates, state, topology, torch.tensor([3]))
    assert bool(folded.isfinite().all())


def test_batch_rows_are_independent() -> None:
    inputs, state = drawn(3, 2, 6)
    rows = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, -1]])
    outputs, _ = gdn.forest_forward(inputs, state, Topology.forest(rows))
    other, other_state = drawn(4, 2, 6)
    mixed = gdn.DeltaInputs(
        **{name: torch.stack([getattr(inputs, name)[0], getattr(other, name)[1]]) for name in vars(inputs)}
    )
    changed, _ = gdn.forest_forward(
        mixed, torch.stack([state[0], other_state[1]]), Topology.forest(torch.stack([rows[0], rows[0]]))
    )
    torch.testing.assert_close(changed[0], outputs[0], **EXACT)
    assert not torch.allclose(changed[1], outputs[1], atol=0.1)


def test_branches_do_not_see_each_other() -> None:
    inputs, state = drawn(5, 1, 4)
    topology = Topology.forest(torch.tensor([[-1, 0, 0, 1]]))
    outputs, updates = gdn.forest_forward(inputs, state, topology)
    value = inputs.value.clone()
    value[0, 2] += 100.0
    changed = gdn.DeltaInputs(inputs.query, inputs.key, value, inputs.g, inputs.beta)
    again, updates_again = gdn.forest_forward(changed, state, topology)
    assert torch.equal(again[0, [0, 1, 3]], outputs[0, [0, 1, 3]])
    assert torch.equal(updates_again[0, :, [0, 1, 3]], updates[0, :, [0, 1, 3]])
    assert not torch.allclose(again[0, 2], outputs[0, 2], atol=1.0)
