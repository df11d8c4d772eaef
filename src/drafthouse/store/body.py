"""The JSON bodies of small objects: markers, leases, fences, locks, entries of a journal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from drafthouse.errors import StoreError

LARGEST = 4 << 20
"""Bytes of such an object; ours have a few hundred, the largest (a shard's marker with its counts) some thousand."""
LARGEST_COUNT = 2**63 - 1
"""A size or a number of tokens beyond this was never counted."""


class DamagedObjectError(StoreError):
    """An object is there and does not hold what was written: cut short, overwritten by somebody else."""


def to_body(value: Mapping[str, Any]) -> bytes:
    """`value` as the bytes of an object: one line of JSON with sorted keys."""
    return json.dumps(value, sort_keys=True).encode()


def from_body(body: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `body`, which was read at `where`.

    Raises:
        DamagedObjectError: it is none.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DamagedObjectError(
            "this object is not the JSON that was written there", where=where, fix="see who else writes there"
        )
    return value
