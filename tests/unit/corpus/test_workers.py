"""Work in processes: in order, bounded, and a killed process is one sentence."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from drafthouse.corpus.workers import Workers
from drafthouse.errors import CorpusError

_offset: list[int] = [0]


def prepare(offset: int) -> None:
    _offset[0] = offset


def work(number: int) -> int:
    if number < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return number + _offset[0]


def test_one_process_is_this_one() -> None:
    with Workers(1, prepare, (10,)) as workers:
        assert list(workers.each(work, range(3))) == [10, 11, 12]
        assert list(workers.each(work, [5])) == [15]
    _offset[0] = 0


def test_jobs_are_taken_as_they_are_needed_and_a_killed_process_is_told() -> None:
    taken: list[int] = []

    def jobs() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    with Workers(2, prepare, (100,)) as workers:
        results = workers.each(work, jobs())
        assert next(results) == 100
        assert len(taken) < 8
        assert list(results) == list(range(101, 120))
        with pytest.raises(CorpusError, match="a process of the corpus was killed"):
            list(workers.each(work, [-1]))
