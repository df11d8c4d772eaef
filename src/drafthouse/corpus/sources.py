"""Text that is already on the machine: questions about Python's own standard library.

The library (PSF licence) lies wherever this program runs, so code and documentation can be learned and
measured without a download. Its text depends on the Python version: a corpus made from it records a
fingerprint.
"""

from __future__ import annotations

import hashlib
import keyword
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from drafthouse.corpus.draw import Draw
from drafthouse.corpus.records import Conversation, Message, Split
from drafthouse.errors import CorpusError

StdlibKind = Literal["code", "docs"]
STDLIB_KINDS: tuple[StdlibKind, ...] = get_args(StdlibKind)

HELDOUT_ONE_IN = 8
_SKIPPED = {"test", "tests", "idlelib", "idle_test", "encodings", "pydoc_data", "lib2to3", "site-packages"}
_SKIPPED |= {"dist-packages", "__pycache__", "ensurepip", "turtledemo", "__phello__"}
_SMALLEST_FILE, _LARGEST_FILE = 2_000, 400_000  # bytes
_LONGEST_LINE = 72
_LONGEST_SNIPPET = 200  # characters: about 100 tokens of a 1024-entry vocabulary
_MOST_LINES = 7
_SHORTEST_ANSWER = 18  # characters

_DEF = re.compile(r"def (?P<name>\w+)(?P<arguments>\(.*\))(?: -> .+)?:$")
_CLASS = re.compile(r"class (?P<name>\w+)(?:\(.*\))?:$")
_DOC = re.compile(r'r?"""(?P<sentence>[A-Z][^"\\]{18,90}?\.)(?:\s|"""|$)')
_WORD = re.compile(r"\b[A-Za-z_]\w{3,}\b")


@dataclass(frozen=True)
class Snippet:
    """Consecutive lines of one file, without their common indentation."""

    file: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Documented:
    """A function's signature line, the lines that follow, and the first sentence of its docstring."""

    file: str
    name: str
    lines: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Library:
    """Snippets of one split, in file order, and the fingerprint of the files they come from."""

    code: tuple[Snippet, ...]
    docs: tuple[Documented, ...]
    fingerprint: str


def split_of_file(name: str) -> Split:
    """The side that a file belongs to: no snippet of a held-out file is ever trained on."""
    first = hashlib.sha256(name.encode()).digest()[0]
    return "heldout" if first % HELDOUT_ONE_IN == 0 else "train"


def stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@cache
def library(split: Split, root: Path | None = None) -> Library:
    """Read the standard library (or the Python files under `root`) of one split.

    Raises:
        CorpusError: there are no usable Python sources (some distributions ship byte code only).
    """
    root = stdlib_root() if root is None else root
    # The same lines may stand in two files: what training has seen is not held out.
    seen = library("train", root) if split == "heldout" else None
    seen_code = {snippet.lines for snippet in seen.code} if seen else set()
    seen_docs = {documented.sentence for documented in seen.docs} if seen else set()
    code: list[Snippet] = []
    docs: list[Documented] = []
    fingerprint = hashlib.sha256(seen.fingerprint.encode() if seen else b"")
    for name, path in _files(root):
        if split_of_file(name) != split:
            continue
        data = path.read_bytes()
        try:
            text = data.decode("ascii")
        except UnicodeDecodeError:
            continue
        fingerprint.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
        lines = text.splitlines()
        code.extend(one for one in _snippets(name, lines) if one.lines not in seen_code)
        docs.extend(one for one in _documented(name, lines) if one.sentence not in seen_docs)
    if not code or not docs:
        raise CorpusError(
            "no Python sources to ask about",
            where=str(root),
            fix="use a Python that ships its library as source",
        )
    return Library(tuple(code), tuple(docs), fingerprint.hexdigest())


