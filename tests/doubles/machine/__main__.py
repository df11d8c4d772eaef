"""`python -m tests.doubles.machine up FOLDER HOST`, `… down FOLDER`, `… state FOLDER`: machine doubles by hand.

A machine goes down with its owner: the process `$MACHINE_OWNER`, or the `molecule` that called this, or the caller.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tests.doubles.machine.boot import Machine, MachineError, up, why_not
from tests.doubles.machine.hosts import HOSTS


def _owner() -> int:
    given = os.environ.get("MACHINE_OWNER")
    if given:
        return int(given)
    process = os.getppid()
    while process > 1:
        name = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if any(word.endswith(b"/molecule") for word in name[:2]):
            return process
        process = int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return os.getppid()


def main() -> int:
    parser = argparse.ArgumentParser(prog="machine", description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("up", "down", "state"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("host", nargs="?", choices=sorted(HOSTS), default="kpro5")
    arguments = parser.parse_args()
    try:
        if arguments.do == "up":
            reason = why_not()
            if reason:
                raise MachineError(reason)
            up(arguments.folder, arguments.host, _owner())
        elif arguments.do == "down":
            Machine(arguments.folder).down()
        else:
            machine = Machine(arguments.folder)
            # Ansible's apt calls `apt-mark manual` for what it finds installed: a change would show below.
            calls = [call for call in machine.commands("mutator") if not call.startswith("apt-mark manual ")]
            state = {"mutators": calls, "touched": machine.touched()}
            print(json.dumps(state, indent=1))
    except MachineError as failure:
        print(f"machine: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
