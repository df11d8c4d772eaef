"""Triton kernels of the gated delta rule over a forest, for CUDA; `gdn` holds the definitions and the reference.

The ancestor-masked system (I + A) U = R of a value head is solved in blocks of `Tiling.nodes` nodes. Nodes come
after their ancestors, so A is strictly lower triangular whatever the forest looks like. With D the inverses of
its diagonal blocks and L what lies below them, U = D R - (D L) U:

- `_prepare` computes what does not need the state, a tile a program: path sums of the log-decays, D, D L and the
  output's attention P. (Programs of the same launch that form the products with S_0 meanwhile made it slower.)
- `_apply` reads its columns of S_0 once, forms R for all nodes, and finds U in as many products
  with D L as there are blocks behind the first. Nothing else is serial; no state but S_0 is read, none is written.
- `_replay` walks the accepted path with its columns of the state in registers: one read and one write of it.

Node 0, the root of every draft tree, is treated apart: a budget of 64 drafts makes 65 nodes, and then fits blocks.
Products run on the tensor cores as three tf32 products each ("tf32x3"), which keeps float32's precision; plain
tf32 would leave three digits. Sums differ from the reference's only in their order.
"""

# Kernels have no types that a checker knows.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafthouse.decode.topology import Topology

if TYPE_CHECKING:
    from drafthouse.decode.gdn import DeltaInputs

