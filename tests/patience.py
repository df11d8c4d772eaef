"""The one way to wait for what somebody else brings about: another process, a thread, a server, the kernel, a page.

A look that is taken once says how fast this machine is; a sleep of a fixed length does so too. Here the look is taken
again and again, so the time only costs where the test fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 120.0
"""Far more than anything here takes on a machine that is not broken."""


def until(
    condition: Callable[[], T],
    what: str,
    seconds: float = SECONDS,
    *,
    every: float = 0.02,
    unless: Callable[[], object] | None = None,
) -> T:
    """The first truthy value of `condition`, which is asked every `every` seconds.

    Args:
        condition: one look. What it raises is a look that failed, and no end of the waiting.
        what: what is waited for, as it stands after "waited 120 s for".
        seconds: after them one last look is taken.
        unless: what makes waiting pointless (the process has ended), in words that are shown: when it is truthy, one
            last look is taken.

    Raises:
        AssertionError: it did not come about; says what was waited for and what was seen last.
    """
    begin = time.monotonic()
    while True:
        why = unless() if unless is not None else None
        waited = time.monotonic() - begin
        error: Exception | None = None
        try:
            seen = condition()
        except Exception as raised:
            seen, error = None, raised  # type: ignore[assignment]
        if seen:
            return seen
        last = f"raised {type(error).__name__}: {error}" if error is not None else f"was {seen!r}"
        if why:
            raise AssertionError(f"waited for {what}: in vain, for {why}; the last look {last}") from error
        if waited > seconds:
            raise AssertionError(f"waited {waited:.0f} s for {what}; the last look {last}") from error
        time.sleep(every)
