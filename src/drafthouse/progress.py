"""Progress of long work: rooms report to this protocol, the command line decides how it looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars


class Task(Protocol):
    """One bar. `advance` moves it; `note` is a short text beside it (loss, rate, shard)."""

    def advance(self, steps: float = 1, note: str | None = None) -> None: ...


class Progress(Protocol):
    """A place where bars can be opened: `with progress.task("extract", total=n) as task: task.advance()`."""

    def task(self, description: str, total: float | None) -> AbstractContextManager[Task]: ...


class _SilentTask:
    def advance(self, steps: float = 1, note: str | None = None) -> None:
        return None


class Silent:
    """Shows nothing: for tests, workers without a terminal, and `--json`."""

    def task(self, description: str, total: float | None) -> AbstractContextManager[Task]:
        return nullcontext(_SilentTask())


class _BarTask:
    def __init__(self, bars: Bars, number: TaskID) -> None:
        self._bars, self._number = bars, number

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        self._bars.advance(self._number, steps)
        if note is not None:
            self._bars.update(self._number, note=note)


class Terminal:
    """Live bars on a terminal; one plain line a task where the output is a file or a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Task]:
        if not self._console.is_terminal:
            yield _SilentTask()
            self._console.print(f"{description}: done")
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<32}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        with Bars(*columns, console=self._console) as bars:
            yield _BarTask(bars, bars.add_task(description, total=total, note=""))
