"""The program that runs on nodes (`supervisor.py`), and how it is asked."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from drafthouse.fleet.errors import CommandError
from drafthouse.fleet.runtime.supervisor import REFUSED

if TYPE_CHECKING:
    from drafthouse.fleet.connection import Answer, NodeConnection

DEFAULT_ROOT = "/srv/drafthouse"


def root_of(node: NodeConnection) -> str:
    """Folder on the node that holds jobs, units and this program: variable `job_root` of the node."""
    return str(node.node.vars.get("job_root", DEFAULT_ROOT))


def python_of(node: NodeConnection) -> str:
    """The node's Python: the one that Ansible uses, where the inventory names it."""
    named = str(node.node.vars.get("ansible_python_interpreter", ""))
    return named if named.startswith("/") else "python3"


@cache
def _program() -> tuple[str, str]:
    """Text and file name of the program. Its digest is in its name: old and new ones can be beside each other."""
    text = Path(__file__).with_name("supervisor.py").read_text(encoding="utf-8")
    return text, f"supervisor-{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"


def command(node: NodeConnection, verb: str, *words: str) -> list[str]:
    """The words that call the program on the node."""
    root = root_of(node)
    return [python_of(node), str(PurePosixPath(root, "bin", _program()[1])), verb, root, *words]


def install(node: NodeConnection) -> None:
    """Write the program to the node, where it is not there yet."""
    text, name = _program()
    path = str(PurePosixPath(root_of(node), "bin", name))
    if node.read(path) is None:
        node.write(path, text, mode=0o700)


def ask(
    node: NodeConnection, verb: str, *words: str, request: Any = None, timeout_s: float = 60.0, again: bool = False
) -> Any:
    """Call the program and return its JSON answer.

    Args:
        request: sent as JSON on standard input, so that nothing of it is seen in a list of processes.
        again: it may be done twice, and is asked once more when the connection breaks.

    Raises:
        CommandError: it refused, with its sentence; or the node has no Python 3.9.
        UnknownOutcomeError: the connection broke.
    """
    input = None if request is None else json.dumps(request)
    answer = call(node, command(node, verb, *words), input, timeout_s, again)
    if answer.exit == REFUSED:
        sentence = answer.stderr.strip().splitlines()[-1].removeprefix("error: ")
        raise CommandError(sentence, exit=REFUSED, stderr=answer.stderr, where=node.node.name)
    if answer.exit != 0:
        python = f"Python 3.9 or newer (asked for: {python_of(node)})"
        raise failed(node, f"{verb} {' '.join(words)}", answer, python)
    return json.loads(answer.stdout)


def call(node: NodeConnection, argv: list[str], input: str | None, timeout_s: float, again: bool = False) -> Answer:
    """Run a command of the program; installs it first when that is what was missing."""
    answer = node.run(argv, timeout_s=timeout_s, input=input, check=False, again=again)
    # Nearly always it is there: one round trip instead of two.
    if answer.exit == 2 and "can't open file" in answer.stderr:
        install(node)
        answer = node.run(argv, timeout_s=timeout_s, input=input, check=False, again=again)
    return answer


def failed(node: NodeConnection, what: str, answer: Answer, program: str | None = None) -> CommandError:
    """The error of a command that ended as it should not have; `program`: what to install when it was not there."""
    last = " ".join(answer.stderr.strip().splitlines()[-3:]) or answer.stdout.strip()[-300:]
    fix = f"install {program} on the node" if program is not None and answer.exit == 127 else None
    sentence = f"{what}: exit status {answer.exit}" + (f" ({last})" if last else "")
    return CommandError(sentence, exit=answer.exit, stderr=answer.stderr, where=node.node.name, fix=fix)
