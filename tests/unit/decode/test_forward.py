"""One pass of the target against transformers, node by node, and what commit makes of it.

Tolerances, float32: logits and hidden states of these random targets are of order 10 and go through four
layers; our pass and transformers' differ by less than 5e-4 there, where a wrong position, parent or window
changes them by more than 0.1. States after commit are compared at 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drafthouse.decode import Stepper, forward
from drafthouse.decode.forward import Pass
from drafthouse.decode.state import AttentionState, TargetState
from drafthouse.decode.topology import Topology
from drafthouse.errors import TargetError
from drafthouse.target import Target
from tests.unit.decode.forests import parent_rows, root_path
from tests.unit.target.tiny_models import dense, hybrid, wrapped

NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 5e-4}
STATE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
LENGTHS = (70, 33, 64, 1)
TREES = [
    [-1, 0, 0, 1, 1, 2, 3, 6],
    [-1, 0, 1, 1, 0, 4, 5, 6],
    [-1, -1, 0, 1, 2, 2, 3, 4],
    [-1, 0, 1, 2, 3, 4, 5, 6],
]


@pytest.fixture(scope="module", params=[hybrid, dense, wrapped], ids=["hybrid", "dense", "wrapped"])
def target(request: pytest.FixtureRequest) -> Target:
    make: Callable[..., nn.Module] = request.param
    return Target(make())


def token_ids(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(6, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def texts(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    return token_ids(len(lengths), max(lengths)), torch.tensor(lengths)


def prefilled(stepper: Stepper, extra: int = 12) -> tuple[TargetState, Tensor, Tensor]:
    ids, lengths = texts()
    state = stepper.new_state(len(lengths), int(lengths.max()) + extra)
    stepper.prefill(state, ids, lengths)
    return state, ids, lengths


def reference_logits(target: Target, ids: Tensor) -> Tensor:
    """Transformers' own logits `[seq, vocab]` of one text `[seq]`."""
    return cast(Tensor, cast(Any, target.model)(input_ids=ids[None]).logits[0])


def memory_of(state: TargetState, row: int) -> list[Tensor]:
    """All that is remembered of one row: window and state, or keys and values of its own tokens."""
    length = int(state.lengths[row])
    found = []
    for layer in state.layers:
        if isinstance(layer, AttentionState):
            found += [layer.key[row, :, :length], layer.value[row, :, :length]]
        else:
            found += [layer.window[row], layer.recurrent[row]]
    return found


def assert_same_memory(one: list[Tensor], other: list[Tensor], **tolerance: Any) -> None:
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, **(tolerance or STATE))


def clone(state: TargetState) -> TargetState:
    return state.select(torch.arange(state.rows))


def test_prefill_of_ragged_rows_equals_transformers(target: Target) -> None:
    stepper = Stepper(target, (0, 2, 3))
    ids, lengths = texts()
    state = stepper.new_state(4, 80)
    last, taps = stepper.prefill(state, ids, lengths)
    assert state.lengths.tolist() == list(LENGTHS)
    assert taps.shape == (4, 70, 3, 32)
    captured = target.capture(ids, lengths, (0, 2, 3))
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(stepper.logits(last[row]), reference_logits(target, ids[row, :length])[-1], **NEAR)
        torch.testing.assert_close(taps[row, :length], captured[row, :length, :3], **NEAR)


def test_prefill_leaves_what_transformers_caches(target: Target) -> None:
    stepper = Stepper(target)
    state, ids, _ = prefilled(stepper)
    for row, length in enumerate(LENGTHS):
        cache = cast(Any, target.model)(input_ids=ids[row : row + 1, :length], use_cache=True).past_key_values
        expected = []
        for ours, theirs in zip(state.layers, cache.layers, strict=True):
            if isinstance(ours, AttentionState):
                expected += [theirs.keys[0], theirs.values[0]]
            else:
                conv, recurrent = (
                    states[0] if isinstance(states, dict) else states
                    for states in (theirs.conv_states, theirs.recurrent_states)
                )
                history = ours.window.shape[1]
                expected += [conv[0, :, -history:].t(), recurrent[0]]
        assert_same_memory(memory_of(state, row), expected, **NEAR)


