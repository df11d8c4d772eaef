"""A worker whose job was moved elsewhere: it ends between two shards, and others need not wait for its leases."""

from __future__ import annotations

import pytest

from drafthouse.states import ExtractSettings, run_worker
from drafthouse.store import Board, Fence, FencedError, Store
from tests.doubles.extraction import MemoryCorpus, TinyTaps


def test_it_ends_between_two_shards_and_releases_its_leases(
    store: Store, target: TinyTaps, settings: ExtractSettings
) -> None:
    corpus, fence, board = MemoryCorpus(shards=5), Fence(store, "extract"), Board(store, "run")

    def moved(_: object) -> None:
        fence.raise_to(2, {})

    with pytest.raises(FencedError) as caught:
        run_worker(store, "run", corpus, target, settings, "old", on_shard=moved, still_ours=lambda: fence.check(1))
    assert caught.value.exit_code == 76
    done = board.all_done()
    assert 1 <= len(done) < 5
    assert "leased" not in {state.status for state in board.states(corpus.shard_names).values()}
    assert sorted(info.key for info in board.objects.list("data")) == sorted(marker.key for marker in done), (
        "what it had begun to upload is committed, and nothing else is there"
    )
    summary = run_worker(store, "run", corpus, target, settings, "new", still_ours=lambda: fence.check(2))
    assert summary.shards == 5 - len(done)


def test_one_that_comes_back_claims_nothing(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    store.probe()
    fence = Fence(store, "extract")
    fence.raise_to(2, {})
    with pytest.raises(FencedError):
        run_worker(store, "run", corpus, target, settings, "zombie", still_ours=lambda: fence.check(1))
    assert store.list("runs/run/lease") == []


def test_when_all_is_done_it_has_not_failed(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    run_worker(store, "run", corpus, target, settings, "w")
    fence = Fence(store, "extract")
    fence.raise_to(2, {})
    summary = run_worker(store, "run", corpus, target, settings, "late", still_ours=lambda: fence.check(1))
    assert (summary.shards, summary.interrupted) == (0, False)


def test_it_is_asked_before_every_claim(
    store: Store, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings
) -> None:
    asked: list[int] = []
    run_worker(
        store, "run", corpus, target, settings, "w", still_ours=lambda: asked.append(len(store.list("runs/run/lease")))
    )
    assert [number for number in asked if number < 3] == [0, 1, 2]
