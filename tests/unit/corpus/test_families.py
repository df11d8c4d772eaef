"""Strict templates of real families: the masked tokens against answers written by hand, on both ways to a mask."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import ChatTemplate, Conversation, Dropped, Message, TokenSample, ToolCall
from drafthouse.corpus.tokenizer import default_chat_template
from tests.unit.corpus.templates import FAMILIES, RESERVED

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = ToolCall(name="look", arguments={"where": 'the "attic"', "deep": True})
JSON = '{"where": "the \\"attic\\"", "deep": true}'

PLAIN = [Message(role="user", content=" Where? "), Message(role="assistant", content="\n In the attic. ")]
TWO = [
    Message(role="system", content="Be short."),
    Message(role="user", content="One?"),
    Message(role="assistant", content="First answer."),
    Message(role="user", content="Two?"),
    Message(role="assistant", reasoning_content="Hm.\n", content="Second answer."),
]
CALLED = [
    Message(role="user", content="Look."),
    Message(role="assistant", tool_calls=[CALL]),
    Message(role="tool", name="look", content="dust"),
    Message(role="assistant", content="There is dust."),
]
INLINE = [Message(role="user", content="Why?"), Message(role="assistant", content="<think>\nso\n</think>\n\nBecause.")]

# What the assistant says, turn after turn and with its end of turn, as each template writes it.
EXPECTED = {
    ("chatml_tools", "plain"): "<think>\n\n</think>\n\n In the attic. <|im_end|>",
    ("chatml_tools", "two"): "First answer.<|im_end|><think>\nHm.\n</think>\n\nSecond answer.<|im_end|>",
    ("chatml_tools", "called"): f'<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call><|im_end|>'
    "<think>\n\n</think>\n\nThere is dust.<|im_end|>",
    ("chatml_tools", "inline"): "<think>\nso\n</think>\n\nBecause.<|im_end|>",
    ("headers", "plain"): "In the attic.<|eot_id|>",
    ("headers", "two"): "First answer.<|eot_id|>Second answer.<|eot_id|>",
    ("headers", "called"): f'{{"name": "look", "parameters": {JSON}}}<|eom_id|>There is dust.<|eot_id|>',
    ("headers", "inline"): "<think>\nso\n</think>\n\nBecause.<|eot_id|>",
    ("brackets", "plain"): " In the attic.</s>",
    ("brackets", "two"): " First answer.</s> Second answer.</s>",
    ("brackets", "called"): f'[TOOL_CALLS][{{"name": "look", "arguments": {JSON}}}]</s> There is dust.</s>',
    ("brackets", "inline"): " <think>\nso\n</think>\n\nBecause.</s>",
    ("hostile", "plain"): "(straddles)",  # the answer's line break is one token with the header's
    ("hostile", "two"): "First answer.<|im_end|>Second answer.<|im_end|>",
    ("hostile", "called"): f"look{JSON}<|im_end|>There is dust.<|im_end|>",
    ("hostile", "inline"): "<think>\nso\n</think>\n\nBecause.<|im_end|>",
    ("model_turns", "plain"): "In the attic.<end_of_turn>",
    ("model_turns", "two"): "First answer.<end_of_turn>Second answer.<end_of_turn>",
    ("model_turns", "called"): "(template_refused)",
    ("model_turns", "inline"): "<think>\nso\n</think>\n\nBecause.<end_of_turn>",
}
CHATS = {"plain": PLAIN, "two": TWO, "called": CALLED, "inline": INLINE}


@pytest.fixture(scope="module")
def reserved(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True, normalized=False) for token in RESERVED]}
    )
    return other


@pytest.fixture(scope="module")
def chats(reserved: PreTrainedTokenizerFast) -> dict[str, ChatTemplate]:
    made = {}
    for name, source in {**FAMILIES, "own": default_chat_template()}.items():
        other = copy.deepcopy(reserved)
        other.chat_template = source
        made[name] = ChatTemplate(other)
    return made


def talk(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Conversation:
    return Conversation(id="c", kind="chat", messages=messages, tools=tools or [])


def said(chat: ChatTemplate, sample: TokenSample | Dropped) -> str:
    if isinstance(sample, Dropped):
        return f"({sample.reason})"
    ids = sample.input_ids[sample.loss_mask.astype(bool)].tolist()
    return str(chat.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


def by_probing(chat: ChatTemplate, conversation: Conversation) -> TokenSample | Dropped:
    (sample,) = chat._samples_by_offsets([(conversation, chat._render_and_learn(conversation))], None)
    return sample


def assert_same(one: TokenSample | Dropped, other: TokenSample | Dropped) -> None:
    if isinstance(one, Dropped) or isinstance(other, Dropped):
        assert one == other
    else:
        assert np.array_equal(one.input_ids, other.input_ids)
        assert np.array_equal(one.loss_mask, other.loss_mask)


@pytest.mark.parametrize(("family", "chat"), EXPECTED)
def test_the_masked_tokens_are_the_answers_word_for_word(
    chats: dict[str, ChatTemplate], family: str, chat: str
) -> None:
    conversation = talk(CHATS[chat], [TOOL] if chat == "called" else None)
    (first,) = chats[family].samples([conversation])
    (again,) = chats[family].samples([conversation])  # by then the shape is known
    assert said(chats[family], first) == EXPECTED[family, chat]
    assert_same(first, again)


@pytest.mark.parametrize("family", ["chatml_tools", "headers", "brackets", "hostile", "model_turns", "thinking", "own"])
def test_a_shape_is_rendered_once_and_then_filled(chats: dict[str, ChatTemplate], family: str) -> None:
    # HOSTILE asks for the length of an answer, which is not followed: it is rendered every time.
    chat = chats[family]
    first, second = (
        talk([Message(role="user", content=f"Where is {one}?"), Message(role="assistant", content=f"In the {one}.")])
        for one in ("attic", "cellar")
    )
    chat.samples([first])
    filled = chat._fill(second)
    if family == "hostile":
        assert filled is None
    else:
        assert filled is not None
        assert filled.text == chat.render(second).text


words = st.text("ab \n</>think_response{}\"'ü☂\ue0f1", max_size=12)
pieces = st.sampled_from(
    ["<think>\n", "</think>", "<tool_response>", "</tool_response>", "\n\n", "assistant", "[INST]", " ", "", "x"]
)
texts = st.lists(words | pieces, max_size=4).map("".join)
calls = st.builds(
    ToolCall,
    name=st.sampled_from(["look", 'q"']),
    arguments=st.dictionaries(st.text("kü", min_size=1, max_size=2), texts | st.integers() | st.none(), max_size=2),
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages = [Message(role="system", content=draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message(role="user", content=draw(texts)))
        for called in draw(st.lists(st.lists(calls, min_size=1, max_size=2), max_size=1)):
            messages.append(Message(role="assistant", content=draw(texts), tool_calls=called))
            messages += [Message(role="tool", content=draw(texts)) for _ in called]
        thought = draw(st.none() | texts)
        messages.append(Message(role="assistant", content=draw(texts), reasoning_content=thought))
    return talk(messages, draw(st.sampled_from([[], [TOOL], [TOOL, {"name": "bare"}]])))


@pytest.mark.parametrize("family", [*FAMILIES, "own"])
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(batch=st.lists(conversations(), min_size=1, max_size=3))
def test_filling_gives_what_probing_gives(
    chats: dict[str, ChatTemplate], family: str, batch: list[Conversation]
) -> None:
    chat = chats[family]
    try:
        expected = [by_probing(chat, one) for one in batch]
    except Exception as error:  # cannot be framed (an answer that prints nothing): then it is so on both ways
        with pytest.raises(type(error)):
            chat.samples(batch)
        return
    for one, other in zip(chat.samples(batch), expected, strict=True):
        assert_same(one, other)
