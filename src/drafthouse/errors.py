"""Errors that a user can cause, each told in one sentence: what was wrong, where, what to do."""

from __future__ import annotations


class DrafthouseError(Exception):
    """Base of every error that the command line turns into one sentence and exit code 2.

    Args:
        what: what is wrong, in the user's words, without a final full stop.
        where: the file, key or object that it was found in.
        fix: what the user can do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        sentence = f"{where}: {what}" if where else what
        super().__init__(f"{sentence}; {fix}" if fix else sentence)


class ConfigError(DrafthouseError):
    """A run file, an override or a combination of settings that cannot work."""


class CorpusError(DrafthouseError):
    """A source, a chat template or a mask that would train on the wrong tokens."""


class TargetError(DrafthouseError):
    """A target model that cannot be loaded, tapped or matched."""


class StoreError(DrafthouseError):
    """An object store that is unreachable, unsafe or full."""


class StatesError(DrafthouseError):
    """A hidden-state shard or run that is damaged or belongs to another specification."""


class DrafterError(DrafthouseError):
    """A drafter config or checkpoint that is incomplete, damaged or made for another target."""


class OutOfMemoryError(DrafthouseError):
    """The batch that was asked for does not fit the device."""


class FleetError(DrafthouseError):
    """A node, a job or the inventory that an operation on the fleet cannot go on with."""
