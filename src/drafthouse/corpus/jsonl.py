"""Conversations from a JSON Lines file; an unusable record is counted and shown, never fatal or silent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drafthouse.corpus.records import Conversation, Message, Split, ToolCall
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


class _RecordError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


def conversations(path: Path, kind: str, split: Split, malformed: Malformed) -> Iterator[Conversation]:
    """Conversations of one split, in file order. A record's split follows from its question.

    Raises:
        CorpusError: there is no such file.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise CorpusError(
            f"cannot be read ({error.strerror})", where=str(path), fix="check the path of the source"
        ) from None
    with file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                record = conversation(raw, f"{kind}-{number}", kind)
            except _RecordError as error:
                malformed.add(error.reason, number, raw.decode("utf-8", "replace").strip(), error.detail)
                continue
            if split_of_conversation(record) == split:
                yield record


def split_of_conversation(record: Conversation) -> Split:
    """The side that a collected conversation belongs to, by the hash of its question."""
    return "heldout" if int(record.question_hash()[:8], 16) % HELDOUT_ONE_IN == 0 else "train"


def conversation(raw: bytes | str, name: str, kind: str) -> Conversation:
    """One record in OpenAI's messages form, checked for what a chat template needs."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _RecordError("not_json", str(error)) from None
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: JSON can write it, no tokenizer can read it
        raise _RecordError("not_unicode", str(error)) from None
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list) or not data["messages"]:
        raise _RecordError("no_messages", "a record is an object with a list 'messages'")
    tools = data.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _RecordError("bad_tools", "'tools' is a list of objects")
    messages = [_message(message, place) for place, message in enumerate(data["messages"])]
    if messages[-1].role != "assistant":
        raise _RecordError("no_answer", "the last message is not the assistant's")
    last = messages[-1]
    if not (last.content.strip() or last.tool_calls):
        raise _RecordError("empty_answer", "the last message says nothing and calls nothing")
    return Conversation(id=name, kind=kind, messages=messages, tools=tools)


def _message(message: Any, place: int) -> Message:
    if not isinstance(message, dict):
        raise _RecordError("bad_message", f"messages[{place}] is not an object")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _RecordError("bad_tool_call", f"messages[{place}].tool_calls is not a list")
    values = {
        "role": message.get("role"),
        "content": _content(message.get("content"), place),
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [_call(call, place) for call in calls],
        "name": message.get("name"),
    }
    try:
        return Message.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _RecordError("bad_message", f"messages[{place}].{where}: {first['msg']}") from None


def _content(content: Any, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise _RecordError("not_text", f"messages[{place}].content is not text")


def _call(call: Any, place: int) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _RecordError("bad_tool_call", f"messages[{place}].tool_calls has a call without a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise _RecordError("bad_tool_call", f"messages[{place}]: arguments are not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise _RecordError("bad_tool_call", f"messages[{place}]: arguments are not an object")
    return ToolCall(name=function["name"], arguments=arguments)
