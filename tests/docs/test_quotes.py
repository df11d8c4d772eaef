"""What documents quote from our tools is what our tools say: every line is built by a message of the sources.

That is asked of `text` blocks of the runbooks, and of errors, warnings and failures that are shown for commands of ours
which are not executed (what is executed is compared with what it prints). What other programs say stands in `output`
blocks."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks, commands, shown_path
from tests.docs.table import entries

RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
SOURCES = [*(ROOT / "src").rglob("*.py"), *(ROOT / "ansible" / "module_utils").rglob("*.py")]
_SPOKEN = 12  # letters that a message must have of its own, to be told from any other
_HOLE = r".{1,200}?"


@functools.cache
def messages() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Every string of the sources that says something: its longest literal piece; all of it, fields as holes."""
    found: dict[str, str] = {}
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            parts = list(_parts(node))
            longest = max((part for part in parts if part is not None), key=len, default="")
            if _letters(longest) >= _SPOKEN:
                found["".join(_HOLE if part is None else re.escape(part) for part in parts)] = longest
    return tuple((longest, re.compile(pattern)) for pattern, longest in found.items())


def _parts(node: ast.AST) -> Iterator[str | None]:
    """The literal pieces of a string, and None for each of its fields."""
    if isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield str(part.value) if isinstance(part, ast.Constant) else None
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
        yield node.value


def _letters(text: str) -> int:
    return len(re.sub(r"[^a-z]", "", text))


def unsaid(line: str) -> str:
    """The first part of a quoted line, between semicolons, that no message of the sources says; or nothing."""
    said = [match.span() for longest, one in messages() if longest in line for match in one.finditer(line)]
    begin = 0
    for piece in line.split(";"):
        end = begin + len(piece)
        heard = any(_letters(line[max(begin, first) : min(end, last)]) >= _SPOKEN for first, last in said)
        if _letters(piece) >= _SPOKEN and not heard:
            return piece.strip()
        begin = end + 1
    return ""


def quotes() -> list[tuple[str, str]]:
    """Place and text of every quoted line."""
    table = entries()
    shown = [
        (command.where, line)
        for page in PAGES
        for command in commands(page)
        if command.shown and command.program in ("drafthouse", "fab")
        if next((entry.kind for entry in table if entry.fits(command)), "") != "executed"
        for line in command.shown
        if line.strip().startswith(("error: ", "warning: ", "FAILED "))
    ]
    return shown + [
        (f"{shown_path(page)}:{number}", line)
        for page in RUNBOOKS
        for block in blocks(page)
        if block.language == "text"
        for number, line in block.lines
        if line.strip()
    ]


@pytest.mark.parametrize(("where", "line"), quotes(), ids=[where for where, _ in quotes()])
def test_a_quoted_sentence_is_one_of_ours(where: str, line: str) -> None:
    assert not unsaid(line), f"{where}: nothing in the sources says: {unsaid(line)}"


def test_a_sentence_that_nobody_says_is_found() -> None:
    assert unsaid("error: the disk is rather full; free space there and start again: done shards are kept")
    assert not unsaid("error: /x: the disk is full; free space there and start again: done shards are kept")


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.stem)
def test_a_runbook_has_its_parts(page: Path) -> None:
    headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if page.stem in ("index", "deploy"):
        return
    assert headings == [
        "How it shows itself",
        "What it means",
        "What to do",
        "How to know that it is over",
        "Proven by",
    ]
