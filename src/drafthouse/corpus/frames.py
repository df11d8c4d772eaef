"""Renderings made by filling a frame: the text that a template prints around the texts of a conversation.

A frame is learned from one conversation by a traced rendering (`trace`), checked against the real one, and serves
every conversation of the same shape that answers the template's questions alike. Filling it costs a few
microseconds where Jinja takes a hundred.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from drafthouse.config import digest_of
from drafthouse.corpus.records import Conversation
from drafthouse.corpus.trace import (
    Change,
    Trace,
    TracedTemplate,
    UntraceableError,
    WatchedObject,
    answer_to,
    apply,
)

# A template that asks about every text in its own way would make a frame a sample: memory stays bounded.
_MOST_SHAPES = 512
_MOST_FRAMES = 16  # of one shape


@dataclass(frozen=True)
class Filled:
    """A rendering by a frame.

    Attributes:
        text: the whole conversation.
        borders: start and end of every answer in bytes of UTF-8, flat.
        answers: the answers, joined, as UTF-8.
        size: bytes of `text`.
        controls: control tokens that the template itself writes.
    """

    text: str
    borders: list[int]
    answers: bytes
    size: int
    controls: int


class Frame:
    """Literals and changed texts in the order of the rendering, and what must hold for it to apply.

    Args:
        trace: the rendering that it was learned from.
        pieces: what that printed: literals and numbers of changes.
        answers: start and end of every answer, as indices into `pieces`.
        forbidden: text that no answer may begin with (see `ChatTemplate`), or "".
    """

    def __init__(
        self, trace: Trace, pieces: Sequence[str | int], answers: Sequence[tuple[int, int]], forbidden: str
    ) -> None:
        self.controls = 0
        self._to_json, self._changes = trace.to_json, list(trace.changes)
        self._asked = list(trace.questions)
        self._pieces, self._answers, self._forbidden = list(pieces), list(answers), forbidden
        used = {piece for piece in pieces if isinstance(piece, int)}
        printed = {trace.changes[number].value for number in used}
        self.unprinted = [place for place in range(len(trace.values)) if place not in printed]
        self._needed = sorted(used | {question.about for question in self._asked})

    def fits(self, values: Sequence[Any]) -> list[Any] | None:
        """The changed texts of a conversation, or None where the template would take another path."""
        changed: list[Any] = [None] * len(self._changes)
        for number in self._needed:
            change = self._changes[number]
            changed[number] = apply(change, values, self._to_json) if change.steps else values[change.value]
        for question in self._asked:
            if answer_to(question.kind, changed[question.about], question.argument) != question.answer:
                return None
        return changed

    def fill(self, changed: Sequence[Any]) -> Filled | None:
        """The rendering; None where an answer begins with what is forbidden.

        Raises:
            UnicodeEncodeError: a text holds half of a surrogate pair.
        """
        parts: list[str] = [piece if isinstance(piece, str) else changed[piece] for piece in self._pieces]
        text = "".join(parts)
        plain = text.isascii()
        position, last = 0, 0
        borders: list[int] = []
        answers: list[str] = []
        for first, end in self._answers:
            answer = "".join(parts[first:end])
            if self._forbidden and answer.startswith(self._forbidden):
                return None
            before = parts[last:first]
            position += sum(map(len, before)) if plain else len("".join(before).encode())
            borders.append(position)
            position += len(answer) if plain else len(answer.encode())
            borders.append(position)
            answers.append(answer)
            last = end
        size = len(text) if plain else len(text.encode())
        return Filled(text, borders, "".join(answers).encode(), size, self.controls)


class Frames:
    """Frames of one template, learned as conversations come.

    Args:
        source: the Jinja template.
        variables: further template variables.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._variables = variables
        self._template = TracedTemplate(source)
        self._frames: dict[Any, list[Frame]] = {}
        self._tools_are_read = False
        self._seen_tools: set[str] = set()

    def find(self, conversation: Conversation) -> tuple[Frame, list[Any]] | None:
        """A frame that applies and the changed texts to fill it with."""
        values, shape = values_of(conversation, with_tools=not self._tools_are_read)
        for frame in self._frames.get(self._key(conversation, shape), ()):
            changed = frame.fits(values)
            if changed is not None:
                return frame, changed
        return None

    def learn(
        self,
        conversation: Conversation,
        text: str,
        spans: Sequence[tuple[int, int]],
        controls: Callable[[str], int],
        forbidden: str,
    ) -> None:
        """Make a frame of a conversation whose real rendering and answers' [start, end) are known."""
        if self._full(conversation):
            return
        made = self._make(conversation, text, spans, forbidden)
        if made is None and conversation.tools and not self._tools_are_read:
            # The template looks into the tools' schemas: from now on equal tools are part of a shape.
            self._tools_are_read = True
            if self._full(conversation):
                return
            made = self._make(conversation, text, spans, forbidden)
        if made is not None:
            made.controls = controls(text)
            _, shape = values_of(conversation, with_tools=not self._tools_are_read)
            self._frames.setdefault(self._key(conversation, shape), []).append(made)

    def _full(self, conversation: Conversation) -> bool:
        _, shape = values_of(conversation, with_tools=not self._tools_are_read)
        if conversation.tools and self._tools_are_read and not self._worth(conversation):
            return True
        here = self._frames.get(self._key(conversation, shape))
        return len(self._frames) >= _MOST_SHAPES if here is None else len(here) >= _MOST_FRAMES

    def _worth(self, conversation: Conversation) -> bool:
        """Tools that come once are not worth a frame: the second time counts."""
        key = digest_of(conversation.tools)[:16]
        if key in self._seen_tools:
            return True
        if len(self._seen_tools) < 64 * _MOST_SHAPES:
            self._seen_tools.add(key)
        return False

    def _key(self, conversation: Conversation, shape: tuple[Any, ...]) -> Any:
        if not conversation.tools:
            return shape
        return (shape, digest_of(conversation.tools) if self._tools_are_read else len(conversation.tools))

    def _make(
        self, conversation: Conversation, text: str, spans: Sequence[tuple[int, int]], forbidden: str
    ) -> Frame | None:
        values, _ = values_of(conversation, with_tools=not self._tools_are_read)
        trace = Trace(values, self._template.to_json)
        messages, owners = _watched(conversation, trace)
        tools: list[Any] | None = conversation.tools or None
        if tools and not self._tools_are_read:
            tools = [WatchedObject(trace, len(owners) + place) for place in range(len(tools))]
        try:
            pieces = self._template.pieces(
                trace, messages, tools=tools, documents=None, add_generation_prompt=False, **self._variables
            )
        except (UntraceableError, jinja2.TemplateError):
            return None
        texts = [
            piece if isinstance(piece, str) else apply(trace.changes[piece], values, trace.to_json) for piece in pieces
        ]
        if "".join(texts) != text:
            return None
        split = _split(pieces, texts, spans)
        if split is None:
            return None
        cut, answers = split
        if not _owns(conversation, cut, answers, trace.changes, owners):
            return None
        return Frame(trace, cut, answers, forbidden)


