"""A source: something that is asked again and again, and what is known of its answers."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from datetime import UTC, datetime

from drafthouse.dash.model import Known
from drafthouse.errors import DrafthouseError

LIMIT_S = 20.0
"""A look that takes longer counts as a failure, although it may still end. Stores answer or fail within 15 s."""
_log = logging.getLogger(__name__)


class Source(ABC):
    """Asked by one thread of its own, and in tests by `ask`; what it found is read by any other thread.

    Attributes:
        name: for messages.
        pace_s: seconds between two looks.
    """

    def __init__(self, name: str, pace_s: float, *, limit_s: float = LIMIT_S) -> None:
        self.name, self.pace_s, self._limit_s = name, pace_s, limit_s
        self._known = Known()
        self._began: float | None = None
        self._turn = threading.Lock()

    @abstractmethod
    def look(self) -> None:
        """Ask once, and keep the answer. What it raises is kept as the source's error; the last answer stays."""

    def close(self) -> None:
        """Let go of what it holds; it is not asked again."""
        return

    def ask(self) -> None:
        """`look`, and remember how that went."""
        with self._turn:
            asked, error = datetime.now(UTC), None
            self._began = time.monotonic()
            try:
                self.look()
            except DrafthouseError as failure:
                error = str(failure)
            except Exception as failure:
                _log.exception("%s cannot be read", self.name)
                error = f"{self.name}: it cannot be read ({type(failure).__name__}: {failure})"
            finally:
                self._began = None
            answered = datetime.now(UTC) if error is None else self._known.answered
            self._known = Known(asked=asked, answered=answered, error=error)

    @property
    def known(self) -> Known:
        """How its looks went; one that takes too long is a failure as well."""
        began = self._began
        if began is not None and time.monotonic() - began > self._limit_s:
            return self._known.model_copy(update={"error": f"{self.name}: no answer within {self._limit_s:g} s"})
        return self._known
