from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drafthouse.corpus import (
    ChatTemplate,
    Conversation,
    CorpusSettings,
    Message,
    load_tokenizer,
    save_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
    training_texts,
)
from drafthouse.corpus.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS
from drafthouse.errors import CorpusError
from tests.unit.corpus.conftest import GRAMMAR

TRAINING = """
from drafthouse.corpus import CorpusSettings, GrammarSource, tokenizer_sha256, train_tokenizer, training_texts
kinds = ("tool_call", "tool_answer", "lookup", "repeat")
settings = CorpusSettings(sources=tuple(GrammarSource(kind=kind) for kind in kinds), samples=200)
print(tokenizer_sha256(train_tokenizer(training_texts(settings, 200), 400)))
"""


def test_special_tokens_stand_first_and_are_single_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [tokenizer.convert_tokens_to_ids(token) for token in CONTROL_TOKENS] == [0, 1, 2, 3]
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.mask_token_id == 3
    for token in CONTROL_TOKENS + MARKUP_TOKENS:
        assert len(tokenizer.encode(f"{token}", add_special_tokens=False)) == 1
    assert len(tokenizer) == 640


def test_markup_survives_decoding_and_control_tokens_do_not(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("<|im_start|>a<think>b</think><tool_call>c<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b</think><tool_call>c"


@pytest.mark.parametrize("text", ["", " a  b\n\n\n c\t", "é\u0301 日本 👩‍👩‍👧\x00", "it's 'S 1234 don't", "\r\n \n"])
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_saved_directory_loads_with_transformers(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "tok")
    assert {path.name for path in (tmp_path / "tok").iterdir()} >= {"tokenizer.json", "chat_template.jinja"}
    turns = [Message(role="user", content="Hi"), Message(role="assistant", content="Ho")]
    expected = ChatTemplate(tokenizer).render(Conversation(id="a", kind="b", messages=turns)).text
    for loaded in (
        load_tokenizer(tmp_path / "tok"),
        PreTrainedTokenizerFast.from_pretrained(tmp_path / "tok"),
        AutoTokenizer.from_pretrained(tmp_path / "tok"),
    ):
        assert tokenizer_sha256(loaded) == tokenizer_sha256(tokenizer)
        assert loaded.eos_token_id == 2
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        assert loaded.apply_chat_template(chat, tokenize=False) == expected


def test_digest_ignores_layout_and_callers_settings_but_not_content(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(state, indent=4), encoding="utf-8")
    loaded = load_tokenizer(tmp_path)
    loaded(["a", "b c d e"], padding=True, truncation=True, max_length=3)
    assert tokenizer_sha256(loaded) == tokenizer_sha256(tokenizer)
    state["model"]["merges"][0], state["model"]["merges"][1] = (
        state["model"]["merges"][1],
        state["model"]["merges"][0],
    )
    file.write_text(json.dumps(state), encoding="utf-8")
    assert tokenizer_sha256(load_tokenizer(tmp_path)) != tokenizer_sha256(tokenizer)


def test_training_is_the_same_in_another_process() -> None:
    settings = CorpusSettings(sources=GRAMMAR, samples=200)
    here = tokenizer_sha256(train_tokenizer(training_texts(settings, 200), 400))
    run = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == here


def test_too_small_a_vocabulary_and_too_little_text() -> None:
    with pytest.raises(CorpusError, match="cannot hold the 266 bytes and control tokens"):
        train_tokenizer(["abc"], 200)
    with pytest.raises(CorpusError, match="fill only 2"):
        train_tokenizer(["abcabc abc"], 1024)


def test_directories_that_are_no_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"there is no tokenizer\.json"):
        load_tokenizer(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CorpusError, match="no chat template"):
        load_tokenizer(tmp_path)
