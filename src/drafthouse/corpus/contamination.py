"""Evaluation prompts that must not be trained on, found by n words in a row (Brown et al. 2020, appendix C)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafthouse.corpus.similar import words
from drafthouse.errors import CorpusError

Words = tuple[str, ...]


@dataclass(frozen=True)
class Contamination:
    """The n-grams of all evaluation prompts; a prompt of fewer words counts when it is a whole question."""

    ngram: int
    grams: frozenset[Words] = frozenset()
    whole: frozenset[Words] = frozenset()
    fingerprint: str = ""
    _first: frozenset[str] = field(default=frozenset(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.grams or self.whole)

    def shared(self, said: Sequence[str], questions: Iterable[str]) -> str | None:
        """The words in a row that a conversation (its words, its questions) shares with a prompt, or None."""
        if self.grams:
            size, first = self.ngram, self._first
            for at in range(len(said) - size + 1):
                if said[at] in first and tuple(said[at : at + size]) in self.grams:
                    return " ".join(said[at : at + size])
        if self.whole:
            for question in questions:
                asked = tuple(words(question))
                if asked in self.whole:
                    return " ".join(asked)
        return None


def contamination(files: Sequence[Path], ngram: int) -> Contamination:
    """Read prompts: `.txt` has one a line; `.jsonl` has `prompt`, `question`, `turns` or `messages`.

    Raises:
        CorpusError: a file cannot be read, or a line holds no prompt.
    """
    grams: set[Words] = set()
    whole: set[Words] = set()
    seen = hashlib.sha256()
    for path in files:
        for prompt in _prompts(path):
            said = words(prompt)
            seen.update(" ".join(said).encode() + b"\n")
            if len(said) < ngram:
                whole.add(tuple(said))
            grams.update(tuple(said[at : at + ngram]) for at in range(len(said) - ngram + 1))
    whole.discard(())
    first = frozenset(gram[0] for gram in grams)
    return Contamination(ngram, frozenset(grams), frozenset(whole), seen.hexdigest() if files else "", first)


def _prompts(path: Path) -> Iterable[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise CorpusError(
            f"the evaluation prompts cannot be read ({reason})", where=str(path), fix="check filters.evaluation"
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield line
            continue
        found = _prompt_of(line)
        if found is None:
            raise CorpusError(
                "a line without a prompt",
                where=f"{path}:{number}",
                fix="give 'prompt', 'question', 'turns' or 'messages'",
            )
        yield from found


def _prompt_of(line: str) -> list[str] | None:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    for name in ("prompt", "question"):
        if isinstance(record.get(name), str):
            return [record[name]]
    turns = record.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return turns
    messages = record.get("messages")
    if isinstance(messages, list):
        asked = [m["content"] for m in messages if isinstance(m, dict) and m.get("role") == "user"]
        return asked if asked and all(isinstance(text, str) for text in asked) else None
    return None
