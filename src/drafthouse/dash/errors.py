"""Errors of this room."""

from __future__ import annotations

from drafthouse.errors import DrafthouseError


class DashError(DrafthouseError):
    """The page cannot be served as it was asked for."""
