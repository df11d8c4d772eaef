"""Conversations from a JSON Lines file; an unusable record is counted and shown, never fatal or silent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafthouse.corpus.formats import RecordError, decoded, parse
from drafthouse.corpus.pieces import check_encoding
from drafthouse.corpus.records import Conversation, Split
from drafthouse.errors import CorpusError

HELDOUT_ONE_IN = 16
_EXAMPLES = 5
_SHOWN = 160


@dataclass
class Malformed:
    """How many records were unusable for which reason, and the first few of each reason to look at."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, reason: str, line: int, text: str, detail: str) -> None:
        self.counts[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < _EXAMPLES:
            shown.append({"line": line, "detail": detail[:_SHOWN], "text": text[:_SHOWN]})


def conversations(path: Path, kind: str, split: Split, malformed: Malformed) -> Iterator[Conversation]:
    """Conversations of one split, in file order. A record's split follows from its question.

    Raises:
        CorpusError: there is no such file, or its encoding is another one.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise CorpusError(
            f"cannot be read ({error.strerror})", where=str(path), fix="check the path of the source"
        ) from None
    with file:
        check_encoding(file.peek(4), path)
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                record = conversation(raw, f"{kind}-{number}", kind)
            except RecordError as error:
                malformed.add(error.reason, number, raw.decode("utf-8", "replace").strip(), error.detail)
                continue
            if split_of_conversation(record) == split:
                yield record


def split_of_conversation(record: Conversation) -> Split:
    """The side that a collected conversation belongs to, by the hash of its question."""
    return "heldout" if int(record.question_hash()[:8], 16) % HELDOUT_ONE_IN == 0 else "train"


def conversation(raw: bytes, name: str, kind: str) -> Conversation:
    """One record in OpenAI's messages form, checked for what a chat template needs."""
    data = decoded(raw)
    try:
        json.dumps(data, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: JSON can write it, no tokenizer can read it
        raise RecordError("not_unicode", str(error)) from None
    except RecursionError:
        raise RecordError("too_deep", "nested too deeply to be written") from None
    return parse(data, "messages", name, kind)