def conversation(kind: StdlibKind, seed: int, index: int, split: Split) -> Conversation:
    """Question number `index` about the library; its answer stands in the snippet, word for word."""
    draw = Draw(seed, kind, split, index)
    held = library(split)
    text, answer = _ask_code(draw, held.code) if kind == "code" else _ask_docs(draw, held.docs)
    messages = [Message(role="user", content=text), Message(role="assistant", content=answer)]
    return Conversation(id=f"{kind}-{split}-{seed}-{index}", kind=kind, messages=messages)


def conversations(kind: StdlibKind, seed: int, split: Split, start: int = 0) -> Iterator[Conversation]:
    """All conversations of `kind` from number `start` on, without end (they repeat in the long run)."""
    while True:
        yield conversation(kind, seed, start, split)
        start += 1


def _files(root: Path) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        # build-time configuration differs between two installations of one version
        if _SKIPPED.intersection(relative.parts) or relative.parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        if _SMALLEST_FILE <= path.stat().st_size <= _LARGEST_FILE:
            found.append((relative.as_posix(), path))
    return sorted(found)


def _snippets(file: str, lines: list[str]) -> Iterator[Snippet]:
    """Blocks of code between empty lines, cut to a size that a short row holds; prose is left to docs."""
    block: list[str] = []
    prose = inside = False
    for line in [*lines, ""]:
        inside ^= (line.count('"""') + line.count("'''")) % 2 == 1
        if line.strip():
            block.append(line)
            prose |= inside and len(block) == 1
            continue
        kept = [] if prose else _fitting(block)
        prose = inside
        if len(kept) >= 3 and not kept[0].startswith("#"):
            yield Snippet(file, tuple(kept))
        block = []


def _fitting(block: list[str]) -> list[str]:
    kept: list[str] = []
    size = 0
    for line in block[:_MOST_LINES]:
        size += len(line.strip()) + 1
        if len(line) > _LONGEST_LINE or size > _LONGEST_SNIPPET or '"""' in line or "'''" in line or "\t" in line:
            break
        kept.append(line.rstrip())
    return _dedented(kept)


def _dedented(lines: list[str]) -> list[str]:
    if not lines:
        return []
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return [line[margin:] for line in lines]


def _documented(file: str, lines: list[str]) -> Iterator[Documented]:
    for position, line in enumerate(lines[:-2]):
        signature = _DEF.fullmatch(line.strip())
        if signature is None or len(line) > _LONGEST_LINE:
            continue
        doc = _DOC.match(lines[position + 1].strip())
        if doc is None or "`" in doc["sentence"]:
            continue
        tail = [
            below.rstrip()
            for below in lines[position + 2 : position + 4]
            if below.strip() and len(below) <= _LONGEST_LINE and "\t" not in below
        ]
        kept = _dedented([line.rstrip(), lines[position + 1].rstrip(), *tail])
        if sum(map(len, kept)) <= _LONGEST_SNIPPET:
            yield Documented(file, signature["name"], tuple(kept), doc["sentence"])


_Asked = tuple[str, str]


def _ask_code(draw: Draw, snippets: tuple[Snippet, ...]) -> _Asked:
    while True:
        snippet = draw.pick(snippets)
        asked = draw.pick(_CODE_QUESTIONS)(draw, snippet.lines)
        if asked is not None:
            return asked


def _shown(question: str, lines: tuple[str, ...] | list[str]) -> str:
    return "Code:\n" + "\n".join(lines) + "\n" + question


def _definition(draw: Draw, lines: tuple[str, ...]) -> _Asked | None:
    defined = [
        (match["name"], line.strip())
        for line in lines
        if (match := _DEF.fullmatch(line.strip()) or _CLASS.fullmatch(line.strip()))
    ]
    names = Counter(name for name, _ in defined)
    fitting = [(name, line) for name, line in defined if names[name] == 1 and len(line) >= _SHORTEST_ANSWER]
    if not fitting:
        return None
    name, line = draw.pick(fitting)
    return _shown(f"Quote the line that defines {name}.", lines), line


def _signature(draw: Draw, lines: tuple[str, ...]) -> _Asked | None:
    found = [match for line in lines if (match := _DEF.fullmatch(line.strip()))]
    if len(found) != 1 or len(found[0]["arguments"]) < 8:
        return None
    name = found[0]["name"]
    return _shown(f"Copy the signature of {name}.", lines), name + found[0]["arguments"]


