"""What the environment of a job says, and how often the fence is asked."""

from __future__ import annotations

import os
import re
import secrets
from datetime import datetime
from pathlib import Path

import pytest

from drafthouse.errors import ConfigError, StoreError
from drafthouse.loop.job import FenceWatch, JobContext
from drafthouse.states.worker import default_worker_id
from drafthouse.store import Fence, FencedError, Store

ENVIRONMENT = {
    "DRAFTHOUSE_JOB": "train-qwen",
    "DRAFTHOUSE_EPOCH": "3",
    "DRAFTHOUSE_NODE": "ct129",
    "DRAFTHOUSE_JOB_STORE": "memory://jobs/here",
}


@pytest.fixture
def store() -> Store:
    return Store.open(f"memory://{secrets.token_hex(8)}")


class TestEnvironment:
    def test_a_job(self) -> None:
        job = JobContext.from_environment(ENVIRONMENT)
        assert job == JobContext("train-qwen", 3, "ct129", "memory://jobs/here")
        assert job.store(Store.open("memory://own")).url == "memory://jobs/here"

    def test_outside_of_one(self) -> None:
        assert JobContext.from_environment({}) is None
        assert JobContext.from_environment(ENVIRONMENT | {"DRAFTHOUSE_JOB": ""}) is None

    def test_a_job_without_a_store_uses_the_runs(self, store: Store) -> None:
        job = JobContext.from_environment(ENVIRONMENT | {"DRAFTHOUSE_JOB_STORE": ""})
        assert job is not None
        assert job.store_url is None
        assert job.store(store) is store

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("DRAFTHOUSE_JOB", "../etc", "not the name of a job"),
            ("DRAFTHOUSE_JOB", "a\nb", "not the name of a job"),
            ("DRAFTHOUSE_EPOCH", "0", "not an epoch"),
            ("DRAFTHOUSE_EPOCH", "-1", "not an epoch"),
            ("DRAFTHOUSE_EPOCH", "two", "not an epoch"),
            ("DRAFTHOUSE_EPOCH", "", "not an epoch"),
            ("DRAFTHOUSE_EPOCH", "٣", "not an epoch"),
            ("DRAFTHOUSE_NODE", " ", "not the name of a node"),
        ],
    )
    def test_nonsense_is_one_sentence(self, name: str, value: str, words: str) -> None:
        with pytest.raises(ConfigError, match=rf"the environment: {name}='{re.escape(value.strip())}' is {words}"):
            JobContext.from_environment(ENVIRONMENT | {name: value})

    def test_workers_are_named_after_node_and_epoch(self) -> None:
        assert default_worker_id(ENVIRONMENT) == f"ct129-e3-{os.getpid()}"
        assert default_worker_id(ENVIRONMENT | {"RANK": "1"}) == f"ct129-e3-rank1-{os.getpid()}"


class Counting(Fence):
    asked = 0

    def check(self, epoch: int) -> None:
        self.asked += 1
        super().check(epoch)


class TestWatch:
    def test_it_asks_at_once_and_then_seldom(self, store: Store) -> None:
        fence = Counting(store, "job")
        watch = FenceWatch(fence, 1)
        for _ in range(5):
            watch()
        assert fence.asked == 1
        watch.now()
        assert fence.asked == 2
        impatient = FenceWatch(fence, 1, every_s=0.0)
        for _ in range(5):
            impatient()
        assert fence.asked == 7

    def test_a_higher_epoch_ends_it(self, store: Store) -> None:
        fence = Fence(store, "job")
        watch = FenceWatch(fence, 1, every_s=0.0)
        fence.raise_to(1, {})
        watch()
        fence.raise_to(2, {})
        with pytest.raises(FencedError) as caught:
            watch()
        assert caught.value.exit_code == 76
        assert isinstance(fence.since(1), datetime)

    def test_a_life_that_is_over_leaves_word_for_its_runtime(self, store: Store, tmp_path: Path) -> None:
        word = tmp_path / "fenced"
        job = JobContext.from_environment({**ENVIRONMENT, "DRAFTHOUSE_FENCED": str(word)})
        assert job is not None
        watch = FenceWatch(Fence(store, job.job), job.epoch, every_s=0.0, word=job.fenced)
        watch()
        assert not word.exists()
        Fence(store, job.job).raise_to(job.epoch + 1, {})
        with pytest.raises(FencedError) as caught:
            watch()
        assert word.read_text(encoding="utf-8") == f"{caught.value}\n"
        gone = FenceWatch(Fence(store, job.job), job.epoch, word=tmp_path / "no/such/folder")
        with pytest.raises(FencedError):
            gone()

    def test_a_store_that_does_not_answer_is_asked_again(self, store: Store) -> None:
        class Down(Counting):
            def check(self, epoch: int) -> None:
                super().check(epoch)
                if self.asked == 1:
                    raise StoreError("the server cannot be reached")

        fence = Down(store, "job")
        watch = FenceWatch(fence, 1)
        with pytest.raises(StoreError):
            watch()
        watch()
        watch()
        assert fence.asked == 2

    def test_a_job_watches_its_own_store(self, store: Store) -> None:
        job = JobContext("train", 1, "node", None)
        job.watch(store)()
        Fence(store, "another").raise_to(5, {})
        job.watch(store)()
        Fence(store, "train").raise_to(2, {})
        with pytest.raises(FencedError):
            job.watch(store)()
