"""Writing to local files at a place, from any thread."""

from __future__ import annotations

import os


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` (bytes, contiguous) at `offset` of an open file; releases the interpreter
    meanwhile.

    Raises:
        OSError: the disk is full, or any other reason of the system's.
    """
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
