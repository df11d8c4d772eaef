"""A served model that changes its node behind a proxy: no request fails, and only what answers well is switched to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.nodes import Fleet
from tests.fleet.faults import Traffic
from tests.fleet.haproxy import HaProxy, haproxy
from tests.fleet.operator import COPY_ANSWER, PORT, Operator, serve_embedded

pytestmark = [
    pytest.mark.faults,
    pytest.mark.s3,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin") is None, reason="haproxy is not installed"
    ),
]


@pytest.fixture
def front(healthy: Fleet, tmp_path: Path) -> Iterator[HaProxy]:
    servers = {node.name: (node.address, PORT) for node in healthy.nodes}
    with haproxy(healthy.controller_address, servers, tmp_path) as found:
        yield found


def test_clients_notice_nothing_of_a_migration_and_nothing_of_one_that_fails(
    operator: Operator, front: HaProxy
) -> None:
    serve_embedded(operator, front.admin, broken="node3")
    deployed = operator.fab("deploy", "--job", "serve")
    assert "4 of 4 questions right" in deployed["evidence"]

    with Traffic(front.url) as traffic:
        moved = operator.fab("migrate", "--from", "node1", "--to", "node2")[0]
    assert moved["outcome"] == "done"
    assert traffic.failures == []
    assert len(traffic.answers) > 3
    assert set(traffic.answers) == {COPY_ANSWER}
    assert not any("embedded_server" in line for line in operator.fleet["node1"].pids().values())

    # On the third node the model loads and talks nonsense: the canary refuses it, and the clients stay where they are.
    with Traffic(front.url) as traffic:
        refused = operator.fab("migrate", "--from", "node2", "--to", "node3", code=2)
    assert refused["outcome"] == "failed"
    assert "canary failed" in refused["error"]
    assert traffic.failures == []
    assert set(traffic.answers) == {COPY_ANSWER}
    assert not any("embedded_server" in line for line in operator.fleet["node3"].pids().values())
    lives = operator.fab("status")["jobs"]["serve"]["lives"]
    assert [(life["node"], life["status"]) for life in lives] == [
        ("node1", "retired"),
        ("node2", "live"),
        ("node3", "failed"),
    ]
