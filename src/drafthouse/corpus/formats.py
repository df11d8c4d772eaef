"""Records of collected data sets, as conversations: OpenAI's messages, ShareGPT, Alpaca, Glaive's text.

Every reader takes one record (a decoded JSON object or a row of a table) and either returns a conversation that a
chat template can render, or raises `RecordError` with a reason that is counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import ValidationError

from drafthouse.corpus.records import Conversation, Message, ToolCall

Format = Literal["messages", "sharegpt", "alpaca", "glaive"]
FORMATS: tuple[Format, ...] = get_args(Format)

# What data sets call the roles. A function's result is a tool turn, whoever is said to speak it.
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "call",
    "function-call": "call",
    "tool_call": "call",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "function-response": "tool",
    "observation": "tool",
}
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_GLAIVE_TURN = re.compile(r"(?:\A|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]?")
_GLAIVE_CALL = "<functioncall>"
_GLAIVE_END = "<|endoftext|>"
# Levels of a call's arguments or of a tool's schema. What is written is read back by parsers that end at 200 levels of
# the whole conversation (pydantic's) or at Python's own stack, and one record must not make a corpus unreadable.
_DEEPEST = 128
_BOM = b"\xef\xbb\xbf"


class Constant:
    """NaN, Infinity or -Infinity, which Python takes for JSON and pydantic would write as null.

    It is no number and nothing that pydantic writes, so that a record whose conversation holds one is dropped.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


# Reads what stands in a file, with a `Constant` for what is no JSON.
DECODER = json.JSONDecoder(parse_constant=Constant)