PRECISION = "tf32x3"
# `_apply` holds all nodes of a head at once: more would not fit the registers, and take the PyTorch form. Beyond 65
# a block needs more shared memory than a GeForce has (99 KiB); an A100 and its successors have it.
LONGEST, LONGEST_SMALL = 129, 65
LARGE_SHARED_BYTES = 160 * 1024


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; `of` gives the fastest of those tried on an H200 at the shape of Qwen3.6-27B.

    Attributes:
        nodes: nodes of a block, a power of two of at least 16.
        values: columns of the state that one program of `_apply` holds, at least 16.
        prepare_warps, apply_warps: warps of a program.
        replay_values: columns of the state that one program of `_replay` holds.
    """

    nodes: int = 16
    values: int = 32
    prepare_warps: int = 1
    apply_warps: int = 4
    replay_values: int = 8

    @classmethod
    def of(cls, length: int) -> Tiling:
        """For a pass of `length` nodes."""
        if length <= 17:
            return cls(prepare_warps=4, apply_warps=2)
        if length <= 33:
            return cls(values=16, apply_warps=2)
        if length <= 65:
            return cls()
        # Longer than the usual budgets: correct, not tuned.
        return cls(nodes=32, prepare_warps=4, apply_warps=8)


def cut(length: int, value_dim: int, tiling: Tiling) -> tuple[int, int, int, int]:
    """Nodes behind the root in whole blocks, these blocks, their tiles up to the diagonal, and parts of the state."""
    after_root = max(triton.next_power_of_2(length - 1), tiling.nodes)
    blocks = max(triton.cdiv(length - 1, tiling.nodes), 1)
    return after_root, blocks, blocks * (blocks + 1) // 2, value_dim // min(tiling.values, value_dim)


def longest(shared_bytes: int) -> int:
    """Nodes of the longest pass on a device whose blocks may have `shared_bytes` of shared memory."""
    return LONGEST if shared_bytes >= LARGE_SHARED_BYTES else LONGEST_SMALL


def supports(inputs: DeltaInputs, state: Tensor) -> bool:
    """Whether the kernels take these shapes on this device; else the PyTorch form has to."""
    key_dim, value_dim = state.shape[-2:]
    dims_fit = all(dim >= 16 and dim & (dim - 1) == 0 and dim <= 256 for dim in (key_dim, value_dim))
    tensors = (*vars(inputs).values(), state)
    most = LONGEST
    if state.is_cuda:
        device = torch.cuda.get_device_properties(state.device)
        # ROCm's has no such attribute.
        most = longest(getattr(device, "shared_memory_per_block_optin", device.shared_memory_per_block))
    return (
        dims_fit
        and inputs.key.shape[1] <= most
        and all(x.dtype == torch.float32 and x.device == state.device for x in tensors)
        # The kernels have no backward pass.
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )


def forest_forward(
    inputs: DeltaInputs, state: Tensor, topology: Topology, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """As `gdn.forest_forward`: output `[rows, T, heads, value_dim]`, updates `[rows, heads, T, value_dim]`."""
    query, key, value = inputs.query.contiguous(), inputs.key.contiguous(), inputs.value.contiguous()
    g, beta, state = inputs.g.contiguous(), inputs.beta.contiguous(), state.contiguous()
    rows, length, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    tiling = tiling or Tiling.of(length)
    after_root, blocks, tiles, parts = cut(length, value_dim, tiling)
    sums, from_root = g.new_empty(rows, heads, length), g.new_empty(rows * heads, 2, after_root)
    # Only tiles up to the diagonal are written, and only those are read.
    system, attention = g.new_empty(2, rows * heads, after_root, after_root)
    output, updates = torch.empty_like(value), value.new_empty(rows, heads, length, value_dim)
    visible = topology.visible.view(torch.uint8)
    shape: dict[str, Any] = {
        "length": length,
        "HEADS": heads,
        "KEY_HEADS": key_heads,
        "KEY_DIM": key_dim,
        # Whole operands of these products, in three pieces each, would not fit the registers.
        "CHUNK": min(key_dim, 32),
        "NODES": tiling.nodes,
        "AFTER_ROOT": after_root,
        "PRECISION": PRECISION,
    }
    with torch.cuda.device_of(state):
        _prepare[(tiles, rows * heads)](
            query, key, g, beta, visible, *visible.stride(), sums, from_root, system, attention,
            BLOCKS=blocks, num_warps=tiling.prepare_warps, **shape,
        )  # fmt: skip
        _apply[(parts, rows * heads)](
            query, key, value, g, beta, state, sums, from_root, system, attention, output, updates,
            VALUE_DIM=value_dim, VALUES=value_dim // parts, num_warps=tiling.apply_warps, **shape,
        )  # fmt: skip
    return output, updates


def replay(inputs: DeltaInputs, state: Tensor, path: Tensor, counts: Tensor, tiling: Tiling | None = None) -> Tensor:
    """As `gdn.replay`, without a look at `counts` from the host, so that a CUDA graph can hold it."""
    tiling = tiling or Tiling()
    rows, heads, key_dim, value_dim = state.shape
    state = state.contiguous()
    following = torch.empty_like(state)
    values = min(tiling.replay_values, value_dim)
    with torch.cuda.device_of(state):
        _replay[(value_dim // values, rows * heads)](
            inputs.key.contiguous(), inputs.value.contiguous(), inputs.g.contiguous(), inputs.beta.contiguous(),
            state, path.contiguous(), counts.contiguous(), following, inputs.key.shape[1], path.shape[1],
            HEADS=heads, KEY_HEADS=inputs.key.shape[2], KEY_DIM=key_dim, VALUE_DIM=value_dim, VALUES=values,
            LONGEST=triton.next_power_of_2(path.shape[1]), num_warps=1,
        )  # fmt: skip
    return following


@triton.jit
def _path_sums(g, visible, stride_i, stride_j, nodes, length, HEADS: tl.constexpr, AFTER_ROOT: tl.constexpr):
    """Sum of g over each of `nodes` and its ancestors; 0 behind the last node."""
    every = 1 + tl.arange(0, AFTER_ROOT)
    gates = tl.load(g + every * HEADS, mask=every < length, other=0.0)
    inside = nodes < length
    both = inside[:, None] & (every[None, :] < length)
    seen = tl.load(visible + nodes[:, None] * stride_i + every[None, :] * stride_j, mask=both, other=0)
    under_root = tl.load(visible + nodes * stride_i, mask=inside, other=0)
    return tl.sum(tl.where(seen != 0, gates[None, :], 0.0), axis=1) + tl.where(under_root != 0, tl.load(g), 0.0)


@triton.jit
def _decay(sums, others_sums, nodes, others, visible, stride_i, stride_j, length):
    """exp(G_i - G_j) where j is i or an ancestor, else 0; masked before exp, which could overflow elsewhere."""
    both = (nodes[:, None] < length) & (others[None, :] < length)
    seen = tl.load(visible + nodes[:, None] * stride_i + others[None, :] * stride_j, mask=both, other=0)
    return tl.exp(tl.where(seen != 0, sums[:, None] - others_sums[None, :], float("-inf")))


@triton.jit
def _unit_inverse(below, NODES: tl.constexpr, PRECISION: tl.constexpr):
    """(I + below)^-1 of a strictly lower triangular matrix."""
    place = tl.arange(0, NODES)
    unit = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    # Blocks of 8 as (I - B)(I + B^2)(I + B^4): B^8 = 0. Wider ones would cancel badly where keys repeat.
    inner = tl.where((place // 8)[:, None] == (place // 8)[None, :], below, 0.0)
    square = tl.dot(inner, inner, input_precision=PRECISION)
    inverse = tl.dot(unit - inner, unit + square, input_precision=PRECISION)
    inverse = tl.dot(inverse, unit + tl.dot(square, square, input_precision=PRECISION), input_precision=PRECISION)
    # Two neighbours with what links them: D - D L D.
    for level in tl.static_range(3, 7):
        if 2**level < NODES:
            half = place // 2**level
            linked = (half[:, None] == half[None, :] + 1) & (half[:, None] % 2 == 1)
            link = tl.dot(tl.where(linked, below, 0.0), inverse, input_precision=PRECISION)
            inverse -= tl.dot(inverse, link, input_precision=PRECISION)
    return inverse


@triton.jit
def _start(
    query, key, state, head, part, length, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, AFTER_ROOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys and queries times columns `part` of S_0: two tiles `[AFTER_ROOT, VALUES]`, and two rows of the root."""
    row, key_head = head // HEADS, head % HEADS // (HEADS // KEY_HEADS)
    nodes, dims = 1 + tl.arange(0, AFTER_ROOT), tl.arange(0, CHUNK)
    inside = (nodes < length)[:, None]
    state += head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + (part * VALUES + tl.arange(0, VALUES))[None, :]
    key += (row * length * KEY_HEADS + key_head) * KEY_DIM
    query += (row * length * KEY_HEADS + key_head) * KEY_DIM
    at = nodes[:, None] * (KEY_HEADS * KEY_DIM) + dims[None, :]
    keys_start = tl.zeros((AFTER_ROOT, VALUES), dtype=tl.float32)
    queries_start = tl.zeros((AFTER_ROOT, VALUES), dtype=tl.float32)
    root_key_start = tl.zeros((CHUNK, VALUES), dtype=tl.float32)
    root_query_start = tl.zeros((CHUNK, VALUES), dtype=tl.float32)
    for chunk in range(0, KEY_DIM, CHUNK):
        start = tl.load(state + chunk * VALUE_DIM)
        keys = tl.load(key + at + chunk, mask=inside, other=0.0)
        queries = tl.load(query + at + chunk, mask=inside, other=0.0)
        keys_start = tl.dot(keys, start, keys_start, input_precision=PRECISION)
        queries_start = tl.dot(queries, start, queries_start, input_precision=PRECISION)
        root_key_start += start * tl.load(key + chunk + dims)[:, None]
        root_query_start += start * tl.load(query + chunk + dims)[:, None]
    return keys_start, queries_start, tl.sum(root_key_start, axis=0), tl.sum(root_query_start, axis=0)


