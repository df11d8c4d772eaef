"""Object stores (file, memory, S3) and the lease protocol that makes every shard's output appear once."""

from __future__ import annotations

from drafthouse.store.board import Board, Done, Lease, ShardState
from drafthouse.store.objects import ObjectInfo, Store
from drafthouse.store.translate import ObjectMissingError

__all__ = ["Board", "Done", "Lease", "ObjectInfo", "ObjectMissingError", "ShardState", "Store"]
