"""Every command that a document shows is proven: executed here, run by a named test, or read by its real parser.

`DOCS_REPORT=PATH` leaves PATH.json and PATH.md: which proof every command has.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, Command, commands, shown_path
from tests.docs.evidence import evidence
from tests.docs.parsers import read, verbs_and_options
from tests.docs.report import Row, write
from tests.docs.table import Entry, entries, proof_of, tier_of
from tests.docs.workplace import QUICKSTART, Workplace, differences

TABLE = entries()
#: The quickstart first: its run is what other pages look at.
ORDER = [QUICKSTART, *(page for page in PAGES if page != QUICKSTART)]
COMMANDS = [command for page in ORDER for command in commands(page)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    pages: dict[str, list[Command]] = {}
    for command in COMMANDS:
        entry = next((entry for entry in TABLE if entry.fits(command)), None)
        if entry is not None and entry.kind == "executed":
            pages.setdefault(command.page, []).append(command)
    looking = {command.text for command in COMMANDS if any(entry.once and entry.fits(command) for entry in TABLE)}
    return Workplace(tmp_path_factory.mktemp("workplace"), pages, frozenset(looking))


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    found: list[Row] = []
    yield found
    if os.environ.get("DOCS_REPORT"):
        write(found, Path(os.environ["DOCS_REPORT"]).absolute(), len(COMMANDS))


@pytest.mark.timeout(300)  # the first one executed waits for the whole quickstart
@pytest.mark.parametrize("command", COMMANDS, ids=[f"{one.where}-{one.text[:50]}" for one in COMMANDS])
def test_command(command: Command, workplace: Workplace, rows: list[Row]) -> None:
    entry = proof_of(command, TABLE)
    begin = time.monotonic()
    proof = {"executed": _executed, "tested": _tested, "followed": _followed, "parsed": _parsed}[entry.kind](
        command, entry, workplace
    )
    rows.append(Row(command.where, command.text, entry.kind, proof, time.monotonic() - begin))


def _executed(command: Command, entry: Entry, workplace: Workplace) -> str:
    if command.program not in ("cd", "drafthouse", "make") and shutil.which(command.words[0]) is None:
        pytest.skip(f"there is no {command.program} here")
    done = workplace.outcome(command)
    refused = bool(command.shown) and any(line.startswith("error: ") for line in command.shown or ())
    wanted = 2 if refused and entry.exit == 0 else entry.exit
    assert wanted is None or done.code == wanted, (
        f"{command.where}: `{command.text}` ended with {done.code}\n{done.output}"
    )
    missing = differences(command.shown or (), done.output)
    assert not missing, (
        f"{command.where}: `{command.text}` does not print\n" + "\n".join(missing) + f"\nbut\n{done.output}"
    )
    return f"exit {done.code}" + (f", {len(command.shown)} lines shown are printed" if command.shown else "")


def _tested(command: Command, entry: Entry, _: Workplace) -> str:
    try:
        verbs, options = verbs_and_options(command.program, command.words[1:])
        missing = evidence(entry.test).runs(command.program, verbs, options)
    except ValueError as error:
        pytest.fail(f"{command.where}: `{command.text}`: {error}")
    assert missing is None, f"{command.where}: `{command.text}` is not run by {entry.test}: {missing}"
    assert tier_of(entry.test) == entry.tier, f"{entry.test} runs with {tier_of(entry.test)}"
    return f"{entry.test} ({entry.tier})"


def _followed(command: Command, entry: Entry, _: Workplace) -> str:
    read_there = Path(command.page).name in evidence(entry.test).words
    assert read_there, f"{command.where}: {entry.test} does not read {command.page}"
    assert tier_of(entry.test) == entry.tier, f"{entry.test} runs with {tier_of(entry.test)}"
    return f"{entry.test} ({entry.tier})"


def _parsed(command: Command, entry: Entry, _: Workplace) -> str:
    try:
        read(command.program, command.words[1:])
    except ValueError as error:
        pytest.fail(f"{command.where}: `{command.text}`: {error}")
    return entry.why


def test_every_entry_of_the_table_proves_something() -> None:
    used = {next((entry for entry in TABLE if entry.fits(command)), None) for command in COMMANDS}
    idle = [entry.match for entry in TABLE if entry not in used]
    assert not idle, f"no document has a command like {', '.join(idle)}"


def test_every_page_is_looked_at() -> None:
    assert QUICKSTART in PAGES
    assert {command.page for command in COMMANDS} >= {"README.md", shown_path(QUICKSTART)}
