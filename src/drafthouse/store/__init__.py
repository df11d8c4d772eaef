"""Object stores (file, memory, S3), the lease protocol that makes every shard's output appear once, and what the fleet
records: fences, locks, a journal."""

from __future__ import annotations

from drafthouse.store.board import Board, Done, Lease, ShardState
from drafthouse.store.body import DamagedObjectError
from drafthouse.store.fence import Fence, FencedError
from drafthouse.store.journal import Entry, Journal
from drafthouse.store.lock import Held, Holder, Lock
from drafthouse.store.objects import ObjectInfo, Store
from drafthouse.store.translate import ObjectMissingError

__all__ = [
    "Board",
    "DamagedObjectError",
    "Done",
    "Entry",
    "Fence",
    "FencedError",
    "Held",
    "Holder",
    "Journal",
    "Lease",
    "Lock",
    "ObjectInfo",
    "ObjectMissingError",
    "ShardState",
    "Store",
]
