"""The attention rule of `attention.py` for PyTorch's FlexAttention: tiles that nobody sees are never computed.

With ascending anchors a tile of queries sees a prefix of the context and one tile of its own blocks, so about half of
the context's tiles are skipped and the mask costs no memory. On CUDA the kernel is compiled; elsewhere PyTorch runs the
same definition uncompiled, which is for checking only (it has no backward pass on a CPU).

Which tiles are seen follows from anchors and positions, block by block and not query by query: a few operations on
[blocks, context] booleans. (`create_block_mask` evaluates the rule for every pair of a query and a key, and compiling
it takes longer than compiling the attention itself.) All layer types share one rule, whose constants are tensors, so
that one compiled layer serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

TILE = 128
ENDLESS = 2**30
# Left to itself, less than a tile of queries goes to a kernel for decoding, which has no configuration for such masks.
_OPTIONS = {"BACKEND": "TRITON"}


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def flex_mask(
    anchors: Tensor,
    context_positions: Tensor,
    block_size: int,
    window: int | None,
    documents: tuple[Tensor, Tensor] | None = None,
) -> BlockMask:
    """The mask of one layer type over [context, padded to whole tiles | all blocks].

    Arguments as in `attention.block_mask`.
    """
    extra = -context_positions.shape[1] % TILE
    positions = F.pad(context_positions, (0, extra), value=-1)
    length = positions.shape[1]
    reach = torch.tensor(ENDLESS if window is None else window, device=anchors.device)
    causal = torch.tensor(window is not None, device=anchors.device)
    of_block, of_token = (None, None) if documents is None else (documents[0], F.pad(documents[1], (0, extra)))

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        anchor = anchors[row, block]
        inside = key < length
        own = key - length
        distance = slot - own % block_size
        seen = ~inside & (own // block_size == block) & (~causal | (distance >= 0)) & (distance < reach)
        if length:
            place = key.clamp(max=length - 1)
            position = positions[row, place]
            before = inside & (position >= 0) & (position < anchor) & (position > anchor + slot - reach)
            if of_block is not None and of_token is not None:
                before = before & (of_token[row, place] == of_block[row, block])
            seen = seen | before
        return seen

    rows, blocks = anchors.shape
    queries = blocks * block_size
    if TILE % block_size:
        whole: BlockMask = create_block_mask(
            visible, B=rows, H=None, Q_LEN=queries, KV_LEN=length + queries, device=anchors.device
        )
        return whole
    some, full = _tiles(anchors, positions, block_size, reach, of_block, of_token)
    mask: BlockMask = BlockMask.from_kv_blocks(
        *_listed(some), *_listed(full), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(queries, length + queries)
    )
    return mask


def flex_attend(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, mask: BlockMask) -> Tensor:
    """Attention under `flex_mask`; shapes as in `attention.attend`."""
    rows, anchors, block, heads, d = q.shape
    extra = -k.shape[2] % TILE
    keys = torch.cat([F.pad(k, (0, 0, 0, extra)), own_k.flatten(1, 2).transpose(1, 2)], dim=2)
    values = torch.cat([F.pad(v, (0, 0, 0, extra)), own_v.flatten(1, 2).transpose(1, 2)], dim=2)
    alone = q.is_cuda and not torch.compiler.is_compiling()  # not inside a layer that is compiled whole
    run: Any = _compiled(flex_attention) if alone else flex_attention
    queries, shared = q.flatten(1, 2).transpose(1, 2), heads != k.shape[1]
    out: Tensor = run(queries, keys, values, block_mask=mask, enable_gqa=shared, kernel_options=_OPTIONS)
    return out.transpose(1, 2).reshape(rows, anchors, block, heads * d)


def _tiles(
    anchors: Tensor,
    positions: Tensor,
    block_size: int,
    reach: Tensor,
    of_block: Tensor | None,
    of_token: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Tiles of which some pairs are visible, and of which all are; each bool [rows, query tiles, key tiles]."""
    rows, blocks = anchors.shape
    each = TILE // block_size
    padded = F.pad(anchors, (0, -blocks % each), value=-1)
    at, key = padded[:, :, None], positions[:, None, :]
    before = (key >= 0) & (key < at)
    if of_block is not None and of_token is not None:
        before &= F.pad(of_block, (0, -blocks % each), value=-1)[:, :, None] == of_token[:, None, :]
    # Of a block's queries the first sees furthest back, and the last least far.
    any_slot, all_slots = before & (key > at - reach), before & (key > at + (block_size - 1) - reach)
    shape = (rows, padded.shape[1] // each, each, positions.shape[1] // TILE, TILE)
    some = any_slot.view(shape).any(-1).any(2)
    full = all_slots.view(shape).all(-1).all(2)
    own = torch.eye(shape[1], dtype=torch.bool, device=anchors.device).expand(rows, -1, -1)
    return torch.cat([some & ~full, own], dim=-1), torch.cat([full, torch.zeros_like(own)], dim=-1)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many key tiles each query tile has, and which first: [rows, 1, query tiles] and [.., key tiles], int32."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]
