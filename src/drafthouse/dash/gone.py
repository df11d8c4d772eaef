"""What is no longer there."""

from __future__ import annotations


class GoneError(Exception):
    """The address names something that is not in the snapshot."""
