"""Synthetic conversations whose answers stand in their prompts: a small hybrid model learns them by copying.

Every conversation is a pure function of (kind, seed, index, split), so a corpus can be made in parallel,
resumed and made again elsewhere. An answer is a function of its prompt: the wording of a question fixes the
wording of the answer and keys, values and tool names are distinct within a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

from drafthouse.corpus.draw import Draw
from drafthouse.corpus.phrases import (
    ARGUMENT_STYLES,
    FIELDS,
    LINE_STYLES,
    LOOKUP_HEADERS,
    LOOKUPS,
    NOUNS,
    NUMBER_PARAMETERS,
    PAIR_LOOKUPS,
    REPEATS,
    REPORTS_OF_ONE,
    REPORTS_OF_TWO,
    REQUESTS,
    RESERVED,
    REVERSE_LOOKUPS,
    SECOND_REQUEST,
    TEXT_PARAMETERS,
    THINKING_LOOKUPS,
    VERBS,
)
from drafthouse.corpus.records import Conversation, Message, Split, ToolCall
from drafthouse.corpus.words import new_word

GrammarKind = Literal["tool_call", "tool_answer", "lookup", "repeat"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


def conversation(kind: GrammarKind, seed: int, index: int, split: Split) -> Conversation:
    """The conversation number `index` of `kind`; held-out ones use content words that training never uses."""
    speaker = _Speaker(Draw(seed, kind, split, index), split)
    messages, tools = _KINDS[kind](speaker)
    return Conversation(id=f"{kind}-{split}-{seed}-{index}", kind=kind, messages=messages, tools=tools)


def conversations(kind: GrammarKind, seed: int, split: Split, start: int = 0) -> Iterator[Conversation]:
    """All conversations of `kind` from number `start` on, without end."""
    while True:
        yield conversation(kind, seed, start, split)
        start += 1


_Turns = tuple[list[Message], list[dict[str, Any]]]


class _Speaker:
    """Draws content: words and values of one split."""

    def __init__(self, draw: Draw, split: Split) -> None:
        self.draw, self._split = draw, split

    def word(self) -> str:
        return new_word(self.draw, self._split, RESERVED)

    def words(self, low: int, high: int) -> str:
        return " ".join(self.word() for _ in range(self.draw.between(low, high)))

    def names(self, low: int, high: int) -> str:
        return " ".join(self.word().capitalize() for _ in range(self.draw.between(low, high)))

    def number(self) -> int:
        return self.draw.between(2, 10 ** self.draw.between(1, 4))

    def value(self) -> str:
        """A value worth copying: words, a name, or words with a number."""
        style = self.draw.below(6)
        if style < 2:
            return self.words(2, 4)
        if style < 4:
            return self.names(2, 3)
        if style == 4:
            return f"{self.words(1, 2)} {self.number()}"
        return f"{self.word()}-{self.number()} {self.word()}"


def distinct_values(count: int, make: Callable[[], str]) -> list[str]:
    """Values of which none is contained in another: a question about one can mean no other."""
    values: list[str] = []
    while len(values) < count:
        value = make()
        if not any(value in other or other in value for other in values):
            values.append(value)
    return values


class _Tool:
    """A tool of one to three parameters with a schema that can be offered and called."""

    def __init__(self, speaker: _Speaker, verb: str, noun: str, parameters: int) -> None:
        draw = speaker.draw
        self.verb, self.noun, self.name = verb, noun, f"{verb}_{noun}"
        numbers = min(draw.below(2), parameters - 1)
        chosen = draw.distinct(TEXT_PARAMETERS, parameters - numbers) + draw.distinct(NUMBER_PARAMETERS, numbers)
        self.parameters = draw.shuffled(chosen)

    def schema(self) -> dict[str, Any]:
        properties = {name: {"type": "integer" if name in NUMBER_PARAMETERS else "string"} for name in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def call(self, speaker: _Speaker) -> ToolCall:
        arguments: dict[str, Any] = {
            name: speaker.number()
            if name in NUMBER_PARAMETERS
            else (speaker.names(1, 3) if speaker.draw.chance(0.5) else speaker.words(1, 3))
            for name in self.parameters
        }
        return ToolCall(name=self.name, arguments=arguments)


def _tools(speaker: _Speaker, count: int) -> list[_Tool]:
    """Tools of different names; half of the time they share a verb or a noun, so both have to be read."""
    draw = speaker.draw
    verbs, nouns = draw.distinct(VERBS, count), draw.distinct(NOUNS, count)
    sharing = draw.below(4)
    if sharing == 0:
        verbs = verbs[:1] * count
    elif sharing == 1:
        nouns = nouns[:1] * count
    most = 3 if count == 1 else 2
    return [_Tool(speaker, verb, noun, draw.between(1, most)) for verb, noun in zip(verbs, nouns, strict=True)]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _spoken(speaker: _Speaker, call: ToolCall) -> str:
    """The arguments of a call in the words of a request, in any order."""
    style = speaker.draw.pick(ARGUMENT_STYLES)
    said = []
    for name, value in speaker.draw.shuffled(list(call.arguments.items())):
        fitting = style.replace('"', "") if isinstance(value, int) else style
        said.append(fitting.format(name=name, value=value))
    return said[0] if len(said) == 1 else ", ".join(said[:-1]) + " and " + said[-1]


def _tool_call(speaker: _Speaker) -> _Turns:
    draw = speaker.draw
    tools = _tools(speaker, draw.between(1, 3))
    asked = draw.pick(tools)
    call = asked.call(speaker)
    request = draw.pick(REQUESTS).format(verb=asked.verb, noun=asked.noun, args=_spoken(speaker, call))
    calls = [call]
    if len(tools) == 2 and draw.chance(0.2) and all(len(tool.parameters) == 1 for tool in tools):
        other = tools[1 - tools.index(asked)]
        second = other.call(speaker)
        request += SECOND_REQUEST.format(verb=other.verb, noun=other.noun, args=_spoken(speaker, second))
        calls.append(second)
    sentences = ". ".join(_sentence(part) for part in request.split(". "))
    messages = [Message(role="user", content=sentences), Message(role="assistant", tool_calls=calls)]
    return messages, [tool.schema() for tool in tools]


def _tool_answer(speaker: _Speaker) -> _Turns:
    draw = speaker.draw
    tool = _Tool(speaker, draw.pick(VERBS), draw.pick(NOUNS), 1)
    call = tool.call(speaker)
    key = str(next(iter(call.arguments.values())))
    fields = draw.distinct(FIELDS, draw.between(2, 4))
    texts = distinct_values(len(fields), lambda: speaker.words(1, 2))
    response: dict[str, Any] = {
        field: speaker.number() if draw.chance(0.2) else text for field, text in zip(fields, texts, strict=True)
    }
    a, b = draw.distinct(fields, 2)
    two = draw.chance(0.7)
    ask, answer = draw.pick(REPORTS_OF_TWO if two else REPORTS_OF_ONE)
    names = {"a": a, "b": b, "va": response[a], "vb": response[b], "key": key}
    request = f"{tool.verb} the {tool.noun} with {_spoken(speaker, call)} and {ask.format(**names)}."
    messages = [
        Message(role="user", content=_sentence(request)),
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", name=tool.name, content=json.dumps(response)),
        Message(role="assistant", content=answer.format(**names)),
    ]
    return messages, [tool.schema()]


def _lookup(speaker: _Speaker) -> _Turns:
    draw = speaker.draw
    count = draw.between(3, 6)
    make_key = speaker.word if draw.chance(0.5) else lambda: speaker.names(1, 1)
    keys = distinct_values(count, make_key)
    values = distinct_values(count, speaker.value)
    style = draw.pick(LINE_STYLES)
    lines = [style.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
    chosen, other = draw.distinct(range(count), 2)
    names = {"key": keys[chosen], "value": values[chosen], "a": keys[chosen], "b": keys[other]}
    names |= {"va": values[chosen], "vb": values[other]}
    form = draw.below(10)
    thought = None
    if form < 3:
        ask, answer = draw.pick(LOOKUPS)
    elif form < 5:
        ask, answer = draw.pick(REVERSE_LOOKUPS)
    elif form < 7:
        ask, answer = draw.pick(PAIR_LOOKUPS)
    else:
        ask, thought, answer = draw.pick(THINKING_LOOKUPS)
    table = "\n".join([draw.pick(LOOKUP_HEADERS), *lines])
    question = ask.format(**names)
    text = f"{question}\n{table}" if draw.chance(0.3) else f"{table}\n{question}"
    answered = Message(
        role="assistant",
        content=answer.format(**names),
        reasoning_content=None if thought is None else thought.format(**names),
    )
    return [Message(role="user", content=text), answered], []


def _repeat(speaker: _Speaker) -> _Turns:
    draw = speaker.draw
    how = draw.pick(tuple(REPEATS))
    count = draw.between(3, 6) if how in ("twice", "numbered") else draw.between(5, 11)
    words = [speaker.word() for _ in range(count)]
    if draw.chance(0.3):
        words = [word.capitalize() for word in words]
    if how in ("plain", "quoted", "twice") and draw.chance(0.5):
        words[draw.below(count)] = str(speaker.number())
    text = " ".join(words)
    answer = {
        "plain": text,
        "quoted": f'"{text}"',
        "backwards": " ".join(reversed(words)),
        "commas": ", ".join(words),
        "lines": "\n".join(words),
        "twice": f"{text}\n{text}",
        "numbered": "\n".join(f"{place}. {word}" for place, word in enumerate(words, start=1)),
        "tail": " ".join(words[1:]),
    }[how]
    ask = draw.pick(REPEATS[how])
    return [Message(role="user", content=f"{ask}\n{text}"), Message(role="assistant", content=answer)], []


_KINDS: dict[GrammarKind, Callable[[_Speaker], _Turns]] = {
    "tool_call": _tool_call,
    "tool_answer": _tool_answer,
    "lookup": _lookup,
    "repeat": _repeat,
}
