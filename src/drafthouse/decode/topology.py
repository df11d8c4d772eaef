"""Which rows of one verification pass may see which: a forest per batch row, chains and trees alike.

A pass runs T nodes at once. Node i has a parent of smaller index, or -1 when it follows the committed text
directly. Everything that a Gated-DeltaNet hybrid needs to treat siblings as alternatives follows from the
parents: who is an ancestor of whom (attention mask, delta-rule system), how deep a node is (RoPE position) and
which earlier inputs the causal convolution reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Topology:
    """The forest of one pass.

    Attributes:
        parents: `[rows, T]` int64, -1 for a root; parents[r, i] < i.
        depth: `[rows, T]` int64, 0 for a root.
        visible: `[rows, T, T]` bool; visible[r, i, j] = node j is node i or one of its ancestors.
        is_chain: every node follows the one before it; cheaper kernels exist for that.
    """

    parents: Tensor
    depth: Tensor
    visible: Tensor
    is_chain: bool = False

    @classmethod
    def chain(cls, rows: int, length: int, device: torch.device | str = "cpu") -> Topology:
        """Every node follows the one before it."""
        index = torch.arange(length, device=device)
        visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return cls(
            (index - 1).expand(rows, length),
            index.expand(rows, length),
            visible.expand(rows, length, length),
            is_chain=True,
        )

    @classmethod
    def forest(cls, parents: Tensor) -> Topology:
        """From parents `[rows, T]` in topological order.

        Raises:
            ValueError: a parent does not come before its child.
        """
        length = parents.shape[1]
        index = torch.arange(length, device=parents.device)
        if bool((parents >= index).any()) or bool((parents < -1).any()):
            raise ValueError("a parent must come before its child")
        # Paths of one step, then of two, four, ...: a handful of products where a loop over the nodes would launch
        # hundreds of kernels. The counts of float32 are exact far beyond any tree.
        steps = (parents.unsqueeze(-1) == index) | (index.unsqueeze(-1) == index)
        reached = 1
        while reached < length:
            steps = (steps.float() @ steps.float()) > 0
            reached *= 2
        return cls(parents, steps.sum(-1) - 1, steps)

    @property
    def length(self) -> int:
        return int(self.parents.shape[1])

    def window(self, width: int) -> Tensor:
        """What a causal convolution reads: `[rows, T, width]` indices into [committed window | nodes].

        The committed window holds the last `width - 1` inputs before the pass, oldest first. Entry `width - 1`
        is the node itself, entry `width - 2` its parent, and so on; where the ancestors end, the window begins.
        """
        rows, length = self.parents.shape
        history = width - 1
        node = torch.arange(length, device=self.parents.device).expand(rows, length)
        padded = torch.cat([self.parents, self.parents.new_full((rows, 1), -1)], dim=1)
        columns = []
        for back in range(width):
            inside = back <= self.depth
            columns.append(torch.where(inside, node + history, history - (back - self.depth)))
            node = padded.gather(1, torch.where(node < 0, length, node))
        return torch.stack(columns[::-1], dim=-1)

    def path(self, node: Tensor) -> Tensor:
        """Root path of `node` `[rows]`: `[rows, T]` bool, the node and its ancestors."""
        row = torch.arange(self.parents.shape[0], device=self.parents.device)
        return self.visible[row, node]
