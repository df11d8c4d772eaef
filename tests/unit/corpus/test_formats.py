"""Records of every format against conversations written by hand, and every malformation by its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from drafthouse.corpus import Conversation, Message, ToolCall
from drafthouse.corpus.formats import FORMATS, Format, RecordError, decoded, parse

SCHEMA = {"name": "get_rate", "description": "rates {now}", "parameters": {"type": "object", "properties": {}}}
GLAIVE = {
    "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    + json.dumps(SCHEMA, indent=4)
    + "\n"
    + json.dumps({"name": "second"}),
    "chat": "USER: What's the rate?\n\n\nASSISTANT: <functioncall> "
    '{"name": "get_rate", "arguments": \'{"of": "it\\\'s", "n": 2}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"rate": 3}\n\n\nASSISTANT: It is 3.\nUSER-friendly. <|endoftext|>\n\n\n'
    "USER: Thanks.\n\n\nASSISTANT: You're welcome! <|endoftext|>\n\n\n",
}


def said(record: Any, form: Format, columns: dict[str, str] | None = None) -> list[tuple[str, str, list[ToolCall]]]:
    made = parse(record, form, "n", "k", columns)
    return [(message.role, message.content, message.tool_calls) for message in made.messages]


def test_glaive_calls_results_and_schemas() -> None:
    made = parse(GLAIVE, "glaive", "n", "k")
    assert [tool["function"]["name"] for tool in made.tools] == ["get_rate", "second"]
    assert made.tools[0] == {"type": "function", "function": SCHEMA}
    assert made.messages == [
        Message(role="system", content="You are a helpful assistant."),
        Message(role="user", content="What's the rate?"),
        Message(role="assistant", tool_calls=[ToolCall(name="get_rate", arguments={"of": "it's", "n": 2})]),
        Message(role="tool", content='{"rate": 3}', name="get_rate"),
        Message(role="assistant", content="It is 3.\nUSER-friendly."),
        Message(role="user", content="Thanks."),
        Message(role="assistant", content="You're welcome!"),
    ]


def test_glaive_without_functions_keeps_its_system_text() -> None:
    record = {"system": "SYSTEM: You are terse.", "chat": "USER: Hi\n\n\nASSISTANT: Yo <|endoftext|>"}
    assert said(record, "glaive") == [("system", "You are terse.", []), ("user", "Hi", []), ("assistant", "Yo", [])]


def test_a_call_that_is_plain_json() -> None:
    chat = 'USER: Hi\n\n\nASSISTANT: Wait. <functioncall> {"name": "f", "arguments": {"a": "b"}} <|endoftext|>'
    assert said({"chat": chat}, "glaive")[-1] == ("assistant", "Wait.", [ToolCall(name="f", arguments={"a": "b"})])


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"conversation": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        {"data": ["Hi", "Yo"]},
        {"conversations": json.dumps([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}])},
    ],
)
def test_variants_of_sharegpt(record: Any) -> None:
    assert said(record, "sharegpt") == [("user", "Hi", []), ("assistant", "Yo", [])]


def test_sharegpt_with_tools() -> None:
    record = {
        "system": "Be brief.",
        "tools": json.dumps([SCHEMA]),
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": 'So:\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'},
        ],
    }
    made = parse(record, "sharegpt", "n", "k")
    assert made.tools == [SCHEMA]
    assert said(record, "sharegpt") == [
        ("system", "Be brief.", []),
        ("user", "Hi", []),
        ("assistant", "", [ToolCall(name="f", arguments={"a": 1})]),
        ("tool", "3", []),
        ("assistant", "So:", [ToolCall(name="g")]),
    ]


def test_alpaca_with_other_columns_and_an_input() -> None:
    record = {"question": "Add.", "input": "1 2", "response": "3", "system_prompt": "You add."}
    columns = {"instruction": "question", "output": "response", "system": "system_prompt"}
    assert said(record, "alpaca", columns) == [
        ("system", "You add.", []),
        ("user", "Add.\n\n1 2", []),
        ("assistant", "3", []),
    ]


def test_messages_in_a_text_column() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "reasoning_content": "hm"}]
    made = parse({"messages_json": json.dumps(messages)}, "messages", "n", "k", {"messages": "messages_json"})
    assert made.messages[1].reasoning_content == "hm"


def test_calls_in_openais_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "1", "content": "3"}, {"role": "assistant", "content": "three"}]
    assert said({"messages": turns}, "messages")[1] == ("assistant", "", [ToolCall(name="f", arguments={"a": 1})])


HI, YO = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}
BROKEN: list[tuple[Format, Any, str]] = [
    ("sharegpt", {"conversations": []}, "no_messages"),
    ("sharegpt", {"conversations": "[{"}, "no_messages"),
    ("sharegpt", {"conversations": [HI, 3]}, "bad_message"),
    ("sharegpt", {"conversations": [HI, {"from": "alien", "value": "x"}]}, "bad_message"),
    ("sharegpt", {"conversations": [HI, {"value": "x"}]}, "bad_message"),
    ("sharegpt", {"conversations": [HI, {"from": "gpt", "value": None}]}, "not_text"),
    ("sharegpt", {"conversations": [HI, {"from": "function_call", "value": "f()"}]}, "bad_tool_call"),
    ("sharegpt", {"conversations": [HI, {"from": "gpt", "value": "<tool_call>{</tool_call>"}]}, "bad_tool_call"),
    ("sharegpt", {"conversations": [HI, YO], "tools": "{"}, "bad_tools"),
    ("sharegpt", {"conversations": [YO]}, "no_question"),
    ("sharegpt", {"conversations": [HI, YO, HI]}, "no_answer"),
    ("sharegpt", {"conversations": [HI, {"from": "gpt", "value": " "}]}, "empty_answer"),
    ("sharegpt", {"conversations": [{"from": "human", "value": "\ud800"}, YO]}, "not_unicode"),
    ("alpaca", {"instruction": " ", "output": "x"}, "no_question"),
    ("alpaca", {"instruction": "x", "output": ""}, "empty_answer"),
    ("alpaca", {"instruction": "x", "input": 3, "output": "y"}, "not_text"),
    ("alpaca", {"instruction": "x", "system": {"a": 1}, "output": "y"}, "not_text"),
    ("alpaca", {"instruction": None, "output": "y"}, "no_question"),
    ("alpaca", {"instruction": "x", "output": {"a": 1}}, "empty_answer"),
    ("sharegpt", {"conversations": [HI, {"from": "gpt", "value": {"a": 1}}]}, "not_text"),
    ("sharegpt", {"conversations": [HI, {"from": "observation", "value": 3}, YO]}, "not_text"),
    ("sharegpt", {"conversations": [HI, YO], "system": ["a"]}, "not_text"),
    ("sharegpt", {"data": ["Hi", None]}, "bad_message"),
    ("glaive", {"chat": "USER: a\n\nASSISTANT: b", "system": 0}, "not_text"),
    ("glaive", {"chat": ""}, "no_messages"),
    ("glaive", {"chat": "USER: a\n\nASSISTANT: b", "system": 3}, "not_text"),
    ("glaive", {"chat": "Hello USER: a\n\nASSISTANT: b"}, "bad_message"),
    ("glaive", {"chat": "USER: a\n\nASSISTANT: <functioncall> f(x)"}, "bad_tool_call"),
    ("glaive", {"chat": "USER: a\n\nASSISTANT: b", "system": "SYSTEM: use {broken"}, "bad_tools"),
    ("glaive", {"chat": "USER: a\n\nASSISTANT: b", "system": 'SYSTEM: use {"x": 1}'}, "bad_tools"),
]


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


def calling(form: Format, levels: int) -> Any:
    """A record whose call has arguments of so many levels."""
    call = '{"name": "f", "arguments": %s}' % nested(levels)  # noqa: UP031
    hi = '{"role": "user", "content": "Hi"}'
    return {
        "messages": {"messages": f'[{hi}, {{"role": "assistant", "tool_calls": [{call}]}}]'},
        "sharegpt": {"conversations": [HI, {"from": "function_call", "value": call}]},
        "glaive": {"chat": f"USER: a\n\nASSISTANT: <functioncall> {call}"},
    }[form]


def offering(form: Format, levels: int) -> Any:
    """A record with a tool of so many levels."""
    tool = '{"name": "f", "more": %s}' % nested(levels - 1)  # noqa: UP031
    hi = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    return {
        "messages": {"messages": hi, "tools": f"[{tool}]"},
        "sharegpt": {"conversations": [HI, YO], "tools": f"[{tool}]"},
        "glaive": {"chat": "USER: a\n\nASSISTANT: b", "system": f"SYSTEM: use {tool}"},
    }[form]


@pytest.mark.parametrize("record", [calling, offering])
@pytest.mark.parametrize("form", ["messages", "sharegpt", "glaive"])
def test_what_is_kept_can_be_read_back_and_what_could_not_is_too_deep(
    form: Format, record: Callable[[Format, int], Any]
) -> None:
    for levels in (1, 60, 120):
        made = parse(record(form, levels), form, "n", "k")
        assert Conversation.model_validate_json(made.model_dump_json(exclude_defaults=True)) == made
    # json itself ends between 900 and 1000 levels, pydantic's writer at 255, its reader at 200
    for levels in (135, 190, 196, 200, 254, 256, 900):
        with pytest.raises(RecordError) as caught:
            parse(record(form, levels), form, "n", "k")
        assert caught.value.reason == "too_deep"


@pytest.mark.parametrize("form", ["messages", "sharegpt", "glaive"])
@pytest.mark.parametrize("record", [calling, offering])
def test_json_in_a_text_that_python_cannot_read_is_too_deep(form: Format, record: Callable[[Format, int], Any]) -> None:
    with pytest.raises(RecordError) as caught:
        parse(record(form, 50_000), form, "n", "k")
    assert caught.value.reason == "too_deep"


@pytest.mark.parametrize("arguments", [{"a": None, "b": [{"c": {}}], "d": "None"}, {}, None, ""])
def test_arguments_that_are_objects_stay_as_they_are(arguments: Any) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
    turns[1]["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]
    assert said({"messages": turns}, "messages")[1] == (
        "assistant",
        "",
        [ToolCall(name="f", arguments=arguments or {})],
    )


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("quoted", [False, True])
def test_what_python_takes_for_a_number_is_not_written_as_null(constant: str, quoted: bool) -> None:
    arguments = f'{{"a": [{{"b": {constant}}}]}}'
    call = f'{{"name": "f", "arguments": {json.dumps(arguments) if quoted else arguments}}}'
    hi = '{"role": "user", "content": "Hi"}'
    line = f'{{"messages": [{hi}, {{"role": "assistant", "tool_calls": [{call}]}}]}}'
    with pytest.raises(RecordError, match=f"{constant} is not JSON") as caught:
        parse(decoded(line.encode()), "messages", "n", "k")
    assert caught.value.reason == "bad_tool_call"
    tools = f'{{"data": ["Hi", "Yo"], "tools": [{{"name": "f", "least": {constant}}}]}}'
    with pytest.raises(RecordError, match=f"'tools': {constant} is not JSON") as caught:
        parse(decoded(tools.encode()), "sharegpt", "n", "k")
    assert caught.value.reason == "bad_tools"
    asked = f'{{"data": ["Hi", "Yo"], "score": {constant}}}'
    assert len(parse(decoded(asked.encode()), "sharegpt", "n", "k").messages) == 2, "nobody asks for the score"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{x", "not_json"),
        (b"1 2", "not_json"),
        (b'"\xfc"', "not_utf8"),
        (b"[" * 100_000, "too_deep"),
    ],
)
def test_lines_that_hold_no_value(line: bytes, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        decoded(line)
    assert caught.value.reason == reason


def test_lines_that_hold_one() -> None:
    assert decoded(b'\xef\xbb\xbf {"a": "\xc3\xbc"}\r\n') == {"a": "ü"}


@pytest.mark.parametrize(("form", "record", "reason"), BROKEN)
def test_what_is_malformed_has_a_reason(form: Format, record: Any, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse(record, form, "n", "k")
    assert caught.value.reason == reason
    assert caught.value.detail


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("record", [[1], "x", None, 3])
def test_a_record_is_an_object(form: Format, record: Any) -> None:
    with pytest.raises(RecordError) as caught:
        parse(record, form, "n", "k")
    assert caught.value.reason == "not_object"
