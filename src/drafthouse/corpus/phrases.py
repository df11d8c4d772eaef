"""The fixed wording of the synthetic conversations. Its words are reserved: none is ever a content word."""

from __future__ import annotations

import re

VERBS = (
    "get", "find", "book", "send", "open", "check", "plan", "track", "order", "play", "move",
    "save", "print", "start", "share", "update", "cancel", "rename",
)  # fmt: skip
NOUNS = (
    "weather", "ticket", "room", "alarm", "message", "file", "route", "parcel", "meeting", "report",
    "song", "invoice", "backup", "server", "job", "photo", "table", "event", "contract", "sensor",
)  # fmt: skip
TEXT_PARAMETERS = (
    "city", "name", "title", "topic", "owner", "label", "color", "street", "team", "folder",
    "guest", "author",
)  # fmt: skip
NUMBER_PARAMETERS = ("days", "count", "limit", "year", "size", "port", "hour", "level", "width", "price")
FIELDS = (
    "status", "code", "place", "total", "unit", "batch", "agent", "zone", "phase", "grade",
    "driver", "region",
)  # fmt: skip

# {verb} {noun} {args}; the capital of the first letter is set by the grammar
REQUESTS = (
    "please {verb} the {noun} with {args}.",
    "{verb} the {noun}: {args}.",
    "can you {verb} the {noun} for me? use {args}.",
    "I want to {verb} a {noun} with {args}.",
    "{args}. with this, {verb} the {noun}.",
)
SECOND_REQUEST = " then {verb} the {noun} with {args}."
ARGUMENT_STYLES = ("{name} {value}", "{name} = {value}", "{name} set to {value}", 'the {name} "{value}"')

# question about {a}, {b}; answer with their values {va}, {vb}
REPORTS_OF_TWO = (
    ("tell me the {a} and the {b}", "The {a} is {va} and the {b} is {vb}."),
    ("list {a} and {b}", "{a}: {va}\n{b}: {vb}"),
    ("say which {a} and {b} it has", "It has {a} {va} and {b} {vb}."),
)
REPORTS_OF_ONE = (
    ("tell me only the {a}", "The {a} of {key} is {va}."),
    ("say what {a} it has", "For {key}, the {a} is {va}."),
)

LOOKUP_HEADERS = ("Table:", "List:", "Notes:", "Register:", "Data:")
LINE_STYLES = ("{key}: {value}", "{key} = {value}", "- {key}: {value}", "{key} | {value}", "{key} -> {value}")
LOOKUPS = (
    ("What does the line for {key} say?", "The line for {key} says {value}."),
    ("Which value does {key} have?", "{key} has the value {value}."),
    ("Give me the entry of {key}.", "{key}: {value}"),
)
REVERSE_LOOKUPS = (
    ("Who has the value {value}?", "The value {value} belongs to {key}."),
    ("Which line says {value}?", "The line for {key} says {value}."),
)
PAIR_LOOKUPS = (
    ("Give me the entries of {a} and {b}.", "{a}: {va}\n{b}: {vb}"),
    ("What do {a} and {b} say?", "{a} says {va} and {b} says {vb}."),
)
THINKING_LOOKUPS = (
    ("Think first: what does {key} say?", "The line for {key} says {value}.", "{value}"),
    ("Think, then give the value of {key}.", "I look for {key}. Its value is {value}.", "{key}: {value}"),
)

REPEATS = {
    "plain": ("Repeat this text:", "Say this again:", "Copy the next line:"),
    "quoted": ("Quote this text:", "Put this in quotes:"),
    "backwards": ("Say these words in reverse order:", "Repeat this backwards, word by word:"),
    "commas": ("Repeat these words with commas:", "Join these words with commas:"),
    "lines": ("Write each word on its own line:", "Repeat this, one word a line:"),
    "twice": ("Repeat this text twice:", "Say this two times:"),
    "numbered": ("Number these words:", "Write these words as a numbered list:"),
    "tail": ("Repeat this text without its first word:", "Copy all but the first word:"),
}


def _reserved() -> frozenset[str]:
    texts: list[str] = [
        *VERBS,
        *NOUNS,
        *TEXT_PARAMETERS,
        *NUMBER_PARAMETERS,
        *FIELDS,
        *REQUESTS,
        SECOND_REQUEST,
    ]
    texts += [*ARGUMENT_STYLES, *LOOKUP_HEADERS, *LINE_STYLES]
    for table in (REPORTS_OF_TWO, REPORTS_OF_ONE, LOOKUPS, REVERSE_LOOKUPS, PAIR_LOOKUPS, THINKING_LOOKUPS):
        texts += [text for row in table for text in row]
    for asks in REPEATS.values():
        texts += asks
    texts += ["name", "arguments", "parameters", "type", "string", "integer", "function", "tools"]
    texts += ["system", "user", "assistant"]
    return frozenset(re.findall(r"[a-z]+", " ".join(texts).lower()))


RESERVED = _reserved()
