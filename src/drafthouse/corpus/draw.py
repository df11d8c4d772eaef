"""Seeded choices that are the same on every machine and Python version.

Only `random.Random.random()` is used: the Mersenne Twister behind it is fixed by the language reference,
while `sample` and `randrange` have changed between versions.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A stream of choices that belongs to one key, e.g. `Draw(seed, "lookup", "train", 17)`."""

    __slots__ = ("_next",)

    def __init__(self, *key: str | int) -> None:
        name = "\x1f".join(str(part) for part in key).encode()
        self._next = random.Random(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")).random

    def below(self, bound: int) -> int:
        """An integer in [0, bound)."""
        return int(self._next() * bound)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + int(self._next() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        return self._next() < probability

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self._next() * len(choices))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """A new list in random order (Fisher-Yates)."""
        out = list(items)
        for last in range(len(out) - 1, 0, -1):
            other = int(self._next() * (last + 1))
            out[last], out[other] = out[other], out[last]
        return out

    def distinct(self, choices: Sequence[T], count: int) -> list[T]:
        """`count` different positions of `choices` in random order, for `count` far below len(choices)."""
        taken: list[int] = []
        while len(taken) < count:
            position = int(self._next() * len(choices))
            if position not in taken:
                taken.append(position)
        return [choices[position] for position in taken]
