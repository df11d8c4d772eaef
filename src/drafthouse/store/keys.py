"""Keys of objects: one portable alphabet, so that a key means the same on a disk, in memory and on S3."""

from __future__ import annotations

import re

from drafthouse.errors import StoreError

# No '#': LocalStore reserves 'name#1' for staging files. No '%', blanks or non-ASCII: stores differ in
# escaping.
_SEGMENT = re.compile(r"[A-Za-z0-9._=+@,:~-]{1,200}")
_LONGEST = 900  # S3 allows 1024 bytes for prefix and key together


def check_key(key: str) -> str:
    """Return `key` unchanged when every store can hold it.

    Raises:
        StoreError: an empty segment (also a leading or trailing '/'), '.', '..', a character outside
            letters, digits and ``._=+@,:~-``, a segment over 200 or a key over 900 characters.
    """
    for segment in key.split("/"):
        if segment in {"", ".", ".."}:
            raise StoreError(f"the key '{key}' has an empty, '.' or '..' segment", fix="write it as a/b/c")
        if not _SEGMENT.fullmatch(segment):
            raise StoreError(
                f"'{segment[:60]}' in the key '{key[:120]}' cannot be stored everywhere",
                fix="use up to 200 letters, digits and ._=+@,:~- between slashes",
            )
    if len(key) > _LONGEST:
        raise StoreError(f"the key '{key[:60]}…' is {len(key)} characters long", fix=f"use at most {_LONGEST}")
    return key


def check_prefix(prefix: str) -> str:
    """Like `check_key`, but the empty prefix (everything) is allowed."""
    return check_key(prefix) if prefix else prefix


def segment_of(name: str) -> str:
    """`name` as one key segment: characters that a key cannot hold become '-' (for host names and the
    like)."""
    cleaned = re.sub(r"[^A-Za-z0-9._=+@,:~-]+", "-", name).strip("-.")[:120]
    return cleaned or "unnamed"


def numbered(number: int) -> str:
    """A key segment for an epoch or a turn; below a million they sort as their numbers do."""
    return f"{number:06d}"


def number_of(segment: str) -> int | None:
    """The number of a segment, None when it is none (a stranger's object)."""
    return int(segment) if segment.isascii() and segment.isdigit() else None
