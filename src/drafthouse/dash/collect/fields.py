"""Fields of JSON objects that somebody else wrote: which of them do not hold what they should.

A field that is absent or null is right everywhere: other versions write others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drafthouse.dash.collect.numbers import whole

Right = Callable[[Any], bool]


def odd(said: Mapping[str, Any], fields: Mapping[str, Right]) -> tuple[str, ...]:
    """Names of the fields in `said` that hold something else than `fields` says."""
    return tuple(name for name, right in fields.items() if said.get(name) is not None and not right(said[name]))


def text(value: Any) -> bool:
    """A text."""
    return isinstance(value, str)


def figure(value: Any) -> bool:
    """A number, also one that is not finite: what is computed may come to that."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def count(value: Any) -> bool:
    """A whole number from 0 on."""
    found = whole(value)
    return found is not None and found == value and found >= 0


def sentence(where: str, what: str, names: tuple[str, ...]) -> str:
    """Which fields of the object at `where`, which should be `what`, are odd."""
    listed = ", ".join(f"'{name}'" for name in names)
    return f"{where}: this is not {what} (see {listed}); see who else writes there"