def values_of(conversation: Conversation, *, with_tools: bool) -> tuple[list[Any], tuple[Any, ...]]:
    """The texts and JSON objects of a conversation in a fixed order, and its shape: what is there at all."""
    values: list[Any] = []
    shape: list[Any] = []
    for message in conversation.messages:
        values.append(message.content)
        reasoning, name, calls = message.reasoning_content, message.name, message.tool_calls
        if reasoning is None and name is None and not calls:
            shape.append(message.role)
            continue
        if reasoning is not None:
            values.append(reasoning)
        if name is not None:
            values.append(name)
        for call in calls:
            values.append(call.name)
            values.append(call.arguments)
        shape.append((message.role, reasoning is not None, name is not None, len(calls)))
    if with_tools:
        values.extend(conversation.tools)
    return values, tuple(shape)


def _watched(conversation: Conversation, trace: Trace) -> tuple[list[dict[str, Any]], list[int]]:
    """Template messages of watched texts, and the message that each value belongs to."""
    owners: list[int] = []
    messages: list[dict[str, Any]] = []

    def text(place: int) -> Any:
        owners.append(place)
        return trace.text(Change(len(owners) - 1))

    for place, message in enumerate(conversation.messages):
        plain = message.as_template_dict()
        watched = {**plain, "content": text(place)}
        if "reasoning_content" in plain:
            watched["reasoning_content"] = text(place)
        if "name" in plain:
            watched["name"] = text(place)
        if "tool_calls" in plain:
            calls = []
            for call in plain["tool_calls"]:
                name = text(place)
                owners.append(place)
                arguments = WatchedObject(trace, len(owners) - 1)
                calls.append({**call, "function": {"name": name, "arguments": arguments}})
            watched["tool_calls"] = calls
        messages.append(watched)
    return messages, owners


def _split(
    pieces: Sequence[str | int], texts: Sequence[str], spans: Sequence[tuple[int, int]]
) -> tuple[list[str | int], list[tuple[int, int]]] | None:
    """Cut literals at the answers' borders; None where a border lies inside a text of the conversation."""
    borders = list(itertools.chain.from_iterable(spans))
    cut: list[str | int] = []
    starts: list[int] = []
    position = 0
    for piece, text in zip(pieces, texts, strict=True):
        end = position + len(text)
        if isinstance(piece, str):
            edges = [position, *sorted({border for border in borders if position < border < end}), end]
            for first, last in itertools.pairwise(edges):
                if last > first:
                    cut.append(piece[first - position : last - position])
                    starts.append(first)
        else:
            cut.append(piece)
            starts.append(position)
        position = end
    starts.append(position)
    answers: list[tuple[int, int]] = []
    for start, end in spans:
        # A text may be empty: then it belongs to the answer that it touches, and `_owns` has the last word.
        first, last = bisect_left(starts, start), bisect_right(starts, end) - 1
        if starts[first] != start or starts[last] != end:
            return None
        answers.append((first, last))
    return cut, answers


def _owns(
    conversation: Conversation,
    pieces: Sequence[str | int],
    answers: Sequence[tuple[int, int]],
    changes: Sequence[Change],
    owners: Sequence[int],
) -> bool:
    """Whether answer n holds texts of assistant turn n and of nobody else, and nothing of it lies outside."""
    turns = [place for place, message in enumerate(conversation.messages) if message.role == "assistant"]
    if len(turns) != len(answers):
        return False
    for place, piece in enumerate(pieces):
        if isinstance(piece, str):
            continue
        value = changes[piece].value
        owner = owners[value] if value < len(owners) else None
        inside = next((turn for turn, (first, end) in zip(turns, answers, strict=True) if first <= place < end), None)
        if inside != (owner if owner in turns else None):
            return False
    return True
