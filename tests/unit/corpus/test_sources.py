from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from drafthouse.corpus import Split, sources
from drafthouse.errors import CorpusError

MANY = 500


def test_files_of_the_two_splits_are_disjoint_and_tests_are_left_out() -> None:
    train, heldout = sources.training_files("train"), sources.training_files("heldout")
    assert len(train) > 4 * len(heldout) > 0
    assert not set(train) & set(heldout)
    assert not [
        name for name in train + heldout if re.search(r"(^|/)(tests?|idlelib|encodings|lib2to3|site-packages)/", name)
    ]


def test_heldout_snippets_do_not_stand_in_training_files() -> None:
    train, heldout = sources.library("train"), sources.library("heldout")
    assert not {one.lines for one in train.code} & {one.lines for one in heldout.code}
    assert not {one.sentence for one in train.docs} & {one.sentence for one in heldout.docs}
    assert train.fingerprint != heldout.fingerprint
    assert len(train.code) > 1000
    assert len(train.docs) > 500


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_code_answers_stand_in_the_snippet_and_are_the_only_ones(split: Split) -> None:
    asked: Counter[str] = Counter()
    for index in range(MANY):
        record = sources.conversation("code", 0, index, split)
        prompt, answer = (message.content for message in record.messages)
        lines = prompt.split("\n")
        assert lines[0] == "Code:"
        if match := re.fullmatch(r"Quote the line that defines (\w+)\.", lines[-1]):
            hits = [line for line in lines[1:-1] if re.match(rf"\s*(def|class) {match[1]}\b", line)]
            assert [hit.strip() for hit in hits] == [answer]
        elif match := re.fullmatch(r"Copy the signature of (\w+)\.", lines[-1]):
            assert answer.startswith(match[1] + "(")
            assert sum(f"def {answer}" in line for line in lines[1:-1]) == 1
        elif lines[-1] == "Which function is defined here?":
            (name,) = (found for line in lines[1:-1] for found in re.findall(r"^\s*def (\w+)\(", line))
            assert answer == f"The def defines the function {name}."
        elif match := re.fullmatch(r"Repeat line (\d)\.", lines[-1]):
            assert lines[int(match[1])].split(None, 1) == [match[1], answer]
        elif match := re.fullmatch(r"Repeat lines (\d) to (\d) without indentation\.", lines[-1]):
            first, last = int(match[1]), int(match[2])
            assert [line.split(None, 1)[1] for line in lines[first : last + 1]] == answer.split("\n")
        elif match := re.fullmatch(r"Quote the line with (\w+)\.", lines[-1]):
            hits = [line for line in lines[1:-1] if re.search(rf"\b{match[1]}\b", line)]
            assert [hit.strip() for hit in hits] == [answer]
        else:
            assert lines[-2] == "Which line comes after this one?"
            snippet = [line.strip() for line in lines[1:-2]]
            assert snippet.count(lines[-1]) == 1
            assert snippet[snippet.index(lines[-1]) + 1] == answer
        asked[re.sub(r"\d", "N", " ".join(lines[-1].split()[:2]))] += 1
    assert len(asked) >= 6


def test_docs_answers_are_the_docstring_of_the_function_that_was_asked_for() -> None:
    for index in range(MANY):
        record = sources.conversation("docs", 0, index, "train")
        prompt, answer = (message.content for message in record.messages)
        name = re.search(r"(?:docstring of|What does) (\w+)", prompt.split("\n")[-1])
        assert name
        lines = prompt.split("\n")
        (place,) = (at for at, line in enumerate(lines) if re.match(rf"\s*def {name[1]}\(", line))
        assert lines[place + 1].strip().removeprefix("r").startswith('"""' + answer)


def test_the_same_call_gives_the_same_question() -> None:
    one = sources.conversation("code", 2, 5, "train")
    assert one == sources.conversation("code", 2, 5, "train")
    assert one.content_hash() != sources.conversation("code", 3, 5, "train").content_hash()
    stream = sources.conversations("code", 2, "train", start=5)
    assert next(stream) == one


def test_only_code_and_only_ascii(tmp_path: Path) -> None:
    body = '"""Prose.\n\none two three\nfour five six\nseven eight nine\n"""\n\n'
    body += "def f(alpha):\n    beta = alpha + 1\n    return beta\n\n"
    body += 'def g(x):\n    """Return the thing that was asked for."""\n    return x\n'
    body += "#" + " padding" * 300
    # names are tried until the hash puts one on the training side
    name = next(f"m{n}.py" for n in range(99) if sources.split_of_file(f"m{n}.py") == "train")
    (tmp_path / name).write_text(body, encoding="ascii")
    other = next(f"n{n}.py" for n in range(99) if sources.split_of_file(f"n{n}.py") == "train")
    (tmp_path / other).write_text(body.replace("beta", "β"), encoding="utf-8")
    found = sources.library("train", tmp_path)
    assert [one.lines for one in found.code] == [("def f(alpha):", "    beta = alpha + 1", "    return beta")]
    assert [(one.name, one.sentence) for one in found.docs] == [("g", "Return the thing that was asked for.")]
    before = found.fingerprint
    (tmp_path / name).write_text(body + " more", encoding="ascii")
    sources.library.cache_clear()
    assert sources.library("train", tmp_path).fingerprint != before


def test_a_python_without_sources(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no Python sources to ask about"):
        sources.library("train", tmp_path)
