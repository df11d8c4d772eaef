"""The tile lists of the block-sparse mask against the rule itself, pair by pair.

On a CPU FlexAttention evaluates the rule for every pair and never reads the lists, so nothing else would notice here
that a tile is missing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from drafthouse.drafter.flex import TILE, flex_mask


def listed(counts: Tensor, indices: Tensor, tiles: tuple[int, int]) -> Tensor:
    """Tiles in the lists, bool [rows, query tiles, key tiles]."""
    found = torch.zeros(counts.shape[0], *tiles, dtype=torch.bool)
    for row in range(counts.shape[0]):
        for query in range(tiles[0]):
            found[row, query, indices[row, 0, query, : int(counts[row, 0, query])].long()] = True
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize(("block", "blocks", "length"), [(16, 20, 500), (8, 40, 384), (128, 3, 140)])
def test_tiles_hold_every_visible_pair(block: int, blocks: int, length: int, window: int | None, packed: bool) -> None:
    generator = torch.Generator().manual_seed(block)
    positions = torch.arange(length).repeat(2, 1)
    positions[1, length - 60 :] = -1
    documents = None
    if packed:  # two documents a row, each with positions and ascending anchors of its own
        half = length // 2
        positions = torch.cat([torch.arange(half), torch.arange(length - half)]).repeat(2, 1)
        owner = (torch.arange(length) >= half).long().repeat(2, 1)
        of_block = (torch.arange(blocks) >= blocks // 2).long().repeat(2, 1)
        documents = (of_block, owner)
    anchors = torch.randint(0, length // 2 if packed else length, (2, blocks), generator=generator).sort(dim=1).values
    anchors[1, -2:] = -1
    mask = flex_mask(anchors, positions, block, window, documents)
    queries, keys = mask.seq_lengths
    assert keys - queries == -(-length // TILE) * TILE
    truth = create_mask(mask.mask_mod, 2, 1, queries, keys, device="cpu")[:, 0]
    tiles = (-(-queries // TILE), -(-keys // TILE))
    whole = torch.zeros(2, tiles[0] * TILE, tiles[1] * TILE, dtype=torch.bool)
    whole[:, :queries, :keys] = truth
    grid = whole.view(2, tiles[0], TILE, tiles[1], TILE).transpose(2, 3)
    some, every = grid.any(-1).any(-1), grid.all(-1).all(-1)
    partial = listed(mask.kv_num_blocks, mask.kv_indices, tiles)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices, tiles)
    assert not bool((partial & full).any())
    assert bool((~some | partial | full).all()), "a visible pair lies in no listed tile"
    assert bool((~full | every).all()), "a tile counts as full and is not"
    context = tiles[1] - tiles[0]
    assert torch.equal((partial | full)[:, :, :context], some[:, :, :context]), "tiles that nobody sees are left out"
    if window is None and block == 16 and not packed:
        assert bool(full.any())
