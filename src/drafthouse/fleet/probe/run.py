"""Asks a node what it is."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from drafthouse.fleet.errors import CommandError
from drafthouse.fleet.probe.report import Clock, Report
from drafthouse.fleet.runtime.on_node import root_of
from drafthouse.measure.roofline.probe import parse_topology

if TYPE_CHECKING:
    from drafthouse.fleet.connection import NodeConnection

LIMIT_S = 8.0
"""How long nvidia-smi and docker may take together; with a broken driver nvidia-smi never ends."""
_PROGRAM = Path(__file__).with_name("program.py")


def probe(node: NodeConnection, limit_s: float = LIMIT_S) -> Report:
    """Ask a node what it is; changes nothing there.

    Raises:
        CommandError: it has no Python 3.9.
        UnreachableError, HostKeyError, AccessError: as for every connection.
    """
    clock, reason = _clock(node)
    text = _PROGRAM.read_text(encoding="utf-8")
    words = [root_of(node), f"{limit_s:g}"]
    answer = node.script(text, words, timeout_s=limit_s + 20, check=False, again=True)
    if answer.exit:
        last = " ".join(answer.stderr.strip().splitlines()[-2:])
        raise CommandError(
            f"the probe ended with {answer.exit} ({last})",
            exit=answer.exit,
            stderr=answer.stderr,
            where=node.node.name,
            fix="install Python 3.9 or newer there" if answer.exit == 127 else None,
        )
    values = json.loads(answer.stdout)
    paths = parse_topology(values.pop("topology") or "")
    if reason:
        values["reasons"]["clock"] = reason
    named = {f"{one}-{other}": word for (one, other), word in paths.items() if one < other}
    return Report(node=node.node.name, paths=named, clock=clock, **values)


def _clock(node: NodeConnection) -> tuple[Clock | None, str]:
    """By a command that does nothing else: the shorter the round trip, the better is what it tells (RFC 5905)."""
    node.run(["true"], again=True)  # so that the connection is open before time is taken
    before = time.time()
    answer = node.run(["date", "+%s.%N"], check=False, again=True)
    after = time.time()
    if not re.fullmatch(r"\d+\.\d+\s*", answer.stdout):
        return None, f"date answers {answer.stdout.strip() or answer.stderr.strip()!r}"
    offset = float(answer.stdout) - (before + after) / 2
    return Clock(offset_s=round(offset, 4), bound_s=round((after - before) / 2, 4)), ""
