"""What preflight says: findings, each with a sentence, a way out and where it is known from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}
NOT_CHECKED = "not-checked"


@dataclass(frozen=True)
class Finding:
    """One thing that is known before launch.

    Attributes:
        id: stable name, for tests and for tools.
        severity: an error stops the launch; a warning is printed; a note informs.
        sentence: what is the case, and what it leads to.
        fix: what to do.
        source: issue, release or documentation that it is known from.
    """

    id: str
    severity: Severity
    sentence: str
    fix: str
    source: str


def error(id: str, sentence: str, fix: str, source: str) -> Finding:
    """A finding that stops the launch."""
    return Finding(id, "error", sentence, fix, source)


def warning(id: str, sentence: str, fix: str, source: str) -> Finding:
    """A finding that is worth a look before launch."""
    return Finding(id, "warning", sentence, fix, source)


def not_checked(what: str, fix: str) -> Finding:
    """A check that could not be made: silence would look like a pass."""
    return Finding(NOT_CHECKED, "note", f"not checked: {what}", fix, "preflight")


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop the launch."""
    return [finding for finding in findings if finding.severity == "error"]


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, notes last; within a severity as they were found."""
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])
