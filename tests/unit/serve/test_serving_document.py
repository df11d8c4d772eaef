"""docs/serving.md: its table names every finding with the sentence that is printed, and its commands exist.

The table between the markers is renewed by `python -m tests.unit.serve.test_serving_document`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from drafthouse.cli import app
from drafthouse.serve.facts import Facts
from drafthouse.serve.findings import Finding
from drafthouse.serve.preflight import preflight
from tests.unit.serve import clean
from tests.unit.serve.clean import DFLASH, MTP, NAMES
from tests.unit.serve.test_preflight import HISTORY, put

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = REPOSITORY / "docs" / "serving.md"
BEGIN, END = "<!-- begin findings -->\n", "<!-- end findings -->"
# A finding that has two roles, and a history in one of them.
ALSO = [("drafter-incomplete", "error", DFLASH, (), put("draft/missing_files", ("model-00002-of-00002.safetensors",)))]
HEAD = ("finding", "severity", "what it says, in one case", "what to do", "known from")


def examples() -> dict[str, Finding]:
    """Every finding by id, as it is said in the first historical case that shows it."""
    found: dict[str, Finding] = {}
    for id_, _, name, overrides, change in [*HISTORY, *ALSO]:
        profile = clean.profile(name, *overrides)
        facts = clean.facts(profile).model_dump()
        if change is not None:
            change(facts)
        said = {finding.id: finding for finding in preflight(profile, Facts.model_validate(facts))}
        found.setdefault(id_, said[id_])
    profile = clean.profile(MTP)
    for finding in (*preflight(profile, clean.facts(profile)), *preflight(profile, Facts())):
        found.setdefault(finding.id, finding)
    return found


def table() -> str:
    order = {"error": 0, "warning": 1, "note": 2}
    found = sorted(examples().values(), key=lambda one: (order[one.severity], one.id))
    lines = [HEAD, ("---",) * len(HEAD)]
    lines += [(f"`{one.id}`", one.severity, one.sentence, one.fix, one.source) for one in found]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def commands(text: str) -> Iterator[list[str]]:
    """Words of every `drafthouse …` line of the document's code blocks."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "drafthouse":
                yield words[1:]


COMMANDS = list(commands(DOCUMENT.read_text(encoding="utf-8")))


def test_the_table_is_what_preflight_says() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), "renew it: python -m tests.unit.serve.test_serving_document"


def test_the_table_is_complete() -> None:
    """Against the sources, so that a rule without a historical case is missed here and not by an operator."""
    room = REPOSITORY / "src/drafthouse/serve"
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*room.glob("rules/*.py"), room / "preflight.py"])
    named = set(re.findall(r'(?:error|warning|make|Finding)\(\s*f?"([a-z0-9{}-]+)"', text))
    for role in ("model", "drafter"):
        named |= {name.replace("{role}", role) for name in named}
    missing = {name for name in named if "{" not in name} - examples().keys()
    assert len(named) > 80
    assert not missing


def test_every_profile_that_is_shipped_is_named() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in text] == []


@pytest.mark.parametrize("words", COMMANDS, ids=[" ".join(words)[:60] for words in COMMANDS])
def test_every_command_can_be_typed(words: list[str]) -> None:
    """Group, verb, options and their types; only the doing is left out."""
    command: Any = typer.main.get_command(app)
    name, rest = "drafthouse", list(words)
    while hasattr(command, "commands"):
        context = command.make_context(name, rest[:1], resilient_parsing=True)
        name, rest = rest[0], rest[1:]
        command = command.get_command(context, name)
        assert command is not None, f"there is no verb '{name}'"
    assert command.make_context(name, rest).params


def test_there_are_commands_to_type() -> None:
    verbs = {" ".join(words[:2]) for words in COMMANDS if words[0] == "serve"}
    assert verbs >= {"serve check", "serve plan", "serve canary", "serve sweep"}
    assert any(words[0] == "roofline" for words in COMMANDS)


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
