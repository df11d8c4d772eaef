"""What nodes say of themselves, over a real sshd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.jobs import Job
from drafthouse.fleet.node import Node
from drafthouse.fleet.parallel import each
from drafthouse.fleet.probe import peers
from drafthouse.fleet.probe.fit import misfits
from drafthouse.fleet.probe.report import Report
from drafthouse.fleet.probe.run import probe
from drafthouse.fleet.runtime.process import Process
from drafthouse.fleet.runtime.protocol import Launch
from tests.doubles.nodes import Fleet
from tests.patience import until

TOOLS = Path(__file__).parents[1] / "doubles/nodes_tools"
GPUS = """\
0, GPU-aa, NVIDIA RTX A6000, 00000000:41:00.0, 49140, 20480, 97, 71, 281.50, 4, 4, 16, 16, 580.126.09
1, GPU-bb, NVIDIA RTX A6000, 00000000:42:00.0, 49140, 300, 0, 31, 21.50, 4, 1, 16, 16, 580.126.09
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV4\t0-31\t0
GPU1\tNV4\t X \t0-31\t0
"""


@pytest.fixture(scope="module")
def connections(fleet: Fleet) -> Iterator[dict[str, NodeConnection]]:
    known_hosts = fleet.inventory / "known_hosts"
    with ExitStack() as stack:
        nodes = [Node(one.name, one.address, one.port, key_file=fleet.key, kind="rented") for one in fleet.nodes]
        yield {node.name: stack.enter_context(NodeConnection(node, known_hosts)) for node in nodes}


@pytest.fixture
def with_gpus(fleet: Fleet) -> Iterator[Fleet]:
    """The first node has nvidia-smi (a double), which says what is in the folder /srv/gpus there."""
    node = fleet.nodes[0]
    # bash reads this when sshd starts it.
    node.write("/root/.bashrc", f"export PATH={TOOLS}:$PATH NVIDIA_SMI_DOUBLE=/srv/gpus\n".encode())
    for name, text in {"gpus": GPUS, "topology": TOPOLOGY, "holders": ""}.items():
        node.write(f"/srv/gpus/{name}", text.encode())
    yield fleet
    node.execute(["rm", "-rf", "/root/.bashrc", "/srv/gpus"])


def job(**changes: object) -> Job:
    values = {"name": "a", "kind": "command", "venv": "/opt/venv", "command": ["true"], "store": None}
    return Job.model_validate({**values, **changes})


def test_all_nodes_at_once_say_what_they_are(fleet: Fleet, connections: dict[str, NodeConnection]) -> None:
    found = each([one.node for one in connections.values()], lambda node: probe(connections[node.name]))
    assert list(found) == ["node1", "node2", "node3"]
    for name, report in found.items():
        assert isinstance(report, Report)
        assert (report.node, report.hostname) == (name, name)
        assert report.gpus is None
        assert report.reasons["gpus"] == "nvidia-smi is not installed"
        assert not report.systemd
        assert report.shm is not None
        assert report.shm.total_bytes == 256 * 2**20, "its own, not this machine's"
        assert report.disk is not None
        assert report.disk.total_bytes == 2**30
        assert report.disk.path == "/srv/drafthouse"
        assert report.clock is not None
        # One clock: whatever is measured is the round trip.
        assert abs(report.clock.offset_s) <= report.clock.bound_s + 0.001
        assert misfits(job(needs={"disk_gib": 0.5, "shm_gib": 0.2}), report) == []
        assert [one.what for one in misfits(job(gpus=1, needs={"disk_gib": 5}), report)] == [
            "GPUs",
            "free disk at /srv/drafthouse",
        ]


def test_gpus_and_who_holds_them(with_gpus: Fleet, connections: dict[str, NodeConnection]) -> None:
    node, runtime = connections["node1"], Process()
    launch = Launch(job="holds-a-gpu", epoch=1, argv=("sleep", "1000"), gpus=1)
    runtime.start(node, launch)
    try:
        pid = runtime.status(node, launch.unit).pid
        node.write("/srv/gpus/holders", f"GPU-aa, {pid}, sleep, 20000\n")
        report = probe(node)
    finally:
        runtime.stop(node, launch.unit, 5.0)
        runtime.remove(node, launch.unit)
    assert report.gpus is not None
    assert [gpu.name for gpu in report.gpus] == ["NVIDIA RTX A6000"] * 2
    assert [holder.job for holder in report.gpus[0].holders] == ["holds-a-gpu"]
    assert report.jobs == ("holds-a-gpu",)
    assert report.driver == "580.126.09"
    assert report.paths == {"0-1": "NV4"}
    assert report.cuda is None
    assert "libcuda" in report.reasons["cuda"]
    assert misfits(job(name="holds-a-gpu", gpus=2), report) == [], "its next life may have what it holds"
    assert [one.what for one in misfits(job(gpus=2), report)] == ["GPU 0"]
    assert misfits(job(gpus=["GPU-bb"]), report) == []


def test_a_driver_that_hangs_does_not_hang_the_probe(with_gpus: Fleet, connections: dict[str, NodeConnection]) -> None:
    with_gpus.nodes[0].write("/srv/gpus/hang", b"")
    report = probe(connections["node1"], limit_s=0.5)
    assert report.gpus is None
    assert report.reasons["gpus"] == "nvidia-smi does not answer"
    assert report.memory is not None
    until(lambda: "sleep 1000" not in with_gpus.nodes[0].pids().values(), "the end of the nvidia-smi that hangs")


def test_peers_reach_each_other_or_not(fleet: Fleet, connections: dict[str, NodeConnection]) -> None:
    first, second = connections["node1"], connections["node2"]
    wanting = job(needs={"peers": {"node2": 29400, "node1": 29400}})
    tried = peers.of_job(wanting, first, connections.__getitem__)
    assert [(one.source, one.target, one.arrives) for one in tried] == [
        ("node1", "node2", True),
        ("node2", "node1", True),
    ]
    # One way only, as behind a NAT.
    address = first.node.host
    fleet["node2"].execute(["ip", "route", "add", "unreachable", f"{address}/32", "table", "local"])
    try:
        assert not peers.reach(second, first, 29400).arrives
    finally:
        fleet["node2"].execute(["ip", "route", "del", "unreachable", f"{address}/32", "table", "local"])


def test_a_port_where_the_peer_works_already_is_reached(connections: dict[str, NodeConnection]) -> None:
    first, second = connections["node1"], connections["node2"]
    assert peers.reach(first, second, second.node.port).arrives
    assert peers.of_job(job(), first, connections.__getitem__) == []


def test_a_peer_that_is_gone_is_a_reason_and_no_crash(healthy: Fleet, connections: dict[str, NodeConnection]) -> None:
    healthy["node3"].kill()
    tried = peers.of_job(job(needs={"peers": {"node3": 29400}}), connections["node1"], connections.__getitem__)
    assert [one.arrives for one in tried] == [False]
    assert tried[0].reason.startswith("node3 cannot be asked")
