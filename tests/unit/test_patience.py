"""Waiting as the tests do it: the first true look ends it, and a failure says what was waited for and seen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from tests.patience import until


def saying(*values: object) -> Callable[[], object]:
    """A look that finds these, one after the other, and the last of them from then on; an exception is raised."""
    looks = itertools.chain(values, itertools.repeat(values[-1]))

    def look() -> object:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    return look


def test_the_first_true_look_is_the_answer() -> None:
    assert until(saying(0, "", [], "there", "later"), "a word", every=0) == "there"


def test_a_look_that_fails_is_taken_again() -> None:
    assert until(saying(FileNotFoundError("no"), AssertionError("not yet"), KeyError("x"), 7), "a number", every=0) == 7


def test_what_does_not_come_about_is_told_with_what_was_seen_last() -> None:
    with pytest.raises(AssertionError, match=r"^waited 0 s for the door to open; the last look was \['shut'\] == 0$"):
        until(saying(Shown("['shut'] == 0")), "the door to open", seconds=0.05)
    with pytest.raises(
        AssertionError, match=r"^waited 0 s for a server; the last look raised ConnectionRefusedError: nobody$"
    ) as caught:
        until(saying(ConnectionRefusedError("nobody")), "a server", seconds=0.05)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_nothing_is_waited_for_that_cannot_come_any_more() -> None:
    begin = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"^waited for a port: in vain, for it has ended with 1; the last look was"
    ):
        until(saying(None), "a port", unless=lambda: "it has ended with 1")
    assert time.monotonic() - begin < 30, "of two minutes"


def test_what_came_with_the_end_counts() -> None:
    """A process that wrote its answer and ended between two looks has answered."""
    written: list[str] = []

    def end() -> str:
        written.append("answer")
        return "it has ended with 0"

    assert until(lambda: written, "an answer", unless=end) == ["answer"]


def test_a_last_look_is_taken_however_long_the_one_before_it_took() -> None:
    looks = iter((False, True))

    def slow() -> bool:
        time.sleep(0.1)
        return next(looks)

    assert until(slow, "the second look", seconds=0.05)


class Shown:
    """False, and shown as it is told."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return self.text
