"""What documents ask a reader to type: the commands of their fenced blocks, the files of their titled blocks.

`sh` blocks hold commands; `console` blocks hold commands behind `$ `, each followed by what it prints. A `yaml` block
with a title is a file that the page tells its reader to write.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("sh", "bash", "console")
#: Programs whose command lines must stand in a block that is collected.
PROGRAMS = ("drafthouse", "fab", "make", "ansible-playbook", "torchrun", "docker", "pip", "python", "python3")

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+) *(?P<language>[a-z]*)(?P<rest>[^`]*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_SEPARATORS = frozenset({"&&", "&", ";", "|", "||"})
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the rest of its opening line, and its lines with their numbers in the page."""

    page: Path
    line: int
    language: str
    rest: str
    lines: tuple[tuple[int, str], ...]

    @property
    def where(self) -> str:
        return f"{shown_path(self.page)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: relative to the repository.
        line: where it begins.
        block: the line of its block's fence: commands of a block share a working folder.
        words: as a shell would split it, without variables set before it.
        variables: those.
        shown: the output that the page shows for it; None where it shows none.
    """

    page: str
    line: int
    block: int
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    shown: tuple[str, ...] | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]


def shown_path(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else str(page)


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page; a fence that is never closed is an error.

    Raises:
        ValueError: names page and line.
    """
    opened: tuple[int, re.Match[str]] | None = None
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        match = _FENCE.match(line)
        if opened is None:
            if match:
                opened, lines = (number, match), []
        elif match and not match["language"] and len(match["ticks"]) >= len(opened[1]["ticks"]):
            begin, fence = opened
            yield Block(page, begin, fence["language"], fence["rest"], tuple(lines))
            opened = None
        else:
            lines.append((number, line.removeprefix(opened[1]["indent"])))
    if opened is not None:
        raise ValueError(f"{shown_path(page)}:{opened[0]}: the block is never closed")


def commands(page: Path) -> list[Command]:
    """The commands of a page in their order.

    Raises:
        ValueError: a command cannot be split as a shell would, or stands in a block that is not collected.
    """
    found: list[Command] = []
    for block in blocks(page):
        if block.language in LANGUAGES:
            found += _of_block(block)
            continue
        for number, line in block.lines:
            if block.language in ("", "text") and re.match(rf"(?:\$ )?({'|'.join(PROGRAMS)}) [a-z-]", line.strip()):
                raise ValueError(f"{shown_path(page)}:{number}: a command in a `{block.language or 'plain'}` block")
    return found


def files(page: Path) -> dict[str, str]:
    """Files that the page tells its reader to write, by their names."""
    found = {}
    for block in blocks(page):
        title = _TITLE.search(block.rest)
        if title:
            found[title[1]] = "".join(f"{line}\n" for _, line in block.lines)
    return found


def _of_block(block: Block) -> list[Command]:
    found: list[Command] = []
    for number, text, shown in _lines(block):
        where = f"{shown_path(block.page)}:{number}"
        try:
            parts = list(_split(text))
        except ValueError as error:
            raise ValueError(f"{where}: {error}: {text}") from None
        for index, words in enumerate(parts):
            variables = []
            while words and _ASSIGNMENT.match(words[0]):
                name, _, value = words.pop(0).partition("=")
                variables.append((name, value))
            if words:
                last = index == len(parts) - 1
                found.append(
                    Command(
                        shown_path(block.page),
                        number,
                        block.line,
                        tuple(words),
                        tuple(variables),
                        shown if last else None,
                    )
                )
    return found


def _lines(block: Block) -> Iterator[tuple[int, str, tuple[str, ...] | None]]:
    """Number, whole command line and shown output of every command line of a block."""
    console = block.language == "console"
    begin, text = 0, ""
    shown: list[str] = []
    open_ = False
    for number, line in block.lines:
        if open_:
            text += line.strip()
        elif not console or line.startswith("$ "):
            if text.strip():
                yield begin, text, tuple(shown) if shown else None
            begin, text, shown = number, line.removeprefix("$ ") if console else line, []
        else:
            shown.append(line)
            continue
        open_ = text.endswith("\\")
        text = text.removesuffix("\\")
    if text.strip():
        yield begin, text, tuple(shown) if shown else None


def _split(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&;|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word in _SEPARATORS:
            if words:
                yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words
