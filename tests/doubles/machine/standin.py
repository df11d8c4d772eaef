#!/usr/bin/python3 -IS
"""Every stand-in program of the machine double: asks process 1 to act, repeats its answer.

Linked under the name of the program it stands in for (`pct`, `modprobe`, …). Runs inside the machine, so it is standard
library only and starts without site packages.
"""

import json
import os
import socket
import sys

RUN = "/usr/local/lib/machine/run"


def main() -> int:
    argv = [sys.argv[0].rsplit("/", 1)[-1], *sys.argv[1:]]
    with open(f"{RUN}/place", encoding="utf-8") as file:  # noqa: PTH123 -- pathlib doubles the time of a start
        place = file.read().strip()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(f"{RUN}/commands")
        line.sendall(json.dumps({"do": "command", "place": place, "argv": argv}).encode() + b"\n")
        with line.makefile("r", encoding="utf-8") as answers:
            answer = json.loads(answers.readline())
    if answer.get("exec"):
        os.execv(answer["exec"], [answer["exec"], *argv[1:]])
    sys.stdout.write(answer["out"])
    sys.stderr.write(answer["err"])
    return int(answer["rc"])


if __name__ == "__main__":
    sys.exit(main())
