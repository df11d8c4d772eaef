"""Running out of memory, told in one sentence whatever the device calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drafthouse.errors import OutOfMemoryError

# PyTorch's CPU allocator and some drivers raise a plain RuntimeError with one of these in its text.
_FULL = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "out of memory")


@contextmanager
def fits(what: str, *, where: str, fix: str) -> Iterator[None]:
    """Turn an allocation that fails inside into an OutOfMemoryError that says `what` does not fit.

    Args:
        what: the work with its size, e.g. "a batch of 64 rows × 4096 tokens does not fit cuda".
        where: the section of the run file that decides it.
        fix: the settings to change.

    Raises:
        OutOfMemoryError: memory ran out; other errors pass as they are.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        full = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(mark in str(error) for mark in _FULL)
        if not full:
            raise
        raise OutOfMemoryError(what, where=where, fix=fix) from error
