"""What a user of the serving room can do wrong."""

from __future__ import annotations

from drafthouse.errors import ConfigError, DrafthouseError


class ProfileError(ConfigError):
    """A profile that cannot be found, read, or turned into a launch line."""


class FactsError(DrafthouseError):
    """Facts of a node or a model folder that cannot be read."""


class CanaryError(DrafthouseError):
    """A server that cannot be asked at all, or a canary that is switched off."""
