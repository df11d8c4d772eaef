from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from drafthouse.corpus import Conversation, Message, ToolCall
from drafthouse.corpus.jsonl import Malformed, conversations, split_of_conversation
from drafthouse.errors import CorpusError

USER = {"role": "user", "content": "hi"}
HO = {"role": "assistant", "content": "ho"}


def read(path: Path) -> tuple[list[Conversation], Malformed]:
    malformed = Malformed()
    both = [*conversations(path, "chat", "train", malformed)]
    both += conversations(path, "chat", "heldout", Malformed())
    return both, malformed


def write(path: Path, records: list[Any]) -> Path:
    lines = [record if isinstance(record, (str, bytes)) else json.dumps(record) for record in records]
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def call(**function: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_openai_messages_with_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    record = {
        "messages": [
            {"role": "user", "content": parts},
            call(name="f", arguments='{"x": 1}'),
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
            {"role": "assistant", "content": "three", "reasoning_content": "hm", "refusal": None},
        ],
        "tools": tools,
    }
    records, malformed = read(write(tmp_path / "a.jsonl", [record, "", {"messages": [USER, HO]}]))
    assert not malformed.counts
    assert sorted(records, key=lambda one: one.id)[0] == Conversation(
        id="chat-1",
        kind="chat",
        messages=[
            Message(role="user", content="ab"),
            Message(role="assistant", tool_calls=[ToolCall(name="f", arguments={"x": 1})]),
            Message(role="tool", name="f", content="2"),
            Message(role="assistant", content="three", reasoning_content="hm"),
        ],
        tools=tools,
    )
    assert {one.id for one in records} == {"chat-1", "chat-3"}


BROKEN: list[tuple[str, Any]] = [
    ("not_json", '{"messages": ['),
    ("not_utf8", b'{"messages": "\xfc"}'),
    ("too_deep", "[" * 100_000),
    ("too_deep", {"messages": [USER, call(name="f", arguments=nested(200))]}),
    ("too_deep", {"messages": [USER, HO], "tools": [nested(200)]}),
    ("not_unicode", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ("not_object", [1]),
    ("no_messages", {"text": "x"}),
    ("no_messages", {"messages": []}),
    ("bad_tools", {"messages": [USER, HO], "tools": ["f"]}),
    ("bad_message", {"messages": [USER, "x"]}),
    ("bad_message", {"messages": [{"role": "alien", "content": "x"}, HO]}),
    ("not_text", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, HO]}),
    ("not_text", {"messages": [{"role": "user", "content": 3}, HO]}),
    ("not_text", {"messages": [{"role": "user", "content": None}, HO]}),
    ("not_text", {"messages": [{"role": "user"}, HO]}),
    ("not_text", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, HO]}),
    ("not_text", {"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": 1}}]}, HO]}),
    ("not_text", {"messages": [USER, {"role": "assistant", "content": {"a": 1}}]}),
    ("not_text", {"messages": [USER, {"role": "assistant", "content": None}, USER, HO]}),
    ("not_text", {"messages": [USER, call(name="f", arguments={}), {"role": "tool", "content": None}, HO]}),
    ("not_text", {"messages": [USER, call(name="f", arguments={}), {"role": "tool", "content": {"a": 1}}, HO]}),
    ("bad_message", {"messages": [USER, {**HO, "reasoning_content": {"a": 1}}]}),
    ("bad_tool_call", {"messages": [USER, call(name="f", arguments=0)]}),
    ("bad_tool_call", {"messages": [USER, call(name="f", arguments="{'a': None}")]}),
    ("bad_tool_call", {"messages": [USER, call(name="f", arguments={"a": [float("nan")]})]}),
    ("bad_tool_call", {"messages": [USER, call(name="f", arguments="{x")]}),
    ("bad_tool_call", {"messages": [USER, call(name="f", arguments=[1])]}),
    ("bad_tool_call", {"messages": [USER, call(arguments={})]}),
    ("bad_tool_call", {"messages": [USER, {"role": "assistant", "tool_calls": "f"}]}),
    ("no_answer", {"messages": [USER, HO, USER]}),
    ("empty_answer", {"messages": [USER, {"role": "assistant", "content": " \n"}]}),
]


def test_every_malformed_record_is_counted_and_the_others_are_kept(tmp_path: Path) -> None:
    good = {"messages": [USER, HO]}
    lines = [good]
    for _, record in BROKEN:
        lines += [record, good]
    records, malformed = read(write(tmp_path / "a.jsonl", lines))
    assert malformed.counts == Counter(reason for reason, _ in BROKEN)
    assert len(records) == len(BROKEN) + 1


@pytest.mark.parametrize(("reason", "record"), BROKEN)
def test_the_report_shows_the_record(tmp_path: Path, reason: str, record: Any) -> None:
    _, malformed = read(write(tmp_path / "a.jsonl", [{"messages": [USER, HO]}, record]))
    assert malformed.counts == {reason: 1}
    (example,) = malformed.examples[reason]
    assert example["line"] == 2
    assert example["detail"]
    assert 0 < len(example["text"]) <= 160


def test_examples_are_bounded(tmp_path: Path) -> None:
    _, malformed = read(write(tmp_path / "a.jsonl", ["{"] * 1000))
    assert malformed.counts == {"not_json": 1000}
    assert [example["line"] for example in malformed.examples["not_json"]] == [1, 2, 3, 4, 5]


def test_split_follows_the_question_and_not_the_answer(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"q{n // 2}"}, {"role": "assistant", "content": f"a{n}"}]}
        for n in range(1200)
    ]
    path = write(tmp_path / "a.jsonl", records)
    train = list(conversations(path, "chat", "train", Malformed()))
    heldout = list(conversations(path, "chat", "heldout", Malformed()))
    assert len(train) + len(heldout) == 1200
    assert 30 < len(heldout) < 130
    assert not {one.messages[0].content for one in train} & {one.messages[0].content for one in heldout}
    assert {split_of_conversation(one) for one in heldout} == {"heldout"}


@pytest.mark.parametrize(("encoding", "name"), [("utf-16", "UTF-16"), ("utf-32", "UTF-32"), ("utf-16-be", "UTF-16")])
def test_a_file_of_another_encoding_is_named(tmp_path: Path, encoding: str, name: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [USER, HO]}), encoding=encoding)
    with pytest.raises(CorpusError, match=rf"a\.jsonl: the file is {name}.* and not UTF-8 \(byte 0\)"):
        read(path)


def test_a_byte_order_mark_is_no_part_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [USER, HO]}), encoding="utf-8-sig")
    records, malformed = read(path)
    assert [record.messages[0].content for record in records] == ["hi"]
    assert not malformed.counts


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="cannot be read"):
        list(conversations(tmp_path / "none.jsonl", "chat", "train", Malformed()))
    with pytest.raises(CorpusError, match="cannot be read"):
        list(conversations(tmp_path, "chat", "train", Malformed()))
