"""What the drafter offers for verification: a chain of argmaxes, or the best-first tree of DDTree.

DDTree (arXiv 2604.12989): one block gives a distribution for each of the next D positions. Treated as
independent, a path's log-probability is the sum of its tokens'; the set of `budget` nodes with the largest sums
is prefix-closed and is found with a heap. We always seed the full argmax spine first: a chain of D tokens is
then contained in every tree, so that a tree never accepts less than the chain would from the same state.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafthouse.decode.topology import Topology


@dataclass(frozen=True)
class Proposal:
    """Nodes to verify: node 0 of every row is the last committed-to token, the others are drafts.

    Attributes:
        tokens: `[rows, T]` int64.
        topology: parents, depths and visibility of the T nodes.
    """

    tokens: Tensor
    topology: Topology


def chain(last: Tensor, log_probs: Tensor) -> Proposal:
    """The argmax of every position after `last` `[rows]`; log_probs `[rows, D, vocab]`."""
    drafts = log_probs.argmax(dim=-1)
    tokens = torch.cat([last.unsqueeze(1), drafts], dim=1)
    return Proposal(tokens, Topology.chain(tokens.shape[0], tokens.shape[1], tokens.device))


def alone(last: Tensor) -> Proposal:
    """No draft at all: autoregressive decoding as the smallest proposal."""
    return Proposal(last.unsqueeze(1), Topology.chain(last.shape[0], 1, last.device))


def tree(last: Tensor, log_probs: Tensor, budget: int) -> Proposal:
    """Best-first tree of `budget` drafts (spine included) behind `last` `[rows]`.

    Args:
        log_probs: `[rows, D, vocab]` float32, normalised over the full vocabulary.
        budget: drafts a row, at least D so that the spine fits.

    Raises:
        ValueError: the budget is smaller than the spine.
    """
    rows, depth, vocab = log_probs.shape
    if budget < depth:
        raise ValueError(f"a budget of {budget} drafts cannot hold the argmax spine of {depth}")
    width = min(budget, vocab)
    top, ids = log_probs.topk(width, dim=-1)
    top_np, ids_np = top.double().cpu().numpy(), ids.cpu().numpy()
    tokens = np.zeros((rows, budget + 1), dtype=np.int64)
    parents = np.full((rows, budget + 1), -1, dtype=np.int64)
    size = 0
    for row in range(rows):
        chosen = best_first(top_np[row], budget)
        size = max(size, len(chosen) + 1)
        for index, (parent, level, rank) in enumerate(chosen, start=1):
            tokens[row, index] = ids_np[row, level, rank]
            parents[row, index] = parent
        # With a vocabulary smaller than the tree the heap can run dry. What is left of the row stays a root of
        # its own, which `walk` cannot reach.
    tokens[:, 0] = last.cpu().numpy()
    device = last.device
    return Proposal(
        torch.from_numpy(tokens[:, :size]).to(device),
        Topology.forest(torch.from_numpy(parents[:, :size]).to(device)),
    )


def best_first(log_probs: np.ndarray, budget: int) -> list[tuple[int, int, int]]:
    """Nodes as (parent index, level, rank), parents first; index 0 is the root, which is not listed.

    Args:
        log_probs: `[D, K]`, descending along K.
        budget: number of nodes; the first D are the argmax spine.
    """
    depth, width = log_probs.shape
    nodes: list[tuple[int, int, int]] = []
    # Heap entry: (-score, order, parent index, level, rank); `order` makes ties deterministic.
    heap: list[tuple[float, int, int, int, int]] = []
    order = 0

    def offer(score: float, parent: int, level: int, rank: int) -> None:
        nonlocal order
        if level < depth and rank < width:
            heapq.heappush(heap, (-score, order, parent, level, rank))
            order += 1

    prefix = 0.0
    for level in range(depth):
        nodes.append((level, level, 0))
        offer(prefix + float(log_probs[level, 1]) if width > 1 else -np.inf, level, level, 1)
        prefix += float(log_probs[level, 0])
    while heap and len(nodes) < budget:
        negative, _, parent, level, rank = heapq.heappop(heap)
        score = -negative
        nodes.append((parent, level, rank))
        index = len(nodes)
        if rank + 1 < width:
            offer(
                score - float(log_probs[level, rank]) + float(log_probs[level, rank + 1]),
                parent,
                level,
                rank + 1,
            )
        if level + 1 < depth:
            offer(score + float(log_probs[level + 1, 0]), index, level + 1, 0)
    return nodes


def walk(proposal: Proposal, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target's draws from the root: the accepted path and the token after it.

    At every node the target has drawn one token (argmax, or a sample). If a child holds it, descend; else it is
    the next bonus token. Every emitted token is the target's own draw, so the result has exactly the target's
    distribution, for chains and trees and at any temperature (arXiv 2604.12989, section 1.3 of its rule).

    Args:
        draws: `[rows, T]` the target's token after each node.

    Returns:
        path `[rows, T]` node indices, root first, padded with 0; counts `[rows]` nodes on it; bonus `[rows]`.
    """
    rows, length = proposal.tokens.shape
    parents = proposal.topology.parents
    row = torch.arange(rows, device=draws.device)
    path = torch.zeros(rows, length, dtype=torch.int64, device=draws.device)
    counts = torch.ones(rows, dtype=torch.int64, device=draws.device)
    node = torch.zeros(rows, dtype=torch.int64, device=draws.device)
    alive = torch.ones(rows, dtype=torch.bool, device=draws.device)
    for _ in range(int(proposal.topology.depth.max())):
        wanted = draws[row, node]
        match = (parents == node.unsqueeze(1)) & (proposal.tokens == wanted.unsqueeze(1))
        alive = alive & match.any(dim=1)
        if not bool(alive.any()):
            break
        node = torch.where(alive, match.int().argmax(dim=1), node)
        path[row[alive], counts[alive]] = node[alive]
        counts = counts + alive
    return path, counts, draws[row, node]
