"""The fault table of the fleet: every fault for every kind of job, on three nodes with real sshd, S3 and HAProxy.

Needs root on Linux (the nodes are namespaces of this machine), HAProxy and the development environment.

python benchmarks/fleet_faults.py     # leaves benchmarks/results/fleet_faults.json, prints table and transcripts
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))
from rich.console import Console
from rows import Rows
from tests.command_line import drafthouse
from tests.doubles.nodes import Fleet, missing
from tests.fixtures_s3 import ACCESS_KEY, SECRET_KEY, s3_url, serve
from tests.fleet.faults import FAULTS, KINDS, Outcome, extraction, fresh, serving, training, undisturbed
from tests.fleet.operator import Operator, SealedRun, heal, sealed_run

from drafthouse.fleet import show
from drafthouse.fleet.operations import Report

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fleet_faults.json")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this; may be repeated")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this; may be repeated")
    wanted = parser.parse_args()
    if lacking := missing():
        sys.exit(f"error: the nodes need {lacking}")
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    rows, console = Rows(SEED), Console(highlight=False, width=120)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = stack.enter_context(Fleet(3, folder / "fleet"))
        (folder / "s3").mkdir()
        endpoint = stack.enter_context(serve(folder / "s3", fleet.controller_address))
        sealed = sealed_run(folder, s3_url(endpoint))
        states = extracted(sealed, endpoint, folder / "states")
        losses = undisturbed(fresh(states, endpoint, folder / "alone"), folder / "alone" / "run")
        for kind in wanted.kind or KINDS:
            for fault in wanted.fault or FAULTS:
                place = folder / f"{kind} {fault}"
                operator = Operator(fleet, s3_url(endpoint))
                fleet.write_inventory(fleet_store=operator.store)
                try:
                    if kind == "extract":
                        found = extraction(operator, fresh(sealed, endpoint, place), fault)
                    elif kind == "train":
                        found = training(operator, fresh(states, endpoint, place), fault, losses)
                    else:
                        place.mkdir()
                        found = serving(operator, fault, place)
                    record(rows, found)
                    rows.write(wanted.out)
                    console.print(f"| {' | '.join(line(found))} |", soft_wrap=True)
                    if fault == "node moved from":
                        transcript(console, operator)
                finally:
                    heal(fleet)


def extracted(sealed: SealedRun, endpoint: str, folder: Path) -> SealedRun:
    """A copy of a sealed run with its hidden states."""
    run = fresh(sealed, endpoint, folder)
    run.folder.mkdir()
    (run.folder / "run.yml").write_bytes(run.file.read_bytes())
    outcome = drafthouse("states", "extract", "--out", str(run.folder))
    if outcome.code:
        sys.exit(outcome.err)
    return run


def record(rows: Rows, found: Outcome) -> None:
    """Lost requests while a node is down are a fact and no bar: the bar is that work is whole."""
    whole = 1 - found.lost / found.total
    bar = None if found.kind == "serve" and found.fault != "node moved from" else 1.0
    rows.add(
        f"{found.kind}, {found.fault}: seconds until it works again",
        found.seconds,
        "s",
        peer=f"all {found.unit} whole",
        ratio=whole,
        bar=bar,
        details=found.as_dict(),
    )


def line(found: Outcome) -> tuple[str, ...]:
    """One row of the table in docs/fleet.md."""
    return (
        found.kind,
        found.fault,
        found.answer,
        f"{found.seconds:g} s",
        f"{found.lost} of {found.total} {found.unit}",
        f"{found.redone} {found.unit}" if found.kind != "serve" else "none",
        found.note,
    )


def transcript(console: Console, operator: Operator) -> None:
    """The migration as `fab` prints it for people."""
    said = next(text for text in operator.transcript if text.startswith("$ fab migrate"))
    command, _, body = said.partition("\n")
    console.print(f"\n{command}")
    for values in json.loads(body):
        console.print(show.report(Report(**values)))
    console.print()


if __name__ == "__main__":
    main()
