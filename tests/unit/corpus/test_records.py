from __future__ import annotations

import pytest
from pydantic import ValidationError

from drafthouse.corpus import Conversation, Message, ToolCall

ASK = Message(role="user", content="hi")


def talk(*messages: Message, name: str = "a", kind: str = "b") -> Conversation:
    return Conversation(id=name, kind=kind, messages=list(messages))


def test_content_hash_is_about_what_is_said() -> None:
    answer = Message(role="assistant", content="ho")
    one = talk(ASK, answer)
    assert one.content_hash() == talk(ASK, answer, name="x", kind="y").content_hash()
    others = [
        talk(ASK),
        talk(ASK, Message(role="assistant", content="ho", reasoning_content="")),
        talk(ASK, Message(role="assistant", content="ho", tool_calls=[ToolCall(name="f")])),
        talk(ASK, Message(role="tool", content="ho")),
        Conversation(id="a", kind="b", messages=[ASK, answer], tools=[{"x": 1}]),
    ]
    assert one.content_hash() not in {other.content_hash() for other in others}


def test_question_hash_ignores_every_turn_from_the_first_answer_on() -> None:
    one = talk(ASK, Message(role="assistant", content="a"), Message(role="user", content="more"))
    assert one.question_hash() == talk(ASK, Message(role="assistant", content="b")).question_hash()
    assert one.question_hash() != talk(Message(role="user", content="he")).question_hash()


def test_template_form_of_a_message() -> None:
    call = ToolCall(name="f", arguments={"x": {"y": [1]}})
    assert Message(role="assistant", reasoning_content="r", tool_calls=[call]).as_template_dict() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "r",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": {"y": [1]}}}}],
    }
    assert Message(role="tool", name="f", content="1").as_template_dict() == {
        "role": "tool",
        "name": "f",
        "content": "1",
    }


def test_unknown_roles_and_keys_are_refused() -> None:
    for values in ({"role": "alien"}, {"role": "user", "weight": 1}):
        with pytest.raises(ValidationError):
            Message.model_validate(values)
