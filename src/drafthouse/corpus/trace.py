"""What a chat template does with the texts of a conversation, found by rendering it with texts that watch.

A template is a program: it may look at a turn's text (`"</think>" in content`), change it (`content | trim`) or
print it. Here the texts are `Watched` strings: they print as sentinels, they answer every question as the real
text would, and each question is kept with its answer. Two conversations of one shape that answer all questions
alike take the same path through the template, so that what it printed for one, with the other's texts in the
sentinels' places, is what it prints for the other: a rendering is proven instead of made (concolic execution:
Godefroid et al. 2005, "DART"). Whatever is not understood raises `UntraceableError`: then nothing is concluded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from jinja2 import Environment, Template
from jinja2.runtime import Macro
from transformers.utils import chat_template_utils

_MARK = "\ue0f3\uf0d9{0}\uf0d9\ue0f4"
_MARKED = re.compile("\ue0f3\uf0d9([0-9]+)\uf0d9\ue0f4")
# Of a container they read structure and no text.
_STRUCTURAL_FILTERS = frozenset({"list", "length", "count", "first", "last", "reverse"})
# They look at the type and at nothing else.
_TYPE_TESTS = frozenset(
    {"string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number", "integer", "float"}
)
_TYPE_TESTS |= {"boolean", "true", "false", "callable"}

_SCOPE = frozenset({"_loop_vars", "_block_vars"})  # what Jinja hands to every call beside its arguments


class UntraceableError(Exception):
    """The template does something with a text that is not followed here."""


@dataclass(frozen=True)
class Change:
    """A text of the conversation (by its number) after changes, each a function's name and its arguments."""

    value: int
    steps: tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...] = ()


@dataclass(frozen=True)
class Question:
    """Something that the template asked about a changed text, and the answer that it got."""

    about: int
    kind: str
    argument: Any
    answer: Any


@dataclass
class Trace:
    """Changes and questions of one rendering, in the order in which they came up."""

    values: Sequence[Any]
    to_json: Callable[..., str]
    changes: list[Change] = field(default_factory=list)
    questions: dict[Question, None] = field(default_factory=dict)
    _watched: dict[Change, Watched] = field(default_factory=dict)

    def text(self, change: Change) -> Watched:
        """The watched string of a changed text."""
        if change not in self._watched:
            actual = apply(change, self.values, self.to_json)
            watched = Watched(_MARK.format(len(self.changes)))
            watched.trace, watched.number, watched.actual = self, len(self.changes), actual
            self.changes.append(change)
            self._watched[change] = watched
        return self._watched[change]

    def ask(self, about: int, kind: str, argument: Any, answer: Any) -> Any:
        self.questions[Question(about, kind, argument, answer)] = None
        return answer


def apply(change: Change, values: Sequence[Any], to_json: Callable[..., str]) -> Any:
    """The text that `change` speaks of, given the texts of a conversation."""
    value = values[change.value]
    for name, positional, named in change.steps:
        value = to_json(value, *positional, **dict(named)) if name == "tojson" else getattr(value, name)(*positional)
    return value


def answer_to(kind: str, text: Any, argument: Any) -> Any:
    """The answer of a real text to a question."""
    if kind == "contains":
        return argument in text
    if kind == "bool":
        return bool(text)
    if kind == "equals":
        return text == argument
    return getattr(text, kind)(argument)


