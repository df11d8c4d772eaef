"""A folder in which the documents' commands are executed as they stand there, one page after another.

It looks like a checkout, and holds the files that pages tell their readers to write. The quickstart is executed first:
its run is the one that later pages speak of.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from tests.command_line import drafthouse
from tests.docs.blocks import PAGES, ROOT, Command, files

#: Parts of the checkout that commands read; what they write (runs/, data/) belongs to the folder.
PARTS = (
    "ansible",
    "benchmarks",
    "docker",
    "fabfile.py",
    "images",
    "inventory",
    "Makefile",
    "pyproject.toml",
    "src",
    "tests",
)
QUICKSTART = ROOT / "docs" / "quickstart.md"
#: The quickstart's run, and the name under which other pages speak of a finished run.
MADE, CALLED = "runs/small", "runs/demo"
LIMIT_S = 120

_NUMBER = re.compile(r"\d(?:[\d.,_]*\d)?")
_MASKS = ((re.compile(r"\b[0-9a-f]{12,}\b"), "#"), (re.compile(r"(?<![\w.])/[^\s:;,']+"), "/…"), (_NUMBER, "#"))


@dataclass(frozen=True)
class Done:
    """What an executed command did: exit status, all that it printed, seconds."""

    code: int
    output: str
    seconds: float


@dataclass
class Workplace:
    """Executes commands; each once, after all that its page has before it.

    Attributes:
        folder: where they are executed.
        pages: what is to be executed, by page, in order.
        looking: lines that only look: they are executed once for all pages.
    """

    folder: Path
    pages: dict[str, list[Command]]
    looking: frozenset[str] = frozenset()
    done: dict[tuple[str, int, str], Done] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in PARTS:
            (self.folder / part).symlink_to(ROOT / part)
        (self.folder / "docs").mkdir()
        for page in PAGES:
            for name, text in files(page).items():
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")

    def outcome(self, command: Command) -> Done:
        """Of a command, executed now together with those that have to come before it, if that was not done yet."""
        quickstart = str(QUICKSTART.relative_to(ROOT))
        if command.page != quickstart:
            self._execute(quickstart, None)
            if not (self.folder / CALLED).exists() and (self.folder / MADE).exists():
                shutil.copytree(self.folder / MADE, self.folder / CALLED)
        self._execute(command.page, command)
        return self.done[_key(command)]

    def _execute(self, page: str, last: Command | None) -> None:
        folders: dict[int, Path] = {}
        for command in self.pages.get(page, []):
            here = folders.setdefault(command.block, self.folder)
            if command.program == "cd":
                folders[command.block] = here / command.words[1]
                self.done[_key(command)] = Done(0 if folders[command.block].is_dir() else 1, "", 0.0)
            elif _key(command) not in self.done:
                known = (one for (_, _, text), one in self.done.items() if text == command.text in self.looking)
                self.done[_key(command)] = next(known, None) or execute(command, here)
            if command == last:
                return


def execute(command: Command, folder: Path) -> Done:
    """Run a command in a folder: `drafthouse` in this process, which has loaded what it needs, others in their own."""
    begin = time.monotonic()
    variables = {"COLUMNS": "200", "NO_COLOR": "1", **dict(command.variables)}
    with mock.patch.dict(os.environ, variables), _inside(folder):
        if command.program == "drafthouse":
            outcome = drafthouse(*command.words[1:])
            return Done(outcome.code, outcome.out + outcome.err, time.monotonic() - begin)
        programs = Path(sys.executable).parent
        words, file = command.words, None
        if ">" in words:
            at = words.index(">")
            words, file = words[:at], Path(words[at + 1])
        found = subprocess.run(
            words,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if file is not None:
            file.write_text(found.stdout, encoding="utf-8")
    return Done(found.returncode, found.stdout, time.monotonic() - begin)


def differences(shown: tuple[str, ...], output: str) -> list[str]:
    """Lines that a page shows and that the command did not print, in this order; `…` stands for anything.

    Numbers, digests and absolute paths are not compared: they differ between machines.
    """
    printed = [_mask(line) for line in output.splitlines()]
    missing, at = [], 0
    for line in shown:
        wanted = _mask(line)
        if wanted in ("", "…"):
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in wanted.split("…")))
        found = next((i for i in range(at, len(printed)) if pattern.fullmatch(printed[i])), None)
        if found is None:
            missing.append(line)
        else:
            at = found + 1
    return missing


def _mask(line: str) -> str:
    line = " ".join(line.split())
    for pattern, mask in _MASKS:
        line = pattern.sub(mask, line)
    return line


def _key(command: Command) -> tuple[str, int, str]:
    return command.page, command.line, command.text


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
