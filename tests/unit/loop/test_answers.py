from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from drafthouse.corpus import CorpusReader, CorpusWriter
from drafthouse.corpus.records import TokenSample
from drafthouse.errors import CorpusError, StatesError, StoreError
from drafthouse.loop import steps
from drafthouse.loop.answers import Answering, prompt_of
from drafthouse.loop.folder import RunFolder
from drafthouse.progress import Silent
from drafthouse.store import Board, Store
from drafthouse.target import Target


@pytest.fixture
def job(walked_run: RunFolder, tmp_path: Path) -> Answering:
    """The walked run's questions, not answered yet, in a store of their own: 3 shards."""
    reader = CorpusReader(walked_run.store, steps.CORPUS)
    store = Store.open(str(tmp_path / "store"))
    writer = CorpusWriter(store, steps.CORPUS, reader.manifest.tokenizer_sha256, 4)
    for sample in list(reader)[:12]:
        writer.add(sample)
    writer.finish(split="train", settings={})
    return dataclasses.replace(steps.answering(walked_run), store=store, ttl_s=2.0)


class TestPrompt:
    def sample(self, mask: list[int]) -> TokenSample:
        return TokenSample("a", "chat", np.arange(len(mask), dtype=np.int32), np.array(mask, dtype=np.uint8))

    @pytest.mark.parametrize(
        ("mask", "length"),
        [([0, 0, 1, 1], 2), ([0, 1, 1, 0, 0, 1, 0], 5), ([1, 0, 1], 2), ([1, 1, 1], 0), ([0, 1, 0, 1, 1, 0, 0], 3)],
    )
    def test_it_ends_where_the_last_answer_begins(self, mask: list[int], length: int) -> None:
        assert prompt_of(self.sample(mask)).tolist() == list(range(length))


class TestAnswers:
    def test_answers_continue_their_questions(self, walked_run: RunFolder, target: Target) -> None:
        asked = list(CorpusReader(walked_run.store, steps.CORPUS))
        answered = list(CorpusReader(walked_run.store, steps.ANSWERS))
        assert [sample.id for sample in answered] == [sample.id for sample in asked], "in the order of the questions"
        for question, answer in zip(asked, answered, strict=True):
            prompt = prompt_of(question)
            assert answer.kind == question.kind
            assert answer.input_ids[: len(prompt)].tolist() == prompt.tolist()
            assert answer.loss_mask.tolist() == [0] * len(prompt) + [1] * (len(answer.input_ids) - len(prompt))
            new = answer.input_ids[len(prompt) :].tolist()
            assert 1 <= len(new) <= 24
            assert len(new) == 24 or new[-1] in target.eos_ids
            assert not set(new[:-1]) & set(target.eos_ids), "nothing behind the end of a turn"

    def test_they_are_the_targets_greedy_ones(self, walked_run: RunFolder, target: Target) -> None:
        import torch

        answer = next(iter(CorpusReader(walked_run.store, steps.ANSWERS)))
        first = int(np.flatnonzero(answer.loss_mask)[0])
        with torch.no_grad():
            logits = target.model(input_ids=torch.from_numpy(answer.input_ids[None].astype(np.int64))).logits[0]
        assert logits[first - 1 : -1].argmax(-1).tolist() == answer.input_ids[first:].tolist()


class TestWorkers:
    def test_two_workers_and_rows_side_by_side_change_nothing(self, job: Answering, target: Target) -> None:
        """Threads stand for processes: two of them share only the store."""
        alone = dataclasses.replace(job, run="alone", settings=job.settings.model_copy(update={"rows": 1}))
        assert alone.work(target, "only", Silent()) == 3
        counts: dict[str, int] = {}

        def work(name: str) -> None:
            counts[name] = dataclasses.replace(job).work(target, name, Silent())

        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(counts.values()) == 3
        assert job.seal(target).digest == alone.seal(target).digest

    def test_a_silent_workers_shard_is_taken_over(self, job: Answering, target: Target) -> None:
        quick = dataclasses.replace(job, ttl_s=0.5)
        board = Board(job.store, job.run, ttl_s=0.5)
        names = CorpusReader(job.store, job.questions).shard_names
        assert board.claim(names[:1], "dead") is not None
        assert quick.work(target, "living", Silent()) == 3
        assert [marker.epoch for marker in board.all_done() if marker.shard == names[0]] == [2]
        assert {marker.worker for marker in board.all_done()} == {"living"}

    def test_sigterm_gives_the_lease_back_at_once(self, job: Answering, target: Target) -> None:
        claims: list[int] = []

        def told() -> None:
            claims.append(len(claims))
            if len(claims) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        assert dataclasses.replace(job, still_ours=told).work(target, "told", Silent()) == 1
        board = Board(job.store, job.run, ttl_s=job.ttl_s)
        assert board.held() == [], "nobody has to wait for it to go stale"
        assert job.work(target, "heir", Silent()) == 2

    def test_nothing_is_answered_twice(self, job: Answering, target: Target) -> None:
        assert job.work(target, "first", Silent()) == 3
        assert job.work(target, "second", Silent()) == 0
        assert {marker.worker for marker in Board(job.store, job.run).all_done()} == {"first"}

    def test_another_sampling_is_another_run(self, job: Answering, target: Target) -> None:
        job.work(target, "first", Silent())
        hotter = dataclasses.replace(job, settings=job.settings.model_copy(update={"temperature": 0.5}))
        with pytest.raises(
            StatesError, match=r"started with another specification: decode.temperature: 0.0 → 0.5; use"
        ):
            hotter.work(target, "second", Silent())
        wider = dataclasses.replace(job, settings=job.settings.model_copy(update={"rows": 99}))
        assert wider.work(target, "third", Silent()) == 0, "how many rows are decoded side by side is free"

    def test_a_store_that_cannot_hold_leases(self, job: Answering, target: Target, tmp_path: Path) -> None:
        (tmp_path / "store/file").write_bytes(b"")
        with pytest.raises(StoreError):
            dataclasses.replace(job, store=Store.open(f"{tmp_path}/store/file/below")).work(target, "w", Silent())


class TestSeal:
    def test_it_refuses_before_all_is_answered(self, job: Answering, target: Target) -> None:
        with pytest.raises(CorpusError) as caught:
            job.seal(target)
        assert str(caught.value) == (
            "answers: 3 of 3 shards are not answered yet; run the answering workers until they end"
        )
        assert job.store.list("answers") == []

    def test_twice_is_once(self, job: Answering, target: Target) -> None:
        job.work(target, "w", Silent())
        first = job.seal(target)
        assert job.seal(target) == first
        assert [entry.samples for entry in first.shards] == [4, 4, 4]
        assert first.settings["corpus"] == CorpusReader(job.store, job.questions).manifest.digest

    def test_a_damaged_answer_is_not_sealed(self, job: Answering, target: Target) -> None:
        job.work(target, "w", Silent())
        board = Board(job.store, job.run)
        marker = board.all_done()[1]
        data = bytearray(board.objects.get(marker.key))
        data[-1] ^= 1
        board.objects.put(marker.key, bytes(data))
        with pytest.raises(CorpusError, match=rf"{marker.key}: an answered shard is damaged; "):
            job.seal(target)
        assert job.store.child(job.run).head("manifest.json") is None
