from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import ChatTemplate, CorpusSettings, GrammarSource, train_tokenizer, training_texts

GRAMMAR = tuple(GrammarSource(kind=kind) for kind in ("tool_call", "tool_answer", "lookup", "repeat"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    settings = CorpusSettings(sources=GRAMMAR, samples=600)
    return train_tokenizer(training_texts(settings, 600), 640)


@pytest.fixture(scope="session")
def chat(tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
    return ChatTemplate(tokenizer)


@pytest.fixture
def with_template(tokenizer: PreTrainedTokenizerFast) -> Callable[..., ChatTemplate]:
    def make(template: str | None, **variables: object) -> ChatTemplate:
        other = copy.deepcopy(tokenizer)
        other.chat_template = template
        return ChatTemplate(other, variables)

    return make
