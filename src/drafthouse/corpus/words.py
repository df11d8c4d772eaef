"""Content words that no dictionary knows, divided so that held-out prompts never use a word of training.

Words are composed from syllables; the division is by hash, so it needs no list and is the same everywhere.
Copying an unseen word is only possible by reading the context, which is what the small target has to learn.
"""

from __future__ import annotations

import zlib
from collections.abc import Container

from drafthouse.corpus.draw import Draw
from drafthouse.corpus.records import Split

HELDOUT_ONE_IN = 8
_ONSETS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_CODAS = ("", "", "", "n", "r", "l", "s", "m")
SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)


def split_of_word(word: str) -> Split:
    """The side that a content word belongs to, whatever its case."""
    return "heldout" if zlib.crc32(word.lower().encode()) % HELDOUT_ONE_IN == 0 else "train"


def new_word(draw: Draw, split: Split, reserved: Container[str]) -> str:
    """A lower-case word of 2 or 3 syllables that belongs to `split` and is not `reserved` for phrases."""
    while True:
        word = draw.pick(SYLLABLES) + draw.pick(SYLLABLES)
        if draw.chance(0.3):
            word += draw.pick(SYLLABLES)
        word += draw.pick(_CODAS)
        if len(word) > 4 and split_of_word(word) == split and word not in reserved:
            return word
