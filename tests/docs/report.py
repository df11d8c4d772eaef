"""Which proof every command has, as JSON and as a table to read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One command.

    Attributes:
        where: page and line.
        command: as it is typed.
        kind: executed, tested, followed or parsed.
        proof: test and tier for `tested` and `followed`, the reason for `parsed`, what was compared for `executed`.
        seconds: that its proof took here.
    """

    where: str
    command: str
    kind: str
    proof: str
    seconds: float


def write(rows: list[Row], path: Path, total: int) -> None:
    """PATH.json and PATH.md (PATH without its ending): counts by kind of proof, then every command.

    Args:
        rows: of the commands that have a proof.
        total: how many commands the documents have.
    """
    counts = Counter(row.kind for row in rows)
    seconds = sum(row.seconds for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "commands": total,
        "proven": len(rows),
        "by_kind": dict(sorted(counts.items())),
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
    }
    path.with_suffix(".json").write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(_lines(rows, counts, total, seconds)) + "\n", encoding="utf-8")


def _lines(rows: list[Row], counts: Counter[str], total: int, seconds: float) -> list[str]:
    lines = [
        "# Commands of the documents",
        "",
        f"{len(rows)} of {total} are proven, in {seconds:.0f} s: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        + ".",
        "",
        "- **executed**: run as it stands there, exit status and shown output compared.",
        "- **tested**: a named test runs it, which the sources were asked.",
        "- **followed**: a named test reads the page and runs its blocks as they stand there.",
        "- **parsed**: read by the program's own parser, because nothing here can carry it out.",
        "",
        "| where | command | kind | proof | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.where, f"`{row.command}`", row.kind, row.proof, f"{row.seconds:.1f}")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines
