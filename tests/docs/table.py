"""commands.yml: which proof every command has. The first entry that matches counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.docs.blocks import ROOT, Command

TABLE = Path(__file__).with_name("commands.yml")
Kind = Literal["executed", "tested", "followed", "parsed"]
#: Tier -> the marker of its tests; None: they run with `make test`.
TIERS = {
    "make test": None,
    "make test-containers": ("containers", "faults"),
    "make test-images": ("images",),
    "make test-vm": ("vm",),
    "make engine": ("engine",),
}
_KEYS = {"executed": {"exit", "once"}, "tested": {"test", "tier"}, "followed": {"test", "tier"}, "parsed": {"why"}}


@dataclass(frozen=True)
class Entry:
    """How commands like `match` (a shell pattern over the whole line; for `followed` over the page) are proven.

    Attributes:
        exit: of an executed one, the status that it must end with; None: any.
        once: of an executed one, that it only looks: the same line elsewhere has the same answer.
        test, tier: of a tested one, who runs it, and in which tier; of a followed page, who reads and runs it.
        why: of one that is only parsed, the reason.
    """

    match: str
    kind: Kind
    exit: int | None = 0
    once: bool = False
    test: str = ""
    tier: str = ""
    why: str = ""

    def fits(self, command: Command) -> bool:
        text = command.page if self.kind == "followed" else command.text
        return fnmatchcase(text, self.match.replace("[", "[[]"))


def entries(path: Path = TABLE) -> list[Entry]:
    """The table in its order.

    Raises:
        ValueError: an entry is not written as it has to be.
    """
    found = []
    for number, row in enumerate(yaml.safe_load(path.read_text(encoding="utf-8")), 1):
        found.append(_entry(row, f"{path.name}: entry {number}"))
    return found


def proof_of(command: Command, table: list[Entry]) -> Entry:
    """Raises:
    ValueError: nothing proves the command.
    """
    for entry in table:
        if entry.fits(command):
            return entry
    raise ValueError(f"{command.where}: nothing proves `{command.text}`; give it a line in tests/docs/{TABLE.name}")


def tier_of(test: str) -> str:
    """The tier that a test runs in, by the markers of its module and of the conftests above it."""
    module = ROOT / test.partition("::")[0]
    sources = [module, *(folder / "conftest.py" for folder in module.parents if folder.is_relative_to(ROOT / "tests"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    for tier, markers in TIERS.items():
        if markers and any(re.search(rf"mark\.{marker}\b", text) for marker in markers):
            return tier
    return "make test"


def _entry(row: Any, where: str) -> Entry:
    kinds = [kind for kind in _KEYS if kind in row] if isinstance(row, dict) else []
    if len(kinds) != 1:
        raise ValueError(f"{where} needs one of {', '.join(_KEYS)} with a pattern")
    kind = kinds[0]
    unknown = row.keys() - {kind} - _KEYS[kind]
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(sorted(unknown))}")
    missing = (_KEYS[kind] - row.keys()) if kind != "executed" else set()
    if missing:
        raise ValueError(f"{where}: {', '.join(sorted(missing))} is missing")
    if "tier" in row and row["tier"] not in TIERS:
        raise ValueError(f"{where}: there is no tier '{row['tier']}'")
    status = row.get("exit", 0)
    more = {key: row[key] for key in ("once", "test", "tier", "why") if key in row}
    return Entry(row[kind], kind, None if status == "any" else status, **more)