def _defined_name(draw: Draw, lines: tuple[str, ...]) -> _Asked | None:
    found = [match for line in lines if (match := _DEF.fullmatch(line.strip()))]
    if len(found) != 1:
        return None
    return _shown("Which function is defined here?", lines), f"The def defines the function {found[0]['name']}."


def _numbered(draw: Draw, lines: tuple[str, ...]) -> _Asked | None:
    fitting = [place for place, line in enumerate(lines) if len(line.strip()) >= _SHORTEST_ANSWER]
    if not fitting:
        return None
    chosen = draw.pick(fitting)
    listing = [f"{place} {line}" for place, line in enumerate(lines, start=1)]
    return _shown(f"Repeat line {chosen + 1}.", listing), lines[chosen].strip()


def _several(draw: Draw, lines: tuple[str, ...]) -> _Asked | None:
    if len(lines) < 4:
        return None
    first = draw.below(len(lines) - 1)
    last = min(first + draw.between(1, 2), len(lines) - 1)
    listing = [f"{place} {line}" for place, line in enumerate(lines, start=1)]
    answer = "\n".join(line.strip() for line in lines[first : last + 1])
    if not _SHORTEST_ANSWER <= len(answer) <= 120:
        return None
    return _shown(f"Repeat lines {first + 1} to {last + 1} without indentation.", listing), answer


def _containing(draw: Draw, lines: tuple[str, ...]) -> _Asked | None:
    seen = Counter(word for line in lines for word in set(_WORD.findall(line)))
    fitting = [
        (word, line.strip())
        for line in lines
        if len(line.strip()) >= _SHORTEST_ANSWER
        for word in sorted(set(_WORD.findall(line)))
        if seen[word] == 1 and not keyword.iskeyword(word)
    ]
    if not fitting:
        return None
    word, line = draw.pick(fitting)
    return _shown(f"Quote the line with {word}.", lines), line


def _following(draw: Draw, lines: tuple[str, ...]) -> _Asked | None:
    stripped = [line.strip() for line in lines]
    fitting = [
        place
        for place, line in enumerate(stripped[:-1])
        if stripped.count(line) == 1 and 8 <= len(line) <= 50 and len(stripped[place + 1]) >= _SHORTEST_ANSWER
    ]
    if not fitting:
        return None
    place = draw.pick(fitting)
    return _shown(f"Which line comes after this one?\n{stripped[place]}", lines), stripped[place + 1]


_CODE_QUESTIONS: tuple[Callable[[Draw, tuple[str, ...]], _Asked | None], ...] = (
    _definition,
    _signature,
    _defined_name,
    _numbered,
    _several,
    _several,
    _containing,
    _following,
)


def _ask_docs(draw: Draw, documented: tuple[Documented, ...]) -> _Asked:
    while True:
        place = draw.below(len(documented))
        asked = documented[place]
        shown = [asked]
        if draw.chance(0.6):
            # the neighbour is of the same file, so the two read alike and the name decides
            other = documented[(place + 1) % len(documented)]
            sizes = sum(len(line) for one in (asked, other) for line in one.lines)
            if other.file == asked.file and other.name != asked.name and sizes <= 1.2 * _LONGEST_SNIPPET:
                shown.append(other)
        lines = [line for one in draw.shuffled(shown) for line in one.lines]
        # a sentence that stands twice, or a name that is defined again in the tail, has no single answer
        if sum(f"def {asked.name}(" in line for line in lines) == 1:
            question = draw.pick(
                (
                    f"Quote the first sentence of the docstring of {asked.name}.",
                    f"What does {asked.name} do? Quote the first sentence.",
                )
            )
            return _shown(question, lines), asked.sentence


def training_files(split: Split) -> list[str]:
    """Names (relative to the library's root) of the files that one split may use."""
    return [name for name, _ in _files(stdlib_root()) if split_of_file(name) == split]
