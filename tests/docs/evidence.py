"""Does a named test really run a command? Read from its source, without running it.

Looked at is the test function with everything that it calls or is given, as far as that is written in `tests/`:
functions and constants of its module, what it imports from other modules of tests, fixtures by the names of arguments.
There the words of the command must stand: its verbs, and all its options in one call.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import ROOT

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
#: Programs whose verb has to stand in the very call that has the options; others are called by helpers.
STRICT = {"drafthouse", "fab"}
#: What stands for a program in tests, besides its name: the application in this process.
ALSO = {"drafthouse": {"drafthouse", "drafthouse.cli"}, "fab": {"fab"}}
_MODULE = re.compile(r"[a-z_]+(\.[a-z_]+)+")
_LIMIT = 60  # definitions; a test that pulls in more says nothing about any one command


@dataclass(frozen=True)
class Evidence:
    """The source that a test consists of: all words in it, and the words of each single call."""

    words: frozenset[str]
    calls: tuple[frozenset[str], ...]

    def runs(self, program: str, verbs: tuple[str, ...], options: frozenset[str]) -> str | None:
        """None when the command is run here; otherwise what is missing."""
        if not self.words & ({program} | ALSO.get(program, set())):
            return f"`{program}` is not run there"
        for verb in verbs:
            if verb not in self.words:
                return f"`{verb}` is not said there"
        needed = options | ({verbs[-1]} if verbs and (program in STRICT or not options) else set())
        if any(needed <= call for call in self.calls):
            return None
        return f"no call has {' '.join(sorted(options)) or verbs[-1]}"


@functools.cache
def evidence(test: str) -> Evidence:
    """Of `tests/…/test_x.py::[Class::]function`.

    Raises:
        ValueError: there is no such test.
    """
    return _gather(*find(test))


def find(test: str) -> tuple[ast.FunctionDef, Path]:
    """The function of a test, and its module.

    Raises:
        ValueError: there is no such test.
    """
    file, *path = test.split("::")
    module = ROOT / file
    if not file.startswith("tests/") or not module.is_file() or not path:
        raise ValueError(f"there is no test {test}")
    node: ast.AST = _module(module)
    for name in path:
        inner = {one.name: one for one in getattr(node, "body", []) if isinstance(one, ast.FunctionDef | ast.ClassDef)}
        if name not in inner:
            raise ValueError(f"there is no test {test}")
        node = inner[name]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
        raise ValueError(f"{test} is no test")
    return node, module


def _gather(test: ast.FunctionDef, module: Path) -> Evidence:
    waiting: list[tuple[Definition, Path]] = [(test, module)]
    seen: dict[int, tuple[Definition, Path]] = {}
    words: set[str] = set()
    while waiting and len(seen) < _LIMIT:
        node, home = waiting.pop(0)
        if id(node) in seen:
            continue
        seen[id(node)] = (node, home)
        for name in _named(node):
            found = _find(name, home)
            if found is not None:
                waiting.append(found)
            words |= _origins(home).get(name, frozenset())
    assigned = {
        target.id: value
        for node, _ in seen.values()
        for one in ast.walk(node)
        if isinstance(one, ast.Assign)
        for target, value in [(one.targets[0], one.value)]
        if isinstance(target, ast.Name)
    }
    calls = []
    for node, _ in seen.values():
        words |= {word for one in ast.walk(node) for word in _words_of(one)}
        calls += [
            frozenset(_of_call(one, assigned))
            for one in ast.walk(node)
            if isinstance(one, ast.Call | ast.List | ast.Tuple)
        ]
    return Evidence(frozenset(words), tuple(calls))


def _of_call(call: ast.AST, assigned: dict[str, ast.expr], depth: int = 0) -> Iterator[str]:
    """All words of a call, with those of sequences that are spread into it."""
    for one in ast.walk(call):
        yield from _words_of(one)
        if isinstance(one, ast.Starred) and isinstance(one.value, ast.Name) and depth < 3:
            value = assigned.get(one.value.id)
            if value is not None:
                yield from _of_call(value, assigned, depth + 1)


def _words_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from node.value.split()
        yield from (word.partition("=")[0] for word in node.value.split() if word.startswith("--"))
        # `python -m package.module`: told by the module.
        yield from (word.rpartition(".")[2] for word in node.value.split() if _MODULE.fullmatch(word))
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


def _named(node: Definition) -> Iterator[str]:
    """Names that a definition uses: of functions, fixtures, constants; of methods by their attribute."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.arg):
            yield one.arg
        elif isinstance(one, ast.Attribute):
            yield f".{one.attr}"
    if isinstance(node, ast.FunctionDef):
        for decorator in node.decorator_list:  # @pytest.mark.usefixtures("name")
            for one in ast.walk(decorator):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value


def _find(name: str, module: Path) -> tuple[Definition, Path] | None:
    if name.startswith("."):
        return _method(name[1:], module)
    for folder_module in [module, *_conftests(module)]:
        top = _definitions(folder_module)
        if name in top:
            return top[name], folder_module
    imported = _imports(module).get(name)
    if imported is None:
        return None
    path, original = imported
    top = _definitions(path)
    return (top[original], path) if original in top else None


def _method(name: str, module: Path) -> tuple[Definition, Path] | None:
    """A method of a class that the module, or a conftest of it, defines or imports."""
    for home in [module, *_conftests(module)]:
        classes = [(one, home) for one in _definitions(home).values() if isinstance(one, ast.ClassDef)]
        for path, original in _imports(home).values():
            found = _definitions(path).get(original)
            if isinstance(found, ast.ClassDef):
                classes.append((found, path))
        for one, path in classes:
            for inner in one.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == name:
                    return inner, path
    return None


@functools.cache
def _origins(module: Path) -> dict[str, frozenset[str]]:
    """Words of the import that each name comes from: `drafthouse.corpus.cli` is the program and its group."""
    return {
        name: frozenset({*(one.module or "").split("."), name})
        for one in ast.walk(_module(module))
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
        for name in (alias.asname or alias.name, alias.name)
    }


def _conftests(module: Path) -> list[Path]:
    return [
        folder / "conftest.py"
        for folder in module.parents
        if folder.is_relative_to(ROOT / "tests") and (folder / "conftest.py").is_file()
    ]


@functools.cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def _definitions(path: Path) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in _module(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


@functools.cache
def _imports(path: Path) -> dict[str, tuple[Path, str]]:
    """Name -> (file, name there) of what a module imports from tests."""
    found = {}
    for node in ast.walk(_module(path)):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = path.parents[node.level - 1] if node.level else ROOT
        parts = (node.module or "").split(".") if node.module else []
        if not node.level and parts[:1] != ["tests"]:
            continue
        place = base.joinpath(*parts)
        for alias in node.names:
            for file in (place.with_suffix(".py"), place / "__init__.py", place / f"{alias.name}.py"):
                if file.is_file():
                    found[alias.asname or alias.name] = (file, alias.name)
                    break
    return found
