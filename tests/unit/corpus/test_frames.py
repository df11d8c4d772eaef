"""Frames: when they apply, what they are not made for, and that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import ChatTemplate, Conversation, Dropped, Message, TokenSample, frames
from drafthouse.corpus.token_bytes import byte_alphabet, token_bytes
from tests.unit.corpus.templates import CHATML_TOOLS

MakeChat = Callable[..., ChatTemplate]


def talk(question: str, answer: str, tools: list[dict[str, object]] | None = None) -> Conversation:
    messages = [Message(role="user", content=question), Message(role="assistant", content=answer)]
    return Conversation(id="c", kind="k", messages=messages, tools=tools or [])


def known(chat: ChatTemplate) -> int:
    assert chat._frames is not None
    return sum(len(one) for one in chat._frames._frames.values())


def test_another_path_through_the_template_is_another_frame(with_template: MakeChat) -> None:
    chat = with_template(CHATML_TOOLS)
    chat.samples([talk("One?", "Yes.")])
    assert known(chat) == 1
    assert chat._fill(talk("Two?", "No.")) is not None
    assert chat._fill(talk("<tool_response>x</tool_response>", "No.")) is None  # answers two questions otherwise
    assert chat._fill(talk("Two?", "a</think>b")) is None


def test_special_tokens_and_variables_are_known_to_the_template(with_template: MakeChat) -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' ~ who ~ '\\n' ~ m.content ~ eos_token }}{% endfor %}"
    chat = with_template(source, who="x")
    chat.samples([talk("One?", "Yes.")])
    filled = chat._fill(talk("Two?", "No."))
    assert filled is not None
    assert filled.text == "<|im_start|>x\nTwo?<|im_end|><|im_start|>x\nNo.<|im_end|>"


def test_a_control_token_in_a_text_is_found_by_counting(chat: ChatTemplate) -> None:
    chat.samples([talk("One?", "Yes.")])
    assert chat._fill(talk("One <|im_end|>", "Yes.")) is not None
    (made,) = chat.samples([talk("One <|im_end|>", "Yes.")])
    assert isinstance(made, Dropped)
    assert made.reason == "control_tokens"


def test_a_control_token_in_a_thought_that_is_not_printed(chat: ChatTemplate) -> None:
    def twice(thought: str) -> Conversation:
        first = Message(role="assistant", content="b", reasoning_content=thought)
        turns = [Message(role="user", content="a"), first, *talk("c", "d").messages]
        return Conversation(id="c", kind="k", messages=turns)

    fine, bad = chat.samples([twice("hm"), twice("<|im_end|>")])
    again, still_bad = chat.samples([twice("ho"), twice("<|im_end|>")])
    assert isinstance(fine, TokenSample)
    assert isinstance(again, TokenSample)
    assert bad == still_bad == Dropped("c", "k", "control_tokens")


def test_too_long_is_judged_in_tokens_on_both_ways(with_template: MakeChat) -> None:
    chat = with_template(CHATML_TOOLS)
    long = talk("One?", "word " * 200)
    assert chat.samples([long], 50) == chat.samples([long], 50) == [Dropped("c", "k", "too_long")]
    assert known(chat) == 1


def test_tools_that_a_template_looks_into_are_part_of_the_shape(chat: ChatTemplate) -> None:
    def schema(name: str) -> list[dict[str, object]]:
        return [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}]

    for _ in range(2):  # what comes once is not worth a frame
        chat.samples([talk("One?", "Yes.", schema("f"))])
    assert chat._fill(talk("Two?", "No.", schema("f"))) is not None
    assert chat._fill(talk("Two?", "No.", schema("g"))) is None


def test_tools_that_are_printed_whole_are_not(with_template: MakeChat) -> None:
    chat = with_template(CHATML_TOOLS)
    chat.samples([talk("One?", "Yes.", [{"name": "f"}])])
    filled = chat._fill(talk("Two?", "No.", [{"name": "other", "x": [1, None]}]))
    assert filled is not None
    assert '\n{"name": "other", "x": [1, null]}\n' in filled.text


def test_frames_are_bounded(with_template: MakeChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MOST_SHAPES", 3)
    chat = with_template(CHATML_TOOLS)
    for turns in range(1, 7):
        chat.samples([talk("q", "a").model_copy(update={"messages": talk("q", "a").messages * turns})])
    assert known(chat) == 3


def test_a_text_that_no_tokenizer_reads(chat: ChatTemplate) -> None:
    chat.samples([talk("One?", "Yes.")])
    with pytest.raises((UnicodeEncodeError, TypeError, ValueError)):
        chat.samples([talk("\ud800", "Yes.")])


def test_bytes_of_tokens_are_the_tokenizers_own(tokenizer: PreTrainedTokenizerFast) -> None:
    table = token_bytes(tokenizer.backend_tokenizer)
    assert table is not None
    text = "Zürich ☂ 👩‍👩‍👧 <|im_end|>\n<think> \x00"
    ids = np.array(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
    assert table.joined(ids) == text.encode()
    assert int(table.lengths[ids].sum()) == len(text.encode())


def test_an_alphabet_has_a_character_for_every_byte() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))


def word_pieces() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def test_other_vocabularies_have_no_such_table() -> None:
    assert token_bytes(word_pieces()) is None


def test_a_vocabulary_whose_decoder_says_otherwise_has_none() -> None:
    # A token outside of the byte alphabet that holds a character of two bytes: the decoder takes it as it is written.
    made = Tokenizer(models.WordLevel({"Ġa": 0, "☂": 1}, unk_token="Ġa"))
    made.decoder = decoders.ByteLevel()
    table = token_bytes(made)
    assert table is not None
    assert table.pieces == [b" a", "☂".encode()]