class RecordError(Exception):
    """A record that gives no conversation; `reason` is one word to count, `detail` says more."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


def decoded(line: bytes) -> Any:
    """The value that a line holds: JSON in UTF-8, with a byte order mark or without.

    Raises:
        RecordError: it is something else; the reason is `not_utf8`, `not_json` or `too_deep`.
    """
    try:
        # Half of a surrogate pair passes here as it does in an escape: it is the conversation that must not hold one.
        text = line.removeprefix(_BOM).decode("utf-8", "surrogatepass")
        return DECODER.decode(text)
    except UnicodeDecodeError as error:
        place = f"byte {error.start} of the line is {line[error.start]:#04x}"
        raise RecordError("not_utf8", f"not UTF-8 ({place})") from None
    except ValueError as error:
        raise RecordError("not_json", f"not JSON ({error})") from None
    except RecursionError:
        raise RecordError("too_deep", "nested too deeply to be read") from None


def parse(record: Any, form: Format, name: str, kind: str, columns: Mapping[str, str] | None = None) -> Conversation:
    """One record as a conversation.

    Args:
        record: a decoded JSON object.
        form: how it is written.
        name: id of the conversation.
        kind: kind under which it is counted.
        columns: where a data set keeps a field under another name, e.g. `{"instruction": "question"}`.

    Raises:
        RecordError: the record is malformed; the reason is one of `not_object`, `no_messages`, `bad_tools`,
            `bad_message`, `bad_tool_call`, `not_text`, `no_question`, `no_answer`, `empty_answer`, `not_unicode`,
            `too_deep`.
    """
    if not isinstance(record, dict):
        raise RecordError("not_object", f"a record is an object, not {type(record).__name__}")
    if columns:
        record = {**record, **{field: record.get(column) for field, column in columns.items()}}
    messages, tools = _READERS[form](record)
    return _checked(messages, tools, name, kind)


def _checked(messages: list[Message], tools: list[dict[str, Any]], name: str, kind: str) -> Conversation:
    if not any(message.role == "user" for message in messages):
        raise RecordError("no_question", "nobody asks anything")
    if messages[-1].role != "assistant":
        raise RecordError("no_answer", "the last message is not the assistant's")
    last = messages[-1]
    if not (last.content.strip() or last.tool_calls):
        raise RecordError("empty_answer", "the last message says nothing and calls nothing")
    made = Conversation(id=name, kind=kind, messages=messages, tools=tools)
    try:
        written = made.model_dump_json()
        written.encode()
    except (UnicodeEncodeError, ValueError) as error:
        check_nested(messages, tools)  # pydantic's writer ends at 255 levels, and writes no `Constant`
        # Half of a surrogate pair: no tokenizer can read it.
        raise RecordError("not_unicode", str(error)) from None
    # Looked through only where so many brackets open: few do, and a look costs half as much as the parsing.
    nested = bool(tools) or any(message.tool_calls for message in messages)
    if nested and written.count("{") + written.count("[") > _DEEPEST:
        check_nested(messages, tools)
    return made


def openai_messages(record: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """`{"messages": [{"role", "content", "tool_calls", "reasoning_content", "name"}], "tools": [...]}`."""
    listed = _decoded(record.get("messages"), "no_messages")
    if not isinstance(listed, list) or not listed:
        raise RecordError("no_messages", "a record is an object with a list 'messages'")
    return [_message(message, place) for place, message in enumerate(listed)], _tools(record.get("tools"))


def sharegpt(record: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """`{"conversations": [{"from", "value"}], "system", "tools"}`, and the variants of it that are in use.

    A plain list of strings (UltraChat) alternates between the user and the assistant.
    """
    listed = _decoded(record.get("conversations") or record.get("conversation") or record.get("data"), "no_messages")
    if not isinstance(listed, list) or not listed:
        raise RecordError("no_messages", "a record is an object with a list 'conversations'")
    messages: list[Message] = []
    if system := _optional_text(record, "system"):
        messages.append(Message(role="system", content=system))
    for place, turn in enumerate(listed):
        if isinstance(turn, str):
            turn = {"from": "user" if place % 2 == 0 else "assistant", "value": turn}
        if not isinstance(turn, dict):
            raise RecordError("bad_message", f"conversations[{place}] is not an object")
        said = turn.get("from", turn.get("role"))
        text = turn.get("value", turn.get("content"))
        role = _ROLES.get(said.lower()) if isinstance(said, str) else None
        if role is None:
            raise RecordError("bad_message", f"conversations[{place}] is said by {said!r}")
        if not isinstance(text, str):
            raise RecordError("not_text", f"conversations[{place}] has no text")
        if role == "call":
            messages.append(Message(role="assistant", tool_calls=_calls(_json(text, place), place)))
        elif role == "assistant" and "<tool_call>" in text:
            calls = [call for found in _TOOL_CALL.findall(text) for call in _calls(_json(found, place), place)]
            messages.append(Message(role="assistant", content=_TOOL_CALL.sub("", text).strip(), tool_calls=calls))
        else:
            messages.append(Message.model_validate({"role": role, "content": text}))
    return messages, _tools(record.get("tools"))


def alpaca(record: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """`{"instruction", "input", "output", "system"}`; `input` follows the instruction behind a blank line."""
    asked, said = record.get("instruction"), record.get("output")
    if not isinstance(asked, str) or not asked.strip():
        raise RecordError("no_question", "'instruction' is no text")
    if not isinstance(said, str) or not said.strip():
        raise RecordError("empty_answer", "'output' is no text")
    more, system = _optional_text(record, "input"), _optional_text(record, "system")
    before = [Message(role="system", content=system)] if system else []
    question = f"{asked}\n\n{more}" if more else asked
    return [*before, Message(role="user", content=question), Message(role="assistant", content=said)], []


def glaive(record: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """Glaive function calling v2: `{"system": "SYSTEM: …{schemas}", "chat": "USER: … ASSISTANT: …"}`.

    Schemas are JSON objects one after the other; a call is `<functioncall> {"name": …, "arguments": '…'}`, whose
    arguments are JSON between apostrophes; `<|endoftext|>` ends the assistant's turns.
    """
    chat = record.get("chat")
    if not isinstance(chat, str) or not chat.strip():
        raise RecordError("no_messages", "'chat' is no text")
    told, tools = _glaive_system(_optional_text(record, "system"))
    messages = [Message(role="system", content=told)] if told else []
    parts = _GLAIVE_TURN.split(chat)
    if parts[0].strip() or len(parts) < 3:
        raise RecordError("bad_message", "the chat does not begin with a speaker")
    called = ""
    for place, (speaker, text) in enumerate(zip(parts[1::2], parts[2::2], strict=True)):
        text = text.replace(_GLAIVE_END, "").strip()
        if speaker == "USER":
            messages.append(Message(role="user", content=text))
        elif speaker == "FUNCTION RESPONSE":
            messages.append(Message(role="tool", content=text, name=called or None))
        else:
            before, mark, after = text.partition(_GLAIVE_CALL)
            calls = [_glaive_call(after, place)] if mark else []
            called = calls[0].name if calls else ""
            messages.append(Message(role="assistant", content=before.strip(), tool_calls=calls))
    return messages, tools


_READERS: dict[Format, Callable[[Mapping[str, Any]], tuple[list[Message], list[dict[str, Any]]]]] = {
    "messages": openai_messages,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "glaive": glaive,
}


def _glaive_system(system: str) -> tuple[str, list[dict[str, Any]]]:
    told, brace, _ = system.partition("{")
    told = told.strip().removeprefix("SYSTEM:").strip()
    tools: list[dict[str, Any]] = []
    rest = system[len(system.partition("{")[0]) :].strip() if brace else ""
    while rest:
        try:
            schema, end = DECODER.raw_decode(rest)
        except ValueError as error:
            raise RecordError("bad_tools", f"a schema is not JSON ({error})") from None
        except RecursionError:
            raise RecordError("too_deep", "a schema is nested too deeply to be read") from None
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            raise RecordError("bad_tools", "a schema has no name")
        tools.append({"type": "function", "function": schema})
        rest = rest[end:].strip()
    if tools:  # the chat template tells of the tools itself, in the words that the model was trained on
        told = told.replace("Use them if required -", "").replace("with access to the following functions.", "").strip()
        told = told.removesuffix("You are a helpful assistant").strip() or "You are a helpful assistant."
    return told, tools


def _glaive_call(text: str, place: int) -> ToolCall:
    text = text.strip()
    try:
        call = json.loads(text, strict=False, parse_constant=Constant)
    except RecursionError:
        raise RecordError("too_deep", f"turn {place}: a call is nested too deeply to be read") from None
    except ValueError:
        # The usual form is no JSON: {"name": "f", "arguments": '{"x": "it\'s"}'}
        found = re.fullmatch(r"""\{\s*"name":\s*"([^"]+)"\s*,\s*"arguments":\s*'(.*)'\s*\}""", text, re.DOTALL)
        if found is None:
            raise RecordError("bad_tool_call", f"turn {place}: {text[:60]!r} is no call") from None
        call = {"name": found[1], "arguments": found[2].replace("\\'", "'")}
    return _call(call, place)