@triton.jit
def _prepare(
    query, key, g, beta, visible, stride_r, stride_i, stride_j, sums, from_root, system, attention, length,
    BLOCKS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHUNK: tl.constexpr,
    NODES: tl.constexpr, AFTER_ROOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles up to the diagonal, rows * heads): a tile of the system and of the output's attention, and with the
    diagonal's, what the root does."""
    tile, head = tl.program_id(0), tl.program_id(1)
    # Tiles are counted by rows: 0 is (0, 0), 1 and 2 are (1, 0) and (1, 1), and so on.
    block = 0
    for below in tl.static_range(1, BLOCKS):
        block += (tile >= below * (below + 1) // 2).to(tl.int32)
    earlier = tile - block * (block + 1) // 2
    row, value_head = head // HEADS, head % HEADS
    key_head = value_head // (HEADS // KEY_HEADS)
    place, dims = tl.arange(0, NODES), tl.arange(0, CHUNK)
    nodes, others = 1 + block * NODES + place, 1 + earlier * NODES + place
    inside = nodes < length
    g += row * length * HEADS + value_head
    visible += row * stride_r
    key += (row * length * KEY_HEADS + key_head) * KEY_DIM
    query += (row * length * KEY_HEADS + key_head) * KEY_DIM
    at = nodes[:, None] * (KEY_HEADS * KEY_DIM) + dims[None, :]
    at_others = others[:, None] * (KEY_HEADS * KEY_DIM) + dims[None, :]
    own = tl.zeros((NODES, NODES), dtype=tl.float32)
    system_tile = tl.zeros((NODES, NODES), dtype=tl.float32)
    attention_tile = tl.zeros((NODES, NODES), dtype=tl.float32)
    keys_root = tl.zeros((NODES,), dtype=tl.float32)
    queries_root = tl.zeros((NODES,), dtype=tl.float32)
    for chunk in range(0, KEY_DIM, CHUNK):
        keys = tl.load(key + at + chunk, mask=inside[:, None], other=0.0)
        queries = tl.load(query + at + chunk, mask=inside[:, None], other=0.0)
        others_keys = tl.trans(tl.load(key + at_others + chunk, mask=(others < length)[:, None], other=0.0))
        root_key = tl.load(key + chunk + dims)
        own = tl.dot(keys, tl.trans(keys), own, input_precision=PRECISION)
        system_tile = tl.dot(keys, others_keys, system_tile, input_precision=PRECISION)
        attention_tile = tl.dot(queries, others_keys, attention_tile, input_precision=PRECISION)
        keys_root += tl.sum(keys * root_key[None, :], axis=1)
        queries_root += tl.sum(queries * root_key[None, :], axis=1)
    weight = tl.load(beta + (row * length + nodes) * HEADS + value_head, mask=inside, other=0.0)
    own_sums = _path_sums(g, visible, stride_i, stride_j, nodes, length, HEADS, AFTER_ROOT)
    others_sums = _path_sums(g, visible, stride_i, stride_j, others, length, HEADS, AFTER_ROOT)
    own *= weight[:, None] * _decay(own_sums, own_sums, nodes, nodes, visible, stride_i, stride_j, length)
    decay = _decay(own_sums, others_sums, nodes, others, visible, stride_i, stride_j, length)
    inverse = _unit_inverse(tl.where(place[:, None] > place[None, :], own, 0.0), NODES, PRECISION)
    tile = head * AFTER_ROOT * AFTER_ROOT + (block * NODES + place)[:, None] * AFTER_ROOT
    tile += (earlier * NODES + place)[None, :]
    tl.store(attention + tile, decay * attention_tile)
    if earlier == block:
        tl.store(system + tile, inverse)
        under_root = tl.load(visible + nodes * stride_i, mask=inside, other=0) != 0
        root_decay = tl.exp(tl.where(under_root, own_sums - tl.load(g), float("-inf")))
        tl.store(sums + head * length + nodes, own_sums, mask=inside)
        at_root = from_root + head * 2 * AFTER_ROOT + block * NODES + place
        tl.store(at_root, weight * root_decay * keys_root)
        tl.store(at_root + AFTER_ROOT, root_decay * queries_root)
    else:
        tl.store(system + tile, tl.dot(inverse, weight[:, None] * decay * system_tile, input_precision=PRECISION))


@triton.jit
def _apply(
    query, key, value, g, beta, state, sums, from_root, system, attention, output, updates, length,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHUNK: tl.constexpr, NODES: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, AFTER_ROOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (value_dim / VALUES, rows * heads)."""
    part, head = tl.program_id(0), tl.program_id(1)
    row, value_head = head // HEADS, head % HEADS
    place, columns = tl.arange(0, AFTER_ROOT), part * VALUES + tl.arange(0, VALUES)
    nodes = 1 + place
    inside = nodes < length
    value += (row * length * HEADS + value_head) * VALUE_DIM
    output += (row * length * HEADS + value_head) * VALUE_DIM
    updates += head * length * VALUE_DIM
    gates = row * length * HEADS + value_head
    at_values = nodes[:, None] * (HEADS * VALUE_DIM) + columns[None, :]
    # Early, so that these travel while the products with the state are formed.
    values = tl.load(value + at_values, mask=inside[:, None], other=0.0)
    tile = head * AFTER_ROOT * AFTER_ROOT + place[:, None] * AFTER_ROOT + place[None, :]
    block, other_block = (place // NODES)[:, None], (place // NODES)[None, :]
    written = (block * NODES + 1 < length) & (other_block <= block)
    solver = tl.load(system + tile, mask=written, other=0.0)

    keys_start, queries_start, root_key_start, root_query_start = _start(
        query, key, state, head, part, length,
        HEADS, KEY_HEADS, KEY_DIM, CHUNK, VALUE_DIM, VALUES, AFTER_ROOT, PRECISION,
    )  # fmt: skip

    # Node 0 alone, so that the one node more than the budget costs no block of its own.
    at_root = (row * length * KEY_HEADS + value_head // (HEADS // KEY_HEADS)) * KEY_DIM + tl.arange(0, KEY_DIM)
    root_attention = tl.sum(tl.load(query + at_root) * tl.load(key + at_root), axis=0)
    root_gamma = tl.exp(tl.load(g + gates))
    root_update = (tl.load(value + columns) - root_gamma * root_key_start) * tl.load(beta + gates)
    root_result = root_gamma * root_query_start + root_attention * root_update
    tl.store(updates + columns, root_update)
    tl.store(output + columns, root_result)

    from_root += head * 2 * AFTER_ROOT + place
    root_keys = tl.load(from_root, mask=inside, other=0.0)[:, None]
    root_queries = tl.load(from_root + AFTER_ROOT, mask=inside, other=0.0)[:, None]
    weight = tl.load(beta + gates + nodes * HEADS, mask=inside, other=0.0)[:, None]
    gamma = tl.exp(tl.load(sums + head * length + nodes, mask=inside, other=0.0))[:, None]
    attended = tl.load(attention + tile, mask=written, other=0.0)
    right = weight * (values - gamma * keys_start) - root_keys * root_update[None, :]
    right = tl.dot(tl.where(block == other_block, solver, 0.0), right, input_precision=PRECISION)
    own = right
    if AFTER_ROOT > NODES:
        links = tl.where(block == other_block, 0.0, solver)
        # Each round makes one more block of nodes final, from final ones: forward substitution.
        for _ in tl.static_range(AFTER_ROOT // NODES - 1):
            own = right - tl.dot(links, own, input_precision=PRECISION)
    tl.store(updates + nodes[:, None] * VALUE_DIM + columns[None, :], own, mask=inside[:, None])
    result = gamma * queries_start + root_queries * root_update[None, :]
    result = tl.dot(attended, own, result, input_precision=PRECISION)
    tl.store(output + at_values, result, mask=inside[:, None])


@triton.jit
def _replay(
    key, value, g, beta, state, path, counts, following, length, path_length,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(0), tl.program_id(1)
    row, value_head = head // HEADS, head % HEADS
    key_head = value_head // (HEADS // KEY_HEADS)
    dims, columns = tl.arange(0, KEY_DIM), part * VALUES + tl.arange(0, VALUES)
    at = (head * KEY_DIM + dims[:, None]) * VALUE_DIM + columns[None, :]
    memory = tl.load(state + at)
    count = tl.load(counts + row)
    steps = tl.arange(0, LONGEST)
    # The whole path at once: an index loaded in each step would be one more trip to memory in a chain of them.
    nodes = tl.load(path + row * path_length + steps, mask=steps < count, other=0)
    key += (row * length * KEY_HEADS + key_head) * KEY_DIM + dims
    value += (row * length * HEADS + value_head) * VALUE_DIM + columns
    g += row * length * HEADS + value_head
    beta += row * length * HEADS + value_head
    node = tl.sum(tl.where(steps == 0, nodes, 0), axis=0)
    keys, values = tl.load(key + node * (KEY_HEADS * KEY_DIM)), tl.load(value + node * (HEADS * VALUE_DIM))
    gate, weight = tl.load(g + node * HEADS), tl.load(beta + node * HEADS)
    for step in range(count):
        # The next node's inputs travel while this one is worked on; behind the end they are node 0's.
        node = tl.sum(tl.where(steps == step + 1, nodes, 0), axis=0)
        next_keys = tl.load(key + node * (KEY_HEADS * KEY_DIM))
        next_values = tl.load(value + node * (HEADS * VALUE_DIM))
        next_gate, next_weight = tl.load(g + node * HEADS), tl.load(beta + node * HEADS)
        memory *= tl.exp(gate)
        update = (values - tl.sum(memory * keys[:, None], axis=0)) * weight
        memory += keys[:, None] * update[None, :]
        keys, values, gate, weight = next_keys, next_values, next_gate, next_weight
    tl.store(following + at, memory)
