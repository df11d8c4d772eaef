"""Progress of long work: silent, as lines in a pipe, as bars on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from drafthouse.progress import Progress, Silent, Terminal


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=terminal, width=120, color_system=None), written


def last_frame(written: io.StringIO) -> str:
    """What stays on the screen: the text after the last carriage return that has any."""
    return [frame for frame in written.getvalue().split("\r") if "━" in frame][-1]


def work(progress: Progress, steps: int = 3) -> None:
    with progress.task("extract", total=steps) as task:
        for step in range(steps):
            task.advance(note=f"shard {step}")
        task.advance(0.0)


def test_silent_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work(Silent())
    assert capsys.readouterr() == ("", "")


def test_a_pipe_gets_one_plain_line_a_task() -> None:
    screen, written = console(terminal=False)
    work(Terminal(screen))
    assert written.getvalue() == "extract: done\n"


def test_a_task_that_failed_is_not_called_done() -> None:
    screen, written = console(terminal=False)

    def fail() -> None:
        with Terminal(screen).task("extract", total=3):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert "done" not in written.getvalue()


def test_a_terminal_gets_a_bar_with_counts_and_the_last_note() -> None:
    screen, written = console(terminal=True)
    work(Terminal(screen))
    shown = last_frame(written)
    assert "extract" in shown
    assert "3/3" in shown
    assert "shard 2" in shown
    assert "\x1b[?25h" in written.getvalue()  # the cursor is shown again


def test_a_note_stays_until_the_next() -> None:
    screen, written = console(terminal=True)
    with Terminal(screen).task("train", total=2) as task:
        task.advance(note="loss 2.5")
        task.advance()
    assert "loss 2.5" in last_frame(written)


def test_the_bar_of_a_failed_task_is_closed() -> None:
    screen, written = console(terminal=True)

    def fail() -> None:
        with Terminal(screen).task("extract", total=None) as task:
            task.advance()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert "\x1b[?25h" in written.getvalue()