@pytest.mark.parametrize("chunk", [1, 7, 64, 500])
def test_the_prefill_chunk_does_not_matter(target: Target, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(target, (1,))
    ids, lengths = texts((40, 7, 23))
    whole = stepper.new_state(3, 40)
    expected, expected_taps = stepper.prefill(whole, ids, lengths)
    monkeypatch.setattr(forward, "PREFILL_CHUNK", chunk)
    state = stepper.new_state(3, 40)
    last, taps = stepper.prefill(state, ids, lengths)
    torch.testing.assert_close(last, expected, **NEAR)
    for row, length in enumerate((40, 7, 23)):
        torch.testing.assert_close(taps[row, :length], expected_taps[row, :length], **NEAR)
        assert_same_memory(memory_of(state, row), memory_of(whole, row))


def check_every_node(target: Target, trees: list[list[int]], tokens: Tensor) -> Pass:
    stepper = Stepper(target, (0, 3))
    state, ids, lengths = prefilled(stepper)
    passed = stepper.forward(state, tokens, Topology.forest(torch.tensor(trees)))
    logits = stepper.logits(passed.hidden)
    for row, parents in enumerate(trees):
        for node in range(len(parents)):
            path = root_path(parents, node)
            text = torch.cat([ids[row, : lengths[row]], tokens[row, path]])
            torch.testing.assert_close(logits[row, node], reference_logits(target, text)[-1], **NEAR)
    return passed


def test_every_nodes_logits_equal_its_path_run_alone(target: Target) -> None:
    check_every_node(target, TREES, token_ids(4, 8, seed=2))


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(parent_rows(rows=4, longest=7), st.integers(0, 1000))
def test_every_node_of_any_forest_equals_its_path_run_alone(trees: list[list[int]], seed: int) -> None:
    check_every_node(Target(hybrid()), trees, token_ids(4, len(trees[0]), seed))


def test_taps_of_a_pass_are_the_taps_of_the_text(target: Target) -> None:
    tokens = token_ids(4, 8, seed=2)
    passed = check_every_node(target, TREES, tokens)
    ids, lengths = texts()
    for row, parents in enumerate(TREES):
        path = root_path(parents, 7)
        text = torch.cat([ids[row, : lengths[row]], tokens[row, path]])[None]
        captured = target.capture(text, torch.tensor([text.shape[1]]), (0, 3))[0, -len(path) :]
        torch.testing.assert_close(passed.taps[row, path], captured[:, :2], **NEAR)
        torch.testing.assert_close(passed.hidden[row, path], captured[:, 2], **NEAR)


def test_a_pass_changes_nothing_before_commit(target: Target) -> None:
    stepper = Stepper(target)
    state, _, _ = prefilled(stepper)
    before = clone(state)
    stepper.forward(state, token_ids(4, 8), Topology.forest(torch.tensor(TREES)))
    assert torch.equal(state.lengths, before.lengths)
    for ours, old in zip(state.layers, before.layers, strict=True):
        for name, tensor in vars(ours).items():
            assert torch.equal(tensor, getattr(old, name))


@pytest.mark.parametrize("exact", [True, False])
def test_commit_equals_sequential_decoding(target: Target, exact: bool) -> None:
    """Accepted paths of different lengths, against the same tokens one by one and against a longer prefill."""
    stepper = Stepper(target)
    state, ids, lengths = prefilled(stepper)
    tokens, leaves = token_ids(4, 8, seed=2), (7, 4, -1, 0)
    sequential = clone(state)
    passed = stepper.forward(state, tokens, Topology.forest(torch.tensor(TREES)))
    paths = [root_path(parents, leaf) for parents, leaf in zip(TREES, leaves, strict=True)]
    padded = torch.tensor([path + [0] * (8 - len(path)) for path in paths])
    counts = torch.tensor([len(path) for path in paths])
    stepper.commit(state, passed, padded, counts, exact=exact)
    assert state.lengths.tolist() == [n + len(path) for n, path in zip(LENGTHS, paths, strict=True)]
    one = Topology.chain(4, 1)
    for step in range(int(counts.max())):
        alive = (counts > step).long()
        own = tokens.gather(1, padded[:, step : step + 1])
        stepper.commit(sequential, stepper.forward(sequential, own, one), torch.zeros(4, 1, dtype=torch.int64), alive)
    for row, path in enumerate(paths):
        assert_same_memory(memory_of(state, row), memory_of(sequential, row))
        whole = stepper.new_state(1, 100)
        text = torch.cat([ids[row, : lengths[row]], tokens[row, path]])
        stepper.prefill(whole, text[None], torch.tensor([len(text)]))
        assert_same_memory(memory_of(state, row), memory_of(whole, 0))
    # What follows is what transformers says after the whole text.
    following = token_ids(4, 1, seed=9)
    logits = stepper.logits(stepper.forward(state, following, one).hidden)[:, 0]
    for row, path in enumerate(paths):
        text = torch.cat([ids[row, : lengths[row]], tokens[row, path], following[row]])
        torch.testing.assert_close(logits[row], reference_logits(target, text)[-1], **NEAR)


def test_a_row_without_accepted_nodes_keeps_every_bit(target: Target) -> None:
    stepper = Stepper(target)
    state, _, _ = prefilled(stepper)
    before = clone(state)
    passed = stepper.forward(state, token_ids(4, 8), Topology.forest(torch.tensor(TREES)))
    stepper.commit(state, passed, torch.zeros(4, 8, dtype=torch.int64), torch.tensor([1, 0, 0, 1]))
    for row in (1, 2):
        assert_same_memory(memory_of(state, row), memory_of(before, row), rtol=0, atol=0)


def test_many_rounds_do_not_drift(target: Target) -> None:
    """Eight rounds of trees whose paths are accepted in part, against one prefill of the whole text."""
    stepper = Stepper(target)
    ids, lengths = texts((20, 9))
    state = stepper.new_state(2, 60)
    stepper.prefill(state, ids, lengths)
    written = [ids[row, : lengths[row]].tolist() for row in range(2)]
    for number in range(8):
        trees = [TREES[number % 2], TREES[(number + 1) % 2]]
        tokens = token_ids(2, 8, seed=20 + number)
        paths = [root_path(parents, (5 * number + row) % 8) for row, parents in enumerate(trees)]
        padded = torch.tensor([path + [0] * (8 - len(path)) for path in paths])
        passed = stepper.forward(state, tokens, Topology.forest(torch.tensor(trees)))
        stepper.commit(state, passed, padded, torch.tensor([len(path) for path in paths]))
        for row, path in enumerate(paths):
            written[row] += tokens[row, path].tolist()
    for row in range(2):
        whole = stepper.new_state(1, 100)
        stepper.prefill(whole, torch.tensor([written[row]]), torch.tensor([len(written[row])]))
        assert_same_memory(memory_of(state, row), memory_of(whole, 0))


def test_rows_do_not_influence_each_other(target: Target) -> None:
    stepper = Stepper(target)
    state, _, _ = prefilled(stepper)
    tokens, topology = token_ids(4, 8, seed=2), Topology.forest(torch.tensor(TREES))
    together = stepper.logits(stepper.forward(state, tokens, topology).hidden)
    for row in range(4):
        alone = stepper.forward(
            state.select(torch.tensor([row])), tokens[row : row + 1], Topology.forest(torch.tensor([TREES[row]]))
        )
        torch.testing.assert_close(stepper.logits(alone.hidden)[0], together[row], **NEAR)


def test_bfloat16_targets_decode_too() -> None:
    """Weights in bfloat16, recurrent state in float32; logits stay near the float32 ones."""
    exact = Target(hybrid())
    coarse = Target(hybrid().to(torch.bfloat16))
    results = []
    for target in (exact, coarse):
        stepper = Stepper(target, (1,))
        state, _, _ = prefilled(stepper)
        passed = stepper.forward(state, token_ids(4, 8, seed=2), Topology.forest(torch.tensor(TREES)))
        assert passed.taps.dtype == passed.hidden.dtype == target.dtype
        logits = stepper.logits(passed.hidden)
        assert logits.dtype == torch.float32
        results.append(logits)
    correlation = torch.corrcoef(torch.stack([logits.flatten() for logits in results]))[0, 1]
    assert float(correlation) > 0.99


def test_a_layer_type_that_is_not_decoded_here_is_refused() -> None:
    sliding = dense(layer_types=["sliding_attention"] * 4, use_sliding_window=True, sliding_window=8)
    with pytest.raises(TargetError, match="layer type sliding_attention cannot be decoded here"):
        Stepper(Target(sliding))


def test_layer_ids_are_checked_before_anything_runs() -> None:
    with pytest.raises(TargetError, match="layer id 4 is out of range"):
        Stepper(Target(hybrid()), (1, 4))