def _message(message: Any, place: int) -> Message:
    if not isinstance(message, dict):
        raise RecordError("bad_message", f"messages[{place}] is not an object")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RecordError("bad_tool_call", f"messages[{place}].tool_calls is not a list")
    # A null says that there is no text, which is right where a turn calls instead.
    content = "" if calls and message.get("content") is None else _content(message.get("content"), place)
    values = {
        "role": message.get("role"),
        "content": content,
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [_call(call, place) for call in calls],
        "name": message.get("name"),
    }
    try:
        return Message.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordError("bad_message", f"messages[{place}].{where}: {first['msg']}") from None


def _content(content: Any, place: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise RecordError("not_text", f"messages[{place}].content is not text")


def _optional_text(record: Mapping[str, Any], field: str) -> str:
    """A field that may be missing, null or blank, which is all the same: ""."""
    value = record.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecordError("not_text", f"'{field}' is no text")
    return value if value.strip() else ""


def _calls(value: Any, place: int) -> list[ToolCall]:
    return [_call(call, place) for call in (value if isinstance(value, list) else [value])]


def _call(call: Any, place: int) -> ToolCall:
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError("bad_tool_call", f"messages[{place}].tool_calls has a call without a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        arguments = _loaded(arguments, "bad_tool_call", f"messages[{place}]: arguments are")
    elif arguments in (None, "", []):  # no arguments, as some write them
        arguments = {}
    if not isinstance(arguments, dict):
        raise RecordError("bad_tool_call", f"messages[{place}]: arguments are not an object")
    return ToolCall(name=function["name"], arguments=arguments)


def _tools(value: Any) -> list[dict[str, Any]]:
    tools = _decoded(value, "bad_tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError("bad_tools", "'tools' is a list of objects")
    return tools


def check_nested(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
    """Refuse calls and tools that would not be read back as they were.

    Raises:
        RecordError: they have too many levels, or hold the NaN and Infinity that Python takes for JSON.
    """
    _check_levels(tools, "bad_tools", "'tools'")
    for place, message in enumerate(messages):
        for call in message.tool_calls:
            _check_levels(call.arguments, "bad_tool_call", f"messages[{place}]: arguments")


def _check_levels(value: Any, reason: str, where: str) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, Constant) or (isinstance(one, float) and not math.isfinite(one)):
                raise RecordError(reason, f"{where}: {one} is not JSON")
        if not inner:
            return
        level = inner
    raise RecordError("too_deep", f"{where}: more than {_DEEPEST} levels")


def _decoded(value: Any, reason: str) -> Any:
    """Tables keep nested fields as JSON in a text column."""
    if not isinstance(value, str) or not value.strip():
        return value
    return _loaded(value, reason, "a text column is")


def _json(text: str, place: int) -> Any:
    return _loaded(text, "bad_tool_call", f"conversations[{place}]: a call is")


def _loaded(text: str, reason: str, where: str) -> Any:
    try:
        return DECODER.decode(text)
    except ValueError as error:
        raise RecordError(reason, f"{where} not JSON ({error})") from None
    except RecursionError:
        raise RecordError("too_deep", f"{where} nested too deeply to be read") from None
