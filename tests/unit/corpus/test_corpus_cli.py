"""The verbs: from a curation file to a card, and one sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from drafthouse.corpus import save_tokenizer
from drafthouse.corpus.cli import app
from drafthouse.errors import ConfigError, StoreError
from tests.doubles.flaky_openai_server import MODEL, Flaky, flaky_openai_double

FILE = """
name: small
kinds: {chat: {}}
sources:
  - {name: mine, type: files, paths: [chats.jsonl], format: alpaca, kind: chat, licence: CC0-1.0}
filters: {near_duplicates: null}
heldout_one_in: 1000000
"""


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "small.yml").write_text(FILE, encoding="utf-8")
    records = [{"instruction": f"What is {n}?", "output": f"It is {n}."} for n in range(12)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "chats.jsonl").write_text(f"{text}oops\n", encoding="utf-8")
    return tmp_path


def test_the_whole_way(place: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    save_tokenizer(tokenizer, place / "tokenizer")
    store = ["--store", str(place / "store")]
    said = call("curate", str(place / "small.yml"), *store, "--processes", "1")
    assert "small: 12 conversations and 0 held out, 1 left out\n  chat: 12" in said
    assert (place / "store.curation").is_dir()
    with flaky_openai_double(Flaky(failing=0.2)) as double:
        words = ["regenerate", "small", *store, "--endpoint", double.url, "--model", MODEL, "--no-thinking", "--json"]
        answered = json.loads(call(*words))
    assert answered["samples"] == 12
    assert double.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    tokens = ["--tokenizer", str(place / "tokenizer"), "--processes", "1"]
    made = json.loads(call("tokenise", "small-answered", *store, *tokens, "--json"))
    assert (made["corpus"], made["samples"]) == ("answers", 12)
    assert "corpus-card.html" in call("card", "answers", *store, "--out", str(place / "card"))
    card = json.loads((place / "card" / "corpus-card.json").read_text(encoding="utf-8"))
    assert card["conversations"] == "small-answered"
    assert card["drops"][0]["reason"] == "not_json"
    assert card["total"] == {"read": 13, "taken": 12, "heldout": 0, "left_out": 1}
    assert card["way"] == {"conversations": 12, "regeneration": 0, "tokens": 0, "samples": 12}
    assert "Answer" not in (place / "card" / "corpus-card.html").read_text(encoding="utf-8").partition("<main>")[0]


def test_a_wrong_key_is_one_sentence(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"'heldout_one_in': .*greater than or equal to 2"):
        call("curate", str(place / "small.yml"), "--store", str(place / "s"), "--set", "heldout_one_in=1")
    with pytest.raises(ConfigError, match="there is no such run file"):
        call("curate", "nobody", "--store", str(place / "s"))
    assert not (place / "s").exists()


def test_a_card_that_cannot_be_written(place: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    save_tokenizer(tokenizer, place / "tokenizer")
    store = ["--store", str(place / "store")]
    call("curate", str(place / "small.yml"), *store, "--processes", "1")
    call("tokenise", "small", *store, "--tokenizer", str(place / "tokenizer"), "--processes", "1")
    (place / "file").write_text("", encoding="utf-8")
    with pytest.raises(StoreError, match=r"file: cannot be used \(File exists\); choose another folder"):
        call("card", "answers", *store, "--out", str(place / "file"))
