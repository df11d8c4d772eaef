"""The door `fab`: every task explains itself, every command in the documents is one that it understands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from invoke import Collection
from invoke.exceptions import ParseError
from invoke.parser import Parser

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MUTATING = ("deploy", "migrate", "recover", "rollback", "stop", "gc")


@pytest.fixture(scope="module")
def namespace() -> Collection:
    sys.path.insert(0, str(ROOT))
    try:
        from fabfile import namespace as found
    finally:
        sys.path.remove(str(ROOT))
    return found


def test_the_tasks_of_the_fleet_are_there(namespace: Collection) -> None:
    names = set(namespace.task_names)
    assert names == {
        *MUTATING, "probe", "plan", "status", "logs", "exec", "pull-image", "trust", "audit", "unlock"
    }  # fmt: skip


def test_every_task_has_an_example_and_every_argument_help(namespace: Collection) -> None:
    for context in namespace.to_contexts():
        task = namespace[context.name]
        assert "Example" in task.__doc__, context.name
        assert re.search(rf"fab {context.name} ", task.__doc__ + " "), context.name
        silent = [name for name, argument in context.args.items() if not argument.help]
        assert not silent, (context.name, silent)


def test_whatever_changes_something_can_be_looked_at_first(namespace: Collection) -> None:
    for context in namespace.to_contexts():
        assert ("dry-run" in context.args) == (context.name in MUTATING), context.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_and_examples_are_understood(document: Path, namespace: Collection) -> None:
    text = document.read_text(encoding="utf-8")
    lines = re.findall(r"(?:^|`|\$ )(fab [a-z][^`\n]*)", text, re.M)
    if document.name == "fleet.md":
        assert len(lines) > 10
        lines += [line for task in namespace.tasks.values() for line in re.findall(r"^ +(fab .*)$", task.__doc__, re.M)]
    parser = Parser(namespace.to_contexts())
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if len(words) == 1:  # it is spoken of
            assert words[0] in namespace.task_names, line
            continue
        try:
            parser.parse_argv(words)
        except ParseError as error:
            pytest.fail(f"{document.name}: {line}: {error}")


def test_wrong_input_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    fab = [str(Path(sys.executable).with_name("fab")), "--search-root", str(ROOT)]
    nowhere = tmp_path / "nowhere"
    found = subprocess.run(
        [*fab, "status", "--inventory", str(nowhere)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert found.returncode == 2, found.stderr
    assert str(nowhere) in found.stderr
    assert "Traceback" not in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
