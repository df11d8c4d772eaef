"""A command line read by the real parser of its program: verbs, options, their types. Only the doing is left out."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from invoke.exceptions import ParseError
from invoke.parser import Parser
from invoke.tasks import Task

from drafthouse.cli import app
from drafthouse.fleet import tasks
from tests.docs.blocks import ROOT


@functools.cache
def command_of(words: tuple[str, ...]) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """The command of `drafthouse …` that the words name, the verbs that lead to it, and the words behind them."""
    command: Any = typer.main.get_command(app)
    verbs: tuple[str, ...] = ()
    while hasattr(command, "commands") and words:
        if words[0] not in command.commands:
            raise ValueError(f"there is no verb '{words[0]}' of {' '.join(('drafthouse', *verbs))}")
        command, verbs, words = command.commands[words[0]], (*verbs, words[0]), words[1:]
    return command, verbs, words


@contextlib.contextmanager
def help_kept() -> Iterator[None]:
    """Invoke takes the help texts away from tasks when it reads their arguments; others in this process want them."""
    known = {task: dict(task.help) for task in vars(tasks).values() if isinstance(task, Task)}
    try:
        yield
    finally:
        for task, texts in known.items():
            task.help = texts


@functools.cache
def fab_tasks() -> Parser:
    sys.path.insert(0, str(ROOT))
    try:
        from fabfile import namespace
    finally:
        sys.path.remove(str(ROOT))
    with help_kept():
        return Parser(namespace.to_contexts())


def read_drafthouse(words: tuple[str, ...]) -> None:
    command, verbs, rest = command_of(words)
    if hasattr(command, "commands"):
        raise ValueError(f"drafthouse {' '.join(verbs)} is a group of verbs")
    try:
        command.make_context(verbs[-1], list(rest))
    except typer.Exit:
        return  # --help
    except Exception as error:  # click's own, whose base differs between releases
        raise ValueError(str(getattr(error, "message", "")) or str(error)) from None


def read_fab(words: tuple[str, ...]) -> None:
    try:
        fab_tasks().parse_argv(list(words))
    except ParseError as error:
        raise ValueError(str(error)) from None
    # Invoke takes an unknown option of a task for one of its own and says nothing.
    task = fab_tasks().contexts[words[0]]
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in task.flags]
    if unknown:
        raise ValueError(f"{words[0]} has no option {unknown[0]}")


def read_make(words: tuple[str, ...]) -> None:
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1])


def read_ansible_playbook(words: tuple[str, ...]) -> None:
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    argv = [program, *words, "--syntax-check"]
    done = subprocess.run(argv, cwd=ROOT / "ansible", capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip() or done.stdout.strip())


def read_torchrun(words: tuple[str, ...]) -> None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    try:
        found = parser.parse_args(list(words))
    except SystemExit:
        raise ValueError("torchrun does not know these options") from None
    if not found.module or found.training_script != "drafthouse.cli":
        raise ValueError("torchrun has to start `-m drafthouse.cli`")
    read_drafthouse(tuple(found.training_script_args))


def read_pip(words: tuple[str, ...]) -> None:
    """pip's own parser; what is installed from this folder must name extras that pyproject.toml has."""
    import tomllib

    from pip._internal.commands import create_command

    _, arguments = create_command(words[0]).parse_args(list(words[1:]))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in [one for word in words[1:] if "[" in word for one in word.partition("[")[2].rstrip("]").split(",")]:
        if extra not in known:
            raise ValueError(f"there is no extra '{extra}' in pyproject.toml")
    if not arguments and "-e" not in words and "-r" not in words:
        raise ValueError("pip would install nothing")


READERS: dict[str, Callable[[tuple[str, ...]], None]] = {
    "drafthouse": read_drafthouse,
    "fab": read_fab,
    "make": read_make,
    "ansible-playbook": read_ansible_playbook,
    "torchrun": read_torchrun,
    "pip": read_pip,
}


def read(program: str, words: tuple[str, ...]) -> None:
    """Raises:
    ValueError: the program would refuse this line.
    """
    if program not in READERS:
        raise ValueError(f"no parser is known for `{program}`")
    READERS[program](words)


def verbs_and_options(program: str, words: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[str]]:
    """What identifies a command, whatever names it is given: its verbs, and its options by their long names."""
    long = {"-l": "--limit", "-t": "--tags", "-C": "--check", "-D": "--diff", "-i": "--inventory"}
    options = frozenset(long.get(word, word.partition("=")[0]) for word in words if word.startswith("-"))
    if program == "drafthouse":
        return command_of(words)[1], options
    if program == "torchrun":
        split = words.index("drafthouse.cli") + 1
        return command_of(words[split:])[1], options - {"-m"}
    if program in ("ansible-playbook", "molecule"):
        return tuple(word for word in words if word.endswith(".yml")), options
    if program.startswith("python") and "-m" in words:
        return (words[words.index("-m") + 1].rpartition(".")[2],), options - {"-m"}
    return tuple(word for word in words[:1] if not word.startswith("-")), options
