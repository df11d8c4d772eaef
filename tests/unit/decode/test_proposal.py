"""Best-first trees against all prefix-closed sets there are, and the walk against a plain one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthouse.decode import proposal
from drafthouse.decode.proposal import Proposal, best_first
from drafthouse.decode.topology import Topology
from tests.unit.decode.forests import root_path

RankPath = tuple[int, ...]


def distributions(depth: int, width: int) -> st.SearchStrategy[list[list[float]]]:
    """Descending log-probabilities `[depth][width]`; equal ones occur."""
    one = st.lists(st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 4.0]), min_size=width, max_size=width)
    return st.lists(one.map(_normalised), min_size=depth, max_size=depth)


def _normalised(weights: list[float]) -> list[float]:
    ordered = sorted(weights, reverse=True)
    return [math.log(weight / sum(ordered)) for weight in ordered]


sizes = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(lambda size: distributions(*size).map(np.array))


def rank_paths(nodes: list[tuple[int, int, int]]) -> list[RankPath]:
    paths: list[RankPath] = [()]
    for parent, level, rank in nodes:
        assert len(paths[parent]) == level
        paths.append((*paths[parent], rank))
    return paths[1:]


def probability(log_probs: np.ndarray, path: RankPath) -> float:
    return math.exp(sum(log_probs[level, rank] for level, rank in enumerate(path)))


def best_closed_set(log_probs: np.ndarray, budget: int) -> float:
    """Largest sum of path probabilities of `budget` nodes that holds the spine and every parent."""
    depth, width = log_probs.shape
    spine = frozenset((0,) * level for level in range(1, depth + 1))

    def larger(chosen: frozenset[RankPath]) -> Iterator[frozenset[RankPath]]:
        for parent in {(), *chosen}:
            if len(parent) < depth:
                for rank in range(width):
                    if (*parent, rank) not in chosen:
                        yield chosen | {(*parent, rank)}

    level = {spine}
    for _ in range(budget - depth):
        level = {bigger for chosen in level for bigger in larger(chosen)} or level
    return max(sum(probability(log_probs, path) for path in chosen) for chosen in level)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 3))
def test_best_first_finds_the_best_closed_set_around_the_spine(log_probs: np.ndarray, extra: int) -> None:
    depth, width = log_probs.shape
    budget = depth + extra
    paths = rank_paths(best_first(log_probs, budget))
    everything = sum(width**level for level in range(1, depth + 1))
    assert len(paths) == len(set(paths)) == min(budget, everything)
    assert paths[:depth] == [(0,) * level for level in range(1, depth + 1)]
    assert all(path[:-1] in {(), *paths[:index]} for index, path in enumerate(paths))
    reached = sum(probability(log_probs, path) for path in paths)
    assert reached == pytest.approx(best_closed_set(log_probs, budget), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(distributions(4, 5).map(np.array), st.integers(4, 40))
def test_what_follows_the_spine_comes_in_falling_probability(log_probs: np.ndarray, budget: int) -> None:
    scores = [probability(log_probs, path) for path in rank_paths(best_first(log_probs, budget))[4:]]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(scores))


@given(distributions(3, 4).map(np.array), st.integers(3, 20))
def test_a_larger_budget_only_adds_nodes(log_probs: np.ndarray, budget: int) -> None:
    assert best_first(log_probs, budget + 1)[:budget] == best_first(log_probs, budget)


def log_probs_of(seed: int, rows: int, depth: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, depth, vocab, generator=generator)).log_softmax(-1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 5), st.integers(2, 30), st.integers(0, 20))
def test_a_tree_holds_the_chain_has_distinct_siblings_and_keeps_its_budget(
    seed: int, rows: int, depth: int, vocab: int, extra: int
) -> None:
    log_probs = log_probs_of(seed, rows, depth, vocab)
    last = torch.arange(rows) % vocab
    budget = depth + extra
    tree, chain = proposal.tree(last, log_probs, budget), proposal.chain(last, log_probs)
    parents = tree.topology.parents.tolist()
    everything = sum(vocab**level for level in range(1, depth + 1))
    assert tree.tokens.shape == (rows, min(budget, everything) + 1)
    assert torch.equal(tree.tokens[:, : depth + 1], chain.tokens)
    assert torch.equal(chain.tokens[:, 0], last)
    assert torch.equal(chain.tokens[:, 1:], log_probs.argmax(-1))
    for row in range(rows):
        assert parents[row][: depth + 1] == list(range(-1, depth))
        assert all(parent >= 0 for parent in parents[row][1:])
        edges = list(zip(parents[row], tree.tokens[row].tolist(), strict=True))[1:]
        assert len(set(edges)) == len(edges)
        assert int(tree.topology.depth[row].max()) == depth


def test_a_small_vocabulary_runs_dry_before_the_budget() -> None:
    tree = proposal.tree(torch.tensor([1, 0]), log_probs_of(0, 2, 2, 2), 100)
    assert tree.tokens.shape == (2, 1 + 2 + 4)
    one = proposal.tree(torch.tensor([0]), torch.zeros(1, 3, 1), 9)
    assert one.tokens.tolist() == [[0, 0, 0, 0]]
    assert one.topology.parents.tolist() == [[-1, 0, 1, 2]]


def test_of_equal_tokens_the_same_tree_comes_every_time() -> None:
    flat = torch.full((1, 3, 6), -math.log(6))
    first, again = (proposal.tree(torch.tensor([0]), flat, 9) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.topology.parents, again.topology.parents)


@pytest.mark.parametrize("budget", [1, 4])
def test_a_budget_below_the_spine_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"a budget of {budget} drafts cannot hold the argmax spine of 5"):
        proposal.tree(torch.tensor([0]), log_probs_of(0, 1, 5, 9), budget)


def test_alone_offers_nothing() -> None:
    offer = proposal.alone(torch.tensor([4, 7]))
    assert offer.tokens.tolist() == [[4], [7]]
    path, counts, bonus = proposal.walk(offer, torch.tensor([[1], [2]]))
    assert (path.tolist(), counts.tolist(), bonus.tolist()) == ([[0], [0]], [1, 1], [1, 2])


def plain_walk(tokens: list[int], parents: list[int], draws: list[int]) -> tuple[list[int], int]:
    path = [0]
    while True:
        wanted = draws[path[-1]]
        children = [i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == wanted]
        if not children:
            return path, wanted
        path.append(children[0])


@st.composite
def offers(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, parents and draws of trees with distinct siblings; other roots stand unreachable beside them."""
    length, rows = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    draws: list[list[int]] = []
    for _ in range(rows):
        own_parents, own_tokens = [-1], [draw(st.integers(0, 2))]
        for node in range(1, length):
            parent = draw(st.integers(-1, node - 1))
            taken = {token for token, other in zip(own_tokens, own_parents, strict=True) if other == parent >= 0}
            token = draw(st.integers(0, 2))
            if token in taken:
                parent = -1
            own_parents.append(parent)
            own_tokens.append(token)
        tokens.append(own_tokens)
        parents.append(own_parents)
        draws.append(draw(st.lists(st.integers(0, 2), min_size=length, max_size=length)))
    return tokens, parents, draws


@settings(max_examples=200, deadline=None)
@given(offers())
def test_walk_follows_the_draws_from_the_root(
    offer: tuple[list[list[int]], list[list[int]], list[list[int]]],
) -> None:
    tokens, parents, draws = offer
    path, counts, bonus = proposal.walk(
        Proposal(torch.tensor(tokens), Topology.forest(torch.tensor(parents))), torch.tensor(draws)
    )
    for row in range(len(tokens)):
        expected, own = plain_walk(tokens[row], parents[row], draws[row])
        assert path[row, : counts[row]].tolist() == expected == root_path(parents[row], expected[-1])
        assert int(bonus[row]) == own
        assert not path[row, counts[row] :].any()
