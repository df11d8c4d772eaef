"""Numbers out of JSON that somebody else wrote: what is no finite number is none at all.

Python's JSON reader takes NaN, 1e400 (infinity) and integers of any length, none of which can be drawn or kept.
"""

from __future__ import annotations

import math
from typing import Any

from drafthouse.store.body import LARGEST_COUNT


def number(value: Any) -> float | None:
    """`value` as a finite number, else None (also of a truth value)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """`value` as a whole number, cut behind the point; None where it is none that anything could count."""
    found = number(value)
    return None if found is None or abs(found) > LARGEST_COUNT else int(value)
