"""Evaluation prompts in training data, by n words in a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafthouse.corpus.contamination import contamination
from drafthouse.corpus.similar import words
from drafthouse.errors import CorpusError

PROMPT = "Write a function that returns the sum of all even numbers in a list of integers."


def shared(tmp_path: Path, said: str, questions: list[str] | None = None, ngram: int = 8) -> str | None:
    path = tmp_path / "eval.txt"
    path.write_text(f"{PROMPT}\n\nAdd two.\n", encoding="utf-8")
    return contamination([path], ngram).shared(words(said), questions or [])


def test_words_in_a_row_are_found_whatever_their_case_and_punctuation(tmp_path: Path) -> None:
    said = "it RETURNS the sum: of all even numbers. In what?"
    assert shared(tmp_path, said) == "returns the sum of all even numbers in"
    assert shared(tmp_path, "it RETURNS the sum of, well, all even numbers in a list") is None


def test_one_word_fewer_is_none(tmp_path: Path) -> None:
    assert shared(tmp_path, "that returns the sum of all even") is None


def test_a_short_prompt_counts_as_a_whole_question_only(tmp_path: Path) -> None:
    assert shared(tmp_path, "please add two now", ["Please add two now"]) is None
    assert shared(tmp_path, "add two", ["ADD  two!"]) == "add two"


def test_prompts_in_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    records = [
        {"prompt": "one two three four"},
        {"question": "five six seven eight"},
        {"turns": ["nine ten eleven twelve"]},
        {"messages": [{"role": "system", "content": "x y z u"}, {"role": "user", "content": "a b c d"}]},
    ]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    found = contamination([path], 4)
    assert len(found.grams) == 4
    assert found.shared(["a", "b", "c", "d"], []) == "a b c d"
    assert found.shared(["x", "y", "z", "u"], []) is None


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": 3}', '{"turns": []}', '{"messages": []}'])
def test_a_line_without_a_prompt_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"eval\.jsonl:2: a line without a prompt"):
        contamination([path], 8)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="the evaluation prompts cannot be read"):
        contamination([tmp_path / "none.txt"], 8)


def test_nothing_forbids_nothing() -> None:
    nothing = contamination([], 8)
    assert not nothing
    assert nothing.shared(["a"] * 20, ["a"]) is None
