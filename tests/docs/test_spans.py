"""Commands that prose speaks of, in `code`: their verbs and options exist. What stands for a name may be anything."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, shown_path
from tests.docs.parsers import command_of, fab_tasks
from tests.docs.test_links import prose

_SPAN = re.compile(r"`((?:drafthouse|fab) [a-z-][^`\n]*)`")
SPANS = [(shown_path(page), span) for page in PAGES for span in _SPAN.findall(prose(page))]


def wrong(span: str) -> str | None:
    """What does not exist of a command; None when all of it does."""
    try:
        program, *words = shlex.split(span)
    except ValueError:
        return "a quotation mark is missing"
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if program == "fab":
        known = {context.name: context for context in fab_tasks().contexts.values()}
        if words[0] == "--list":
            return None
        if words[0] not in known:
            return f"there is no task {words[0]}"
        return _unknown(options, set(known[words[0]].flags) | {"--inventory"})
    try:
        command, _, _ = command_of(tuple(word for word in words if not word.startswith("--")))
    except ValueError as error:
        return str(error)
    return _unknown(
        options, {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    )


def _unknown(options: list[str], known: set[str]) -> str | None:
    return next((f"there is no option {option}" for option in options if option not in known), None)


@pytest.mark.parametrize(("page", "span"), SPANS, ids=[f"{page}-{span[:40]}" for page, span in SPANS])
def test_what_is_spoken_of_exists(page: str, span: str) -> None:
    found = wrong(span)
    assert found is None, f"{page}: `{span}`: {found}"


@pytest.mark.parametrize(
    "span", ["drafthouse corpus bild", "drafthouse demo --resum", "fab depoly --job x", "fab gc --everything"]
)
def test_a_rotten_span_is_found(span: str) -> None:
    assert wrong(span) is not None


def test_there_are_spans_to_look_at() -> None:
    assert len(SPANS) > 40
    assert Path("README.md").name in {page for page, _ in SPANS}
