"""What process 1 of a machine double answers: commands of its stand-in programs, questions of the tests."""

from __future__ import annotations

import json
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.doubles.machine import layers
from tests.doubles.machine.programs import HOST, Programs, kind


class Service:
    """Answers one JSON line a connection, each in a thread of its own: a unit that starts calls programs in turn.

    Args:
        memories: prefix of paths -> layers of the machine and of its container, complete as at boot.
    """

    def __init__(self, memories: Mapping[str, Path], programs: Programs) -> None:
        self.memories = memories
        self.programs = programs
        self._at_boot = {look: look(memories) for look in (layers.touched, layers.changed)}
        self._log: list[dict[str, str]] = []

    def answer(self, line: socket.socket) -> None:
        threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, line.makefile("rw", encoding="utf-8") as stream:
            question = json.loads(stream.readline())
            try:
                reply = getattr(self, f"_do_{question.pop('do')}")(**question)
            except Exception:
                traceback.print_exc()
                reply = {"error": traceback.format_exc(limit=-3), "rc": 70, "out": "", "err": traceback.format_exc()}
            stream.write(json.dumps(reply) + "\n")

    def _do_command(self, place: str, argv: list[str]) -> dict[str, Any]:
        shown = " ".join(argv) if place == HOST else f"{place}: {' '.join(argv)}"
        self._log.append({"kind": kind(argv), "command": shown})
        result = self.programs.run(place, argv)
        if isinstance(result, str):
            return {"exec": result}
        return {"rc": result.rc, "out": result.out, "err": result.err}

    def _do_log(self) -> dict[str, Any]:
        return {"answer": self._log}

    def _do_touched(self) -> dict[str, Any]:
        return {"answer": self._since_boot(layers.touched)}

    def _do_changes(self) -> dict[str, Any]:
        return {"answer": self._since_boot(layers.changed)}

    def _since_boot(self, look: Callable[[Mapping[str, Path]], dict[str, str]]) -> dict[str, str]:
        then = self._at_boot[look]
        return {path: now for path, now in sorted(look(self.memories).items()) if then.get(path) != now}

    def _do_fault(self, name: str, value: Any) -> dict[str, Any]:
        self.programs.faults[name] = value
        return {"answer": None}
