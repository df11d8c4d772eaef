"""Work spread over processes: bounded, in the order of the jobs, with one sentence when a process dies."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from drafthouse.errors import CorpusError

Job = TypeVar("Job")
Result = TypeVar("Result")
_AHEAD = 2  # jobs a process that are handed out before their turn


def default_processes() -> int:
    """As many as this process may use processors."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class Workers:
    """Processes that are started when they are first needed and kept until the block ends; one means this one.

    Args:
        processes: how many work side by side. They are started fresh: forking a process with the threads of
            tokenizers and obstore in it can block for ever.
        prepare: called once in every process, with `arguments`.
    """

    def __init__(
        self, processes: int, prepare: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()
    ) -> None:
        self._processes, self._prepare, self._arguments = processes, prepare, arguments
        self._pool: ProcessPoolExecutor | None = None
        self._prepared = False

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def each(self, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """`work` (a function of a module: it is sent by name) of every job, in the order of the jobs.

        Jobs are taken as they are needed, so that memory does not grow with their number.

        Raises:
            CorpusError: a process was killed (out of memory, or by somebody); or what `work` raises.
        """
        if self._processes <= 1:
            if self._prepare is not None and not self._prepared:
                self._prepare(*self._arguments)
                self._prepared = True
            yield from map(work, jobs)
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(self._prepare, self._arguments),
            )
        waiting: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                waiting.append(self._pool.submit(work, job))
                if len(waiting) > _AHEAD * self._processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise CorpusError(
                "a process of the corpus was killed (is there enough memory?)",
                fix="run it again: finished parts are kept; fewer processes need less memory",
            ) from None


def _begin(prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    """What every process begins with."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare(*arguments)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: killed, it cannot say so, and nobody takes the results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
