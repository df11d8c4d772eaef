"""The gated delta rule over a forest of nodes: chunk form, replay, and a slow oracle.

Per value head, with S the state `[key_dim, value_dim]`, alpha_t = exp(g_t):

    S_t = alpha_t S_parent + k_t u_t^T,   u_t = beta_t (v_t - alpha_t S_parent^T k_t),   o_t = S_t^T q_t

Unrolled along a root path this is a unit lower triangular system over the node and its ancestors only (the WY
form of Gated DeltaNet, arXiv 2412.06464, restricted to ancestors as in arXiv 2607.06763): entries between
branches are exactly zero, so every node gets what its own path run alone would give, from one read of S_0.

Shapes: query, key `[rows, T, key_heads, key_dim]` (L2-normalised, query scaled), value `[rows, T, heads,
value_dim]`, g, beta `[rows, T, heads]`, state `[rows, heads, key_dim, value_dim]`; all float32. Consecutive value
heads share a key head, `heads / key_heads` of them.

On CUDA `forest_forward` and `replay` run as the Triton kernels of `gdn_triton` where these take the shapes; what
stands here is their definition, and what runs elsewhere. TRITON_INTERPRET=1 runs the kernels on the CPU, for tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from drafthouse.decode.topology import Topology


@dataclass(frozen=True)
class DeltaInputs:
    """What one layer keeps of a pass, so that the accepted path can be committed afterwards."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


def forest_forward(inputs: DeltaInputs, state: Tensor, topology: Topology) -> tuple[Tensor, Tensor]:
    """Outputs of every node, and the updates u that `fold` needs.

    Returns:
        output `[rows, T, heads, value_dim]` and u `[rows, heads, T, value_dim]`.
    """
    kernels = _kernels(inputs, state)
    if kernels is not None:
        output, updates = kernels.forest_forward(inputs, state, topology)
        return output, updates
    return chunk_form(inputs, state, topology)


def chunk_form(inputs: DeltaInputs, state: Tensor, topology: Topology) -> tuple[Tensor, Tensor]:
    """`forest_forward` in PyTorch, on any device: the reference of the kernels, and what runs without them."""
    query, key = (_per_value_head(x, inputs).transpose(1, 2) for x in (inputs.query, inputs.key))
    value, g, beta = (x.transpose(1, 2) for x in (inputs.value, inputs.g, inputs.beta))
    cumulative = _path_sums(g, topology)
    gamma = cumulative.exp().unsqueeze(-1)
    decay = _decay(cumulative, topology)
    right = beta.unsqueeze(-1) * (value - gamma * (key @ state))
    if topology.length == 1:
        updates = right
    else:
        system = beta.unsqueeze(-1) * decay * (key @ key.transpose(-1, -2))
        # `unitriangular` takes the diagonal as one and reads only below it.
        updates = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    output = gamma * (query @ state) + (decay * (query @ key.transpose(-1, -2))) @ updates
    return output.transpose(1, 2), updates


def fold(inputs: DeltaInputs, updates: Tensor, state: Tensor, topology: Topology, leaf: Tensor) -> Tensor:
    """State after the root path of `leaf` `[rows]`, from the updates of the pass (-1: nothing accepted).

    One matrix product whatever the length of the path: for prefill. Its rounding differs from step-by-step
    decoding by about 1e-5 relative, which compounds over many rounds; decoding commits with `replay`.
    """
    cumulative = _path_sums(inputs.g.transpose(1, 2), topology)
    row = torch.arange(leaf.shape[0], device=leaf.device)
    at = leaf.clamp_min(0)
    on_path = (topology.path(at) & (leaf >= 0).unsqueeze(-1)).unsqueeze(1)
    total = cumulative[row, :, at]
    weight = (total.unsqueeze(-1) - cumulative).masked_fill(~on_path, -torch.inf).exp()
    decayed = torch.where((leaf >= 0)[:, None], total.exp(), 1.0)[..., None, None] * state
    key = _per_value_head(inputs.key, inputs).transpose(1, 2)
    return decayed + (key * weight.unsqueeze(-1)).transpose(-1, -2) @ updates


def replay(inputs: DeltaInputs, state: Tensor, path: Tensor, counts: Tensor) -> Tensor:
    """State after the first `counts` `[rows]` nodes of `path` `[rows, P]`, one by one as decoding would.

    The accepted path is at most a block long, and this keeps the rounding of sequential decoding.
    """
    kernels = _kernels(inputs, state)
    if kernels is not None:
        following: Tensor = kernels.replay(inputs, state, path, counts)
        return following
    return step_by_step(inputs, state, path, counts)


def step_by_step(inputs: DeltaInputs, state: Tensor, path: Tensor, counts: Tensor) -> Tensor:
    """`replay` in PyTorch, on any device."""
    row = torch.arange(path.shape[0], device=path.device)
    keys = _per_value_head(inputs.key, inputs)
    for step in range(int(counts.max())):
        node = path[:, step]
        k, v = keys[row, node], inputs.value[row, node]
        following = _delta_step(state, k, v, inputs.g[row, node], inputs.beta[row, node])
        alive = step < counts
        # Copying whole states is what a round costs: rows are told apart only where they differ.
        state = following if bool(alive.all()) else torch.where(alive[:, None, None, None], following, state)
    return state


def per_node(inputs: DeltaInputs, state: Tensor, topology: Topology) -> Tensor:
    """The slow oracle: one state a node, each from its parent's; outputs `[rows, T, heads, value_dim]`."""
    rows, length = topology.parents.shape
    row = torch.arange(rows, device=state.device)
    states = torch.stack([state] * (length + 1), dim=1)
    query, key = _per_value_head(inputs.query, inputs), _per_value_head(inputs.key, inputs)
    outputs = []
    for node in range(length):
        parent = torch.where(topology.parents[:, node] < 0, length, topology.parents[:, node])
        after = _delta_step(
            states[row, parent],
            key[:, node],
            inputs.value[:, node],
            inputs.g[:, node],
            inputs.beta[:, node],
        )
        states[:, node] = after
        outputs.append((after * query[:, node].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, dim=1)


def _kernels(inputs: DeltaInputs, state: Tensor) -> ModuleType | None:
    """The Triton kernels, where they can run: on CUDA, and under Triton's interpreter on the CPU."""
    if state.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    kernels = _import_kernels()
    return kernels if kernels is not None and kernels.supports(inputs, state) else None


@functools.cache
def _import_kernels() -> ModuleType | None:
    """Triton comes with PyTorch's CUDA builds for Linux, and with no other."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("drafthouse.decode.gdn_triton")


def _per_value_head(x: Tensor, inputs: DeltaInputs) -> Tensor:
    """`[rows, T, key_heads, key_dim]` as `[rows, T, heads, key_dim]`."""
    groups = inputs.value.shape[2] // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)


def _delta_step(state: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = state * g.exp()[..., None, None]
    update = (value - (key.unsqueeze(-2) @ state).squeeze(-2)) * beta.unsqueeze(-1)
    return state + key.unsqueeze(-1) * update.unsqueeze(-2)


def _path_sums(g: Tensor, topology: Topology) -> Tensor:
    """Sum of g over each node and its ancestors, `[rows, heads, T]`."""
    return g @ topology.visible.transpose(-1, -2).to(g.dtype)


def _decay(cumulative: Tensor, topology: Topology) -> Tensor:
    """exp(G_i - G_j) where j is i or an ancestor, else 0; masked before exp, which could overflow elsewhere."""
    difference = cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)
    return difference.masked_fill(~topology.visible.unsqueeze(1), -torch.inf).exp()
