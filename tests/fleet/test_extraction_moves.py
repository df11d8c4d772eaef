"""An extraction that is deployed, migrated and recovered: every shard becomes visible once, whatever dies."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from drafthouse.corpus import CorpusReader
from drafthouse.states import StatesReader
from drafthouse.states.heartbeat import Heartbeat
from drafthouse.store import Board, Store
from tests.fixtures_s3 import s3_url
from tests.fleet.faults import give_back
from tests.fleet.operator import SAMPLES, SHARDS, TTL_S, Operator, SealedRun, sealed_run
from tests.patience import until

pytestmark = [pytest.mark.faults, pytest.mark.s3, pytest.mark.slow]


@pytest.fixture
def run(fleet_s3: str, tmp_path: Path) -> SealedRun:
    return sealed_run(tmp_path, s3_url(fleet_s3))


def test_every_shard_is_there_once_after_a_migration_and_the_death_of_a_node(
    operator: Operator, run: SealedRun
) -> None:
    operator.write_job(
        "extract",
        kind="extract",
        node="node1",
        command=["drafthouse", "states", "extract", "--out", "run"],
        files={"run/run.yml": operator.bring(run.file)},
        store=run.store,
    )
    board = Board(Store.open(run.store), "states", ttl_s=TTL_S)
    with Heartbeat(board, "test") as heartbeat:
        # Somebody else works on most shards, so that the job is not through before anything happens to it.
        names = CorpusReader(Store.open(run.store), "answers").shard_names
        held = [lease for name in names[4:] if (lease := board.claim([name], "somebody")) is not None]
        for lease in held:
            heartbeat.hold(lease)

        # A first life, which counts when it has committed a shard.
        planned = operator.fab("deploy", "--job", "extract", "--dry-run")
        assert planned["outcome"] == "planned"
        assert not board.all_done()
        deployed = operator.fab("deploy", "--job", "extract")
        assert deployed["outcome"] == "done"
        assert "committed shard" in deployed["evidence"]
        until(lambda: len(board.all_done()) >= 4, "all that node1 can do")

        # To a second node, which finds nothing to claim before the old one has ended.
        moved = operator.fab("migrate", "--from", "node1", "--to", "node2")[0]
        assert (moved["outcome"], moved["source"], moved["to"]) == ("done", "node1", "node2")
        assert "others hold the rest" in moved["evidence"]
        assert working(operator, "node1") == []

        # The second node is cut off and its machine dies while it works.
        before = len(board.all_done())
        give_back(heartbeat, board, held[:4])
        until(lambda: len(board.all_done()) > before, "a shard of node2")
        operator.fleet["node2"].cut()
        operator.fleet["node2"].kill()
        sentence = operator.fab("migrate", "--from", "node1", "--to", "node3", code=2)
        assert "no job lives on node1" in sentence
        give_back(heartbeat, board, held[4:])
        recovered = operator.fab("recover", "--from", "node2", "--to", "node3")[0]
        assert recovered["outcome"] == "done"
        until(lambda: len(board.all_done()) == SHARDS, "the commit of all shards", seconds=300)

    markers = board.all_done()
    assert {marker.shard for marker in markers} == set(names)
    assert len(markers) == SHARDS
    for marker in markers:
        assert hashlib.sha256(board.objects.get(marker.key)).hexdigest() == marker.sha256
    assert {marker.worker.partition("-e")[0] for marker in markers} == {"node1", "node2", "node3"}
    reader = StatesReader(Store.open(run.store), "states")
    reader.verify()
    assert len(reader) == SAMPLES
    status = operator.fab("status")["jobs"]["extract"]
    assert [life["status"] for life in status["lives"]] == ["retired", "lost", "live"]
    actions = [(entry["action"], entry["outcome"]) for entry in operator.fab("audit") if entry["job"] == "extract"]
    assert actions == [("deploy", "done"), ("migrate", "done"), ("recover", "done")]


def working(operator: Operator, node: str) -> list[str]:
    return [line for line in operator.fleet[node].pids().values() if "drafthouse states extract" in line]