class Watched(str):
    """A text under watch; its characters are the sentinel. `number` is None for a text that was put together."""

    trace: Trace
    number: int | None = None
    actual: str = ""

    def _ask(self, kind: str, argument: Any) -> Any:
        if self.number is None or _holds(argument):
            raise UntraceableError(kind)
        return self.trace.ask(self.number, kind, argument, answer_to(kind, self.actual, argument))

    def _change(self, name: str, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Watched:
        if self.number is None or _holds(positional) or _holds(list(named.values())):
            raise UntraceableError(name)
        before = self.trace.changes[self.number]
        step = (name, positional, tuple(sorted(named.items())))
        return self.trace.text(Change(before.value, (*before.steps, step)))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return bool(self._ask("bool", None))

    def __contains__(self, part: object) -> bool:
        return bool(self._ask("contains", part))

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._ask("equals", other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        raise UntraceableError  # a look-up in a table; Jinja would take a TypeError for "not in it"

    def __add__(self, other: str) -> str:
        return concat((self, other))

    def __radd__(self, other: str) -> str:
        return concat((other, self))

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return bool(self._ask("startswith", prefix)) if not bounds else _refuse()

    def endswith(self, suffix: Any, *bounds: Any) -> bool:
        return bool(self._ask("endswith", suffix)) if not bounds else _refuse()

    def strip(self, *chars: Any) -> Watched:
        return self._change("strip", chars, {})

    def lstrip(self, *chars: Any) -> Watched:
        return self._change("lstrip", chars, {})

    def rstrip(self, *chars: Any) -> Watched:
        return self._change("rstrip", chars, {})


class WatchedObject(dict[str, Any]):
    """A JSON object under watch (a call's arguments, a tool's schema): it can be printed as JSON, no more."""

    def __init__(self, trace: Trace, value: int) -> None:
        super().__init__()
        self.trace, self.value = trace, value

    def __bool__(self) -> bool:
        return bool(self.trace.ask(self._number(), "bool", None, bool(self.trace.values[self.value])))

    def __hash__(self) -> int:  # type: ignore[override]
        raise UntraceableError

    def printed(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Watched:
        return self.trace.text(Change(self.value, (("tojson", positional, tuple(sorted(named.items()))),)))

    def _number(self) -> int:
        self.trace.text(Change(self.value))
        return self.trace.changes.index(Change(self.value))


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UntraceableError


def _close(watched: type, base: type) -> None:
    """Every method of `base` that `watched` does not follow is refused."""
    kept = {"__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__dir__", "__doc__"}
    kept |= {"__init_subclass__", "__subclasshook__", "__class_getitem__", "__reduce__", "__reduce_ex__", "__sizeof__"}
    for name in {"__rmod__", *vars(base)} - vars(watched).keys() - kept:
        if callable(getattr(base, name, _refuse)):
            setattr(watched, name, _refuse)


_close(Watched, str)
_close(WatchedObject, dict)


def concat(parts: Iterable[str]) -> str:
    """`"".join`, watched if a part is; of a single part it is that part."""
    filled = [part for part in parts if isinstance(part, Watched) or part]
    if not any(isinstance(part, Watched) for part in filled):
        return "".join(filled)
    if len(filled) == 1:
        return filled[0]
    return Watched("".join(filled))


def _holds(value: Any) -> bool:
    if isinstance(value, (Watched, WatchedObject)):
        return True
    if isinstance(value, Mapping):
        return any(_holds(one) for one in value.values())
    return isinstance(value, (list, tuple)) and any(_holds(one) for one in value)


class TracedTemplate:
    """A chat template, compiled once more for watched texts.

    It is compiled in transformers' own (sandboxed) environment with filters, tests, calls and concatenation
    replaced by ones that notice watched texts.
    """

    def __init__(self, source: str) -> None:
        plain: Environment = chat_template_utils._compile_jinja_template(source).environment
        environment = plain.overlay()
        self.to_json: Callable[..., str] = plain.filters["tojson"]
        environment.filters = {name: self._filter(name, work) for name, work in plain.filters.items()}
        environment.tests = {
            name: self._test(name, cast(Callable[..., Any], work)) for name, work in plain.tests.items()
        }
        environment.globals = {**plain.globals, "strftime_now": _refuse}  # what it prints today is not for tomorrow
        made = {environment.globals.get("namespace"), environment.globals.get("dict")}
        call = environment.call  # type: ignore[attr-defined]

        def guarded(context: Any, work: Any, *positional: Any, **named: Any) -> Any:
            # A macro or a text's own method sees to its arguments itself; others would read behind the sentinel.
            owner = getattr(work, "__self__", None)
            followed = isinstance(work, Macro) or isinstance(owner, Watched) or work in made or _is_refusal(work)
            arguments = [*positional, *(value for name, value in named.items() if name not in _SCOPE)]
            if not followed and _holds(arguments):
                raise UntraceableError(str(work))
            return call(context, work, *positional, **named)

        environment.call = guarded  # type: ignore[attr-defined]
        environment.concat = concat  # type: ignore[method-assign]
        names: dict[str, Any] = {"environment": environment, "__file__": "<chat template>"}
        exec(environment.compile(source), names)  # as jinja2.Template.from_code does
        names["str_join"] = names["markup_join"] = lambda parts: concat(
            part if isinstance(part, str) else str(part) for part in parts
        )
        self._template: Template = environment.template_class._from_namespace(environment, names, environment.globals)

    def pieces(self, trace: Trace, messages: list[dict[str, Any]], **variables: Any) -> list[str | int]:
        """Render watched `messages`: literals and numbers of changes, in the order of the text.

        Raises:
            UntraceableError: something is not followed.
            jinja2.TemplateError: the template refuses.
        """
        alias = getattr(chat_template_utils, "_alias_reasoning_fields", None)
        try:
            printed = self._template.render(messages=alias(messages) if alias else messages, **variables)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise UntraceableError(str(error)) from error
        text = "".join((printed, ""))  # the characters themselves, watched or not
        return [int(part) if place % 2 else part for place, part in enumerate(_MARKED.split(text))]

    def _filter(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*positional: Any, **named: Any) -> Any:
            # Some filters take the context or the environment first.
            value, rest = _subject(work, positional)
            if isinstance(value, WatchedObject):
                return value.printed(rest, named) if name == "tojson" else _refuse()
            if isinstance(value, Watched):
                if name == "trim":
                    return value.strip(*rest, *named.values())
                if name == "tojson":
                    return value._change("tojson", rest, named)
                if name in {"default", "d"} and named.keys() <= {"boolean"}:
                    asked = (*rest, *named.values())[1:] == (True,)  # default("x", true) is for empty texts, too
                    return work(value, *rest, **named) if asked and not value else value
                return value if name in {"string", "safe"} else _refuse()
            if (
                name not in _STRUCTURAL_FILTERS
                and not _asks_for_role(name, rest)
                and _holds([*positional, *named.values()])
            ):
                raise UntraceableError(name)
            return work(*positional, **named)

        return _like(work, watched)

    def _test(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*positional: Any, **named: Any) -> Any:
            value, rest = _subject(work, positional)
            if isinstance(value, (Watched, WatchedObject)) and not _holds(rest):
                if name in _TYPE_TESTS:
                    return work(*positional[: len(positional) - len(rest) - 1], _typical(value), *rest, **named)
                if name in {"equalto", "eq", "==", "ne", "!="} and isinstance(value, Watched):
                    return (value == rest[0]) == (name not in {"ne", "!="})
                raise UntraceableError(name)
            if _holds(list(rest)) or (_holds(value) and name not in _TYPE_TESTS):
                raise UntraceableError(name)
            return work(*positional, **named)

        return _like(work, watched)


def _typical(value: Watched | WatchedObject) -> Any:
    return "text" if isinstance(value, Watched) else {"key": "value"}


def _subject(work: Callable[..., Any], positional: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    first = 1 if getattr(work, "jinja_pass_arg", None) is not None else 0
    return (positional[first] if len(positional) > first else None), positional[first + 1 :]


def _like(work: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
    passes = getattr(work, "jinja_pass_arg", None)
    if passes is not None:
        watched.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return watched


def _asks_for_role(name: str, rest: tuple[Any, ...]) -> bool:
    return name in {"selectattr", "rejectattr", "map"} and bool(rest) and rest[0] == "role"


def _is_refusal(work: Any) -> bool:
    return getattr(work, "__name__", "") == "raise_exception"
