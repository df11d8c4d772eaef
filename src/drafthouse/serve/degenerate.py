"""Degenerate output, seen from the text alone: loops, stuck tokens, a vocabulary that has collapsed.

A server with a dropped all-reduce or a corrupted state starts, answers 200 and writes "lambda lambda lambda" or
"!!!!"; no exit code shows it. The limits are loose on purpose: code, tables and lists repeat themselves honestly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"\w+|[^\w\s]")
# A unit of up to eight characters, twelve times and more, with nothing between.
_STUCK = re.compile(r"(\S{1,8}?)\1{11,}")
# Rulers of Markdown and tables are long runs of these; only an endless one is a fault.
_RULER = set("-=_*~.#+|─═ ")
_RULER_LIMIT = 200
WINDOW = 64
_LONGEST_PERIOD = 24
_MIN_LOOP_WORDS = 24


@dataclass(frozen=True)
class Loop:
    """A unit of words that repeats without a break."""

    unit: str
    repeats: int


@dataclass(frozen=True)
class Verdict:
    """What was found in one text.

    Attributes:
        words: how many.
        distinct: distinct words / words in the poorest window of 64.
        loop: the longest repetition that counts as one, or None.
        stuck: the unit of a run of characters without a break, or None.
        reasons: why the text is degenerate, as sentences; empty: it is not.
    """

    words: int
    distinct: float
    loop: Loop | None
    stuck: str | None
    reasons: tuple[str, ...]

    @property
    def degenerate(self) -> bool:
        return bool(self.reasons)


def inspect(text: str, min_distinct: float = 0.3) -> Verdict:
    """Judge one answer.

    Args:
        min_distinct: smallest share of distinct words in any window of 64 words (fewer are not judged by it).
    """
    words = split_words(text)
    distinct, loop, stuck = distinct_ratio(words), ngram_loop(words), stuck_characters(text)
    reasons = []
    if not words:
        reasons.append("the answer is empty")
    if len(words) >= WINDOW and distinct < min_distinct:
        reasons.append(f"only {distinct:.0%} of the words in a stretch of {WINDOW} are distinct")
    if loop is not None:
        reasons.append(f"'{loop.unit}' is repeated {loop.repeats} times")
    if stuck is not None:
        reasons.append(f"'{stuck}' is repeated without a break")
    return Verdict(len(words), distinct, loop, stuck, tuple(reasons))


def split_words(text: str) -> list[str]:
    """Words and single signs, in lower case."""
    return _WORD.findall(text.lower())


def distinct_ratio(words: list[str], window: int = WINDOW) -> float:
    """Distinct words / words in the poorest window of `window` words; of all words when there are fewer; 1 for none.

    Windows, because the ratio of any honest text falls with its length.
    """
    if not words:
        return 1.0
    if len(words) <= window:
        return len(set(words)) / len(words)
    counts: dict[str, int] = {}
    poorest = window
    for place, word in enumerate(words):
        counts[word] = counts.get(word, 0) + 1
        if place >= window:
            gone = words[place - window]
            counts[gone] -= 1
            if not counts[gone]:
                del counts[gone]
        if place >= window - 1:
            poorest = min(poorest, len(counts))
    return poorest / window


def ngram_loop(words: list[str]) -> Loop | None:
    """The longest stretch in which a unit of 1 to 24 words repeats; None below 4 repeats or 24 words.

    A single word counts from 8 repeats on.
    """
    best: tuple[int, int, int] | None = None  # (length, start, period)
    for period in range(1, min(_LONGEST_PERIOD, len(words) // 2) + 1):
        length, start = _longest_run(words, period)
        enough = length >= 8 if period == 1 else length >= max(_MIN_LOOP_WORDS, 4 * period)
        # A multiple of the unit explains the same stretch: a longer unit must explain more of the text.
        if enough and (best is None or length >= best[0] + period):
            best = (length, start, period)
    if best is None:
        return None
    length, start, period = best
    unit = words[start : start + period]
    if all(set(word) <= _RULER for word in unit) and length < _RULER_LIMIT:
        return None
    return Loop(" ".join(unit), length // period)


def _longest_run(words: list[str], period: int) -> tuple[int, int]:
    """(length, start) of the longest stretch in which each word equals the one `period` places before it."""
    longest, start, run = 0, 0, 0
    for place in range(period, len(words)):
        run = run + 1 if words[place] == words[place - period] else 0
        if run and run + period > longest:
            longest, start = run + period, place - run - period + 1
    return longest, start


def stuck_characters(text: str) -> str | None:
    """A short run of characters repeated at least 12 times without white space, such as '!' or '的'; else None."""
    for match in _STUCK.finditer(text):
        if not set(match[1]) <= _RULER or len(match[0]) >= _RULER_LIMIT:
            return match[1]
    return None
