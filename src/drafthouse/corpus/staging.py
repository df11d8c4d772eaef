"""Reading pieces of sources into staged lines: parsed, filtered, fingerprinted, each piece once and for all.

A piece leaves four files in the staging folder: the conversations as JSON lines, an index of them, their MinHash
bands and signatures; and, moved there last, a summary that makes the piece done. Whoever comes back after a crash reads
only what has no summary.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from drafthouse.corpus import grammar, sources
from drafthouse.corpus.contamination import Contamination
from drafthouse.corpus.curation import CuratedSource, CurationSettings, GeneratedSource, LibraryTextSource
from drafthouse.corpus.disk import Parts, told
from drafthouse.corpus.formats import RecordError, parse
from drafthouse.corpus.pieces import Piece, Raw, read_piece
from drafthouse.corpus.records import Conversation, Message
from drafthouse.corpus.similar import band_values, signatures, words

# 21 bytes a record on disk; never all of it in memory.
INDEX = np.dtype([("key", "<u8"), ("offset", "<u8"), ("length", "<u4"), ("heldout", "u1")])
RULES = 2  # raised when a record is read otherwise: what older rules staged is not gone on with
_EXAMPLES = 3  # of a reason, a piece
_SHOWN = 200
_BATCH = 256
_COMPARED_CHARS = 20_000


@dataclass(frozen=True)
class StageJob:
    """A piece to read into `folder` under its `number`."""

    number: int
    piece: Piece
    folder: str
    settings: CurationSettings
    contamination: Contamination


@dataclass
class Summary:
    """What a piece held: records read and kept, drops by reason, a few records of each reason."""

    source: int
    read: int = 0
    kept: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def drop(self, reason: str, at: int, detail: str, text: str) -> None:
        self.drops[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < _EXAMPLES:
            shown.append({"at": at, "detail": detail[:_SHOWN], "text": text[:_SHOWN]})


class StagedPiece:
    """The files of one piece."""

    def __init__(self, folder: Path, number: int) -> None:
        self._base = folder / f"{number:06d}"
        self.lines = self._base.with_suffix(".jsonl")
        self.index = self._base.with_suffix(".index")
        self.bands = self._base.with_suffix(".bands")
        self.signatures = self._base.with_suffix(".minhash")
        self.summary = self._base.with_suffix(".json")

    def read_summary(self) -> Summary | None:
        """None when the piece is not done."""
        try:
            values = json.loads(self.summary.read_bytes())
            return Summary(**{**values, "drops": Counter(values["drops"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


def stage(job: StageJob) -> Summary:
    """Read one piece, unless it is done already.

    Raises:
        CorpusError: it cannot be read.
        StoreError: the staging folder cannot be written.
    """
    staged = StagedPiece(Path(job.folder), job.number)
    done = staged.read_summary()
    if done is not None:
        return done
    with told(Path(job.folder)), Parts() as parts:
        return _staged(job, staged, parts)


def _staged(job: StageJob, staged: StagedPiece, parts: Parts) -> Summary:
    source = job.settings.sources[job.piece.source]
    summary = Summary(job.piece.source)
    similar = job.settings.filters.near_duplicates is not None
    index: list[tuple[int, int, int, int]] = []
    bands: list[np.ndarray] = []
    said: list[list[str]] = []
    offset = 0
    lines, made = parts.begin(staged.lines), parts.begin(staged.signatures)

    def flush() -> None:
        rows = signatures(said)
        made.write(rows.tobytes())
        bands.append(band_values(rows))
        said.clear()

    for conversation, spoken in _kept(job, source, summary):
        body = conversation.model_dump_json(exclude={"id", "kind"}, exclude_defaults=True)
        key = _key(job.settings.seed, body)
        head = json.dumps({"id": f"{source.name}-{key:016x}", "kind": source.kind}, ensure_ascii=False)
        line = f"{head[:-1]}, {body[1:]}\n".encode()
        # Of the question, not of the answer: two answers to one question stay on one side.
        heldout = _key(0, "\x1f".join(_asked(conversation))) % job.settings.heldout_one_in == 0
        index.append((key, offset, len(line), heldout))
        lines.write(line)
        offset += len(line)
        if similar:
            said.append(spoken)
            if len(said) == _BATCH:
                flush()
    if said:
        flush()
    parts.begin(staged.index).write(np.array(index, dtype=INDEX).tobytes())
    joined = np.concatenate(bands, axis=1) if bands else np.empty((0, 0), dtype=np.uint64)
    parts.begin(staged.bands).write(joined.tobytes())
    summary.kept = len(index)
    parts.begin(staged.summary).write(json.dumps(vars(summary), ensure_ascii=True).encode())
    return summary


def _kept(job: StageJob, source: CuratedSource, summary: Summary) -> Iterator[tuple[Conversation, list[str]]]:
    """Conversations that pass the filters, and their words where these were needed."""
    filters = job.settings.filters
    wanted = filters.near_duplicates is not None or bool(job.contamination)
    for raw, conversation in _conversations(job, source, summary):
        if not isinstance(source, (GeneratedSource, LibraryTextSource)) and source.cut_to_chars is not None:
            conversation = cut(conversation, source.cut_to_chars)
        size = sum(map(_chars, conversation.messages))
        reason = None
        if size < filters.min_chars:
            reason = "too_short"
        elif size > filters.max_chars:
            reason = "too_many_chars"
        elif len(conversation.messages) > filters.max_turns:
            reason = "too_many_turns"
        elif conversation.messages[-1].role != "assistant":
            reason = "cut_to_nothing"
        spoken: list[str] = []
        detail = f"{size} characters, {len(conversation.messages)} messages"
        if reason is None and wanted:
            spoken = words(_spoken(conversation)[:_COMPARED_CHARS])
            shared = job.contamination.shared(spoken, (m.content for m in conversation.messages if m.role == "user"))
            if shared is not None:
                reason, detail = "contaminated", shared
        if reason is None:
            yield conversation, spoken
        else:
            summary.drop(reason, raw.at, detail, conversation.messages[0].content)


def _conversations(job: StageJob, source: CuratedSource, summary: Summary) -> Iterator[tuple[Raw, Conversation]]:
    if isinstance(source, (GeneratedSource, LibraryTextSource)):
        for at in range(job.piece.first, job.piece.last):
            summary.read += 1
            if isinstance(source, GeneratedSource):
                yield Raw(at, None), grammar.conversation(source.about, job.settings.seed, at, "train")
            else:
                yield Raw(at, None), sources.conversation(source.about, job.settings.seed, at, "train")
        return
    for raw in read_piece(job.piece):
        summary.read += 1
        if raw.problem is not None:
            summary.drop(raw.reason, raw.at, raw.problem, raw.text)
            continue
        try:
            yield raw, parse(raw.value, source.format, source.name, source.kind, source.columns)
        except RecordError as error:
            summary.drop(error.reason, raw.at, error.detail, _shown(raw.value))


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=True, default=str)
    except RecursionError:
        return f"{type(value).__name__} of too many levels to be shown"


def cut(conversation: Conversation, limit: int) -> Conversation:
    """The conversation up to the last answer that fits `limit` characters; its beginning where none does."""
    total, end = 0, 0
    for place, message in enumerate(conversation.messages):
        total += _chars(message)
        if total > limit:
            return conversation.model_copy(update={"messages": conversation.messages[: max(end, 1)]})
        if message.role == "assistant":
            end = place + 1
    return conversation


def _chars(message: Message) -> int:
    size = len(message.content) + len(message.reasoning_content or "")
    return size + sum(len(call.name) + len(str(call.arguments)) for call in message.tool_calls)


def _asked(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages:
        if message.role == "assistant":
            return
        if message.role == "user":
            yield message.content


def _spoken(conversation: Conversation) -> str:
    parts = []
    for message in conversation.messages:
        parts.append(message.content)
        parts.extend(f"{call.name} {call.arguments}" for call in message.tool_calls)
    return "\n".join(parts)


def _key(seed: int, text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")
