"""Answers are checked by solving the prompt again, without the generator's knowledge."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import numpy as np
import pytest

from drafthouse.corpus import (
    ChatTemplate,
    Conversation,
    CorpusSettings,
    TokenSample,
    train_tokenizer,
    training_texts,
)
from drafthouse.corpus.draw import Draw
from drafthouse.corpus.grammar import (
    GRAMMAR_KINDS,
    GrammarKind,
    conversation,
    conversations,
    distinct_values,
)
from drafthouse.corpus.mixture import token_samples
from drafthouse.corpus.phrases import RESERVED
from drafthouse.corpus.words import new_word, split_of_word

MANY = 400


def said(record: Conversation) -> str:
    parts = [record.model_dump_json(exclude={"id", "kind"})]
    return " ".join(parts)


def content_words(record: Conversation) -> set[str]:
    texts = [message.content for message in record.messages]
    texts += [
        str(value) for message in record.messages for call in message.tool_calls for value in call.arguments.values()
    ]
    return set(re.findall(r"[a-z]+", " ".join(texts).lower())) - RESERVED


@pytest.mark.parametrize("kind", GRAMMAR_KINDS)
class TestEveryKind:
    def test_heldout_words_never_occur_in_training(self, kind: GrammarKind) -> None:
        trained = {
            word
            for index in range(MANY)
            for word in re.findall(r"[a-z]+", said(conversation(kind, 0, index, "train")).lower())
        }
        for index in range(MANY):
            heldout = content_words(conversation(kind, 0, index, "heldout"))
            assert heldout
            assert not heldout & trained
            assert {split_of_word(word) for word in heldout} == {"heldout"}

    def test_an_answer_is_a_function_of_its_prompt(self, kind: GrammarKind) -> None:
        answers: dict[str, str] = {}
        for index in range(2 * MANY):
            record = conversation(kind, 1, index, "train")
            prompt = json.dumps([[message.model_dump() for message in record.messages[:-1]], record.tools])
            answer = record.messages[-1].model_dump_json()
            assert answers.setdefault(prompt, answer) == answer
        assert len(set(answers.values())) > 0.99 * len(answers)

    def test_seed_index_and_split_decide_the_content(self, kind: GrammarKind) -> None:
        one = conversation(kind, 3, 7, "train")
        assert one == conversation(kind, 3, 7, "train")
        others = [
            conversation(kind, 4, 7, "train"),
            conversation(kind, 3, 8, "train"),
            conversation(kind, 3, 7, "heldout"),
        ]
        assert len({record.content_hash() for record in [one, *others]}) == 4
        stream = conversations(kind, 3, "train", start=7)
        assert next(stream) == one
        assert next(stream) == others[1]


def test_content_is_the_same_on_every_machine() -> None:
    digest = hashlib.sha256()
    for kind in GRAMMAR_KINDS:
        for index in range(50):
            digest.update(conversation(kind, 0, index, "train").content_hash().encode())
    assert digest.hexdigest() == "d45ad9ec4d4467a4cc656a90a1dc3f9a9b5fbae511a456cbc9fb805bd46dfee0"


def test_a_tool_call_takes_its_arguments_from_the_request() -> None:
    seen: Counter[int] = Counter()
    for index in range(MANY):
        record = conversation("tool_call", 0, index, "train")
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in record.tools}
        assert len(tools) == len(record.tools)
        request, answer = record.messages
        seen[len(record.tools)] += 1
        for call in answer.tool_calls:
            verb, noun = call.name.split("_")
            assert re.search(rf"\b{verb} (the|a) {noun}\b", request.content, re.IGNORECASE)
            assert list(call.arguments) == tools[call.name]["required"]
            for name, value in call.arguments.items():
                expected = "integer" if isinstance(value, int) else "string"
                assert tools[call.name]["properties"][name] == {"type": expected}
                spoken = rf'\b{name} (= |set to |)"?{re.escape(str(value))}\b'
                assert re.search(spoken, request.content, re.IGNORECASE), request.content
        others = set(tools) - {call.name for call in answer.tool_calls}
        for other in others:
            verb, noun = other.split("_")
            assert not re.search(rf"\b{verb} (the|a) {noun}\b", request.content, re.IGNORECASE)
    assert set(seen) == {1, 2, 3}


def test_a_tool_answer_says_what_the_response_says() -> None:
    for index in range(MANY):
        record = conversation("tool_answer", 0, index, "train")
        request, call, response, answer = record.messages
        assert [message.role for message in record.messages] == ["user", "assistant", "tool", "assistant"]
        assert call.tool_calls[0].name == record.tools[0]["function"]["name"]
        values = json.loads(response.content)
        fields = [field for field in values if re.search(rf"\b{field}\b", answer.content)]
        assert 1 <= len(fields) <= 2
        for field in fields:
            assert re.search(rf"\b{field}\b", request.content)
            value = re.escape(str(values[field]))
            assert re.search(rf"\b{field}:? (is |of .* is )?{value}\b", answer.content), answer.content


def test_a_lookup_pairs_keys_and_values_as_the_table_does() -> None:
    thinking = 0
    for index in range(MANY):
        record = conversation("lookup", 0, index, "train")
        question, answer = record.messages
        pairs: dict[str, str] = {
            match[1]: match[2]
            for line in question.content.splitlines()
            if (match := re.fullmatch(r"(?:- )?(\w+)(?::| =| \||  ?->) (.+)", line))
            and not line.startswith(("Think", "Give"))
        }
        assert 3 <= len(pairs) <= 6
        assert len(set(pairs.values())) == len(pairs)
        ask = next(
            line
            for line in question.content.splitlines()
            if line.endswith(("?", "."))
            and line.split()[0] in ("What", "Which", "Give", "Who", "Think", "Think,", "Think:")
        )
        asked = [key for key in pairs if re.search(rf"\b{key}\b", ask)] or [
            key for key, value in pairs.items() if value in ask
        ]
        text = f"{answer.reasoning_content or ''}\n{answer.content}"
        for key, value in pairs.items():
            assert (value in text) == (key in asked)
        thinking += answer.reasoning_content is not None
    assert 0.2 < thinking / MANY < 0.4


def test_a_repetition_is_made_of_the_given_words() -> None:
    for index in range(MANY):
        ask, text = conversation("repeat", 0, index, "train").messages[0].content.split("\n")
        answer = conversation("repeat", 0, index, "train").messages[1].content
        words = text.split()
        if "reverse" in ask or "backwards" in ask:
            assert answer.split() == words[::-1]
        elif "two times" in ask or "twice" in ask:
            assert answer.split("\n") == [text, text]
        elif "first word" in ask:
            assert answer.split() == words[1:]
        elif "commas" in ask:
            assert answer.split(", ") == words
        elif "Number" in ask or "numbered" in ask:
            assert [line.split(". ") for line in answer.split("\n")] == [[str(n), w] for n, w in enumerate(words, 1)]
        elif "line" in ask and "next" not in ask:
            assert answer.split("\n") == words
        elif "quotes" in ask or "Quote" in ask:
            assert answer == f'"{text}"'
        else:
            assert answer == text


def test_conversations_fit_the_rows_of_a_small_model() -> None:
    settings = CorpusSettings(samples=900, heldout=0)
    tokenizer = train_tokenizer(training_texts(settings, 2400), 1024)
    samples = list(token_samples(settings, tokenizer))
    by_kind: dict[str, list[TokenSample]] = {}
    for sample in samples:
        by_kind.setdefault(sample.kind, []).append(sample)
    assert len(samples) == 900
    for kind, members in by_kind.items():
        answers = [int(sample.loss_mask.sum()) for sample in members]
        assert min(answers) >= 6, kind
        assert max(answers) <= 80, kind
        assert 15 <= np.mean(answers) <= 50, kind
        prompts = [int(np.argmax(sample.loss_mask)) for sample in members]
        assert np.quantile(prompts, 0.99) <= 180, kind
    assert 24 <= np.mean([sample.loss_mask.sum() for sample in samples]) <= 34


def test_content_words_belong_to_their_split_and_are_never_reserved() -> None:
    draw = Draw("words")
    words = [new_word(draw, "train", ()) for _ in range(500)]
    assert all(len(word) > 4 and split_of_word(word) == "train" for word in words)
    again = Draw("words")
    assert not set(words[:100]) & {new_word(again, "train", frozenset(words[:100])) for _ in range(500)}
    heldout = Draw("words")
    assert {split_of_word(new_word(heldout, "heldout", ())) for _ in range(100)} == {"heldout"}


def test_values_of_which_one_contains_another_are_drawn_again() -> None:
    offered = iter(["solif", "solif", "oli", "solif 12", "marona", "x"])
    assert distinct_values(2, lambda: next(offered)) == ["solif", "marona"]


def test_draw_is_uniform_and_pinned() -> None:
    draw = Draw(0, "a", 1)
    assert [draw.below(100) for _ in range(6)] == [82, 7, 27, 25, 59, 5]
    counts = Counter(Draw("u", index).below(4) for index in range(4000))
    assert max(counts.values()) - min(counts.values()) < 200
    assert sorted(Draw("s").shuffled(range(9))) == list(range(9))
    assert len(set(Draw("d").distinct("abcdef", 6))) == 6
    assert {Draw("b", index).between(2, 4) for index in range(50)} == {2, 3, 4}


def test_chat_template_takes_every_kind(chat: ChatTemplate) -> None:
    records = [conversation(kind, 5, index, "heldout") for kind in GRAMMAR_KINDS for index in range(20)]
    assert all(isinstance(sample, TokenSample) for sample in chat.samples(records))
