"""The error of everything that a roofline is computed from."""

from __future__ import annotations

from drafthouse.errors import DrafthouseError


class RooflineError(DrafthouseError):
    """A model, hardware entry, profile or measurement that no roofline can be computed from."""
