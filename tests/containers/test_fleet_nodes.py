"""Runtimes on nodes that have systemd and an engine of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from drafthouse.errors import FleetError
from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.errors import CommandError
from drafthouse.fleet.probe.run import probe
from drafthouse.fleet.runtime.docker import Docker
from drafthouse.fleet.runtime.process import Process
from drafthouse.fleet.runtime.protocol import FENCED, Launch, Runtime, UnitStatus
from tests.containers.fleet_nodes import Machine, machines, work_image
from tests.patience import until

__all__ = ["machines", "work_image"]
pytestmark = pytest.mark.containers
DOCKER, PROCESS = Docker(), Process()
REGISTRY = """\
version: 0.1
storage: {filesystem: {rootdirectory: /var/lib/docker-registry}}
http: {addr: "127.0.0.1:5000"}
"""
SECRET = "hush-4711 $(touch /x) 'quoted'\nsecond line"


@pytest.fixture(scope="module")
def connections(machines: tuple[Machine, Machine]) -> Iterator[tuple[NodeConnection, NodeConnection]]:
    first, second = (NodeConnection(machine.node, machine.known_hosts) for machine in machines)
    with first, second:
        yield first, second


@pytest.fixture(scope="module")
def node(connections: tuple[NodeConnection, NodeConnection], work_image: str) -> NodeConnection:
    """The first node, which has been given the image."""
    DOCKER.provide(connections[0], work_image)
    return connections[0]


@pytest.fixture
def machine(machines: tuple[Machine, Machine]) -> Machine:
    return machines[0]


@pytest.fixture
def launch(request: pytest.FixtureRequest, node: NodeConnection, work_image: str) -> Iterator[Launch]:
    """A container of the test's own that is gone afterwards."""
    job = request.node.name.removeprefix("test_").replace("_", "-")[:50]
    made = Launch(job=job, epoch=1, argv=("sleep", "1000"), image=work_image, restart="never")
    yield made
    DOCKER.stop(node, made.unit, 0.0)
    DOCKER.remove(node, made.unit)


def ended(runtime: Runtime, node: NodeConnection, unit: str) -> UnitStatus:
    until(lambda: runtime.status(node, unit).state == "exited", f"the end of {unit}", every=0.1)
    return runtime.status(node, unit)


def processes(machine: Machine, words: str) -> dict[int, str]:
    """Command lines with `words` on a node, by pid."""
    lines = machine.run("ps", "-eo", "pid=,args=").splitlines()
    found = {int(line.split(None, 1)[0]): line.split(None, 1)[1] for line in lines if words in line}
    return {pid: line for pid, line in found.items() if "supervisor-" not in line and "ps -eo" not in line}


def test_systemd_looks_after_the_supervisor(node: NodeConnection, machine: Machine) -> None:
    # The grandchild has another session, no parent, and an environment that does not say whose it is.
    script = "env -i /usr/bin/setsid sh -c 'sleep 777 & exec sleep 777' & exec sleep 777"
    launch = Launch(job="unit", epoch=1, argv=("sh", "-c", script), venv=None, retries=3, grace_s=5.0)
    PROCESS.start(node, launch)

    def complete() -> dict[int, str]:
        """The three, once each of them is what it becomes."""
        now = processes(machine, "sleep 777")
        return now if list(now.values()) == ["sleep 777"] * 3 else {}

    first = until(complete, "the three processes")
    assert machine.run("systemctl", "is-active", launch.unit) == "active\n"
    supervisor = machine.run("systemctl", "show", "--property=MainPID", "--value", launch.unit).strip()
    machine.run("kill", "-9", supervisor)

    def anew() -> bool:
        now = complete()
        return bool(now) and not now.keys() & first.keys()

    until(anew, "three others")
    until(lambda: PROCESS.status(node, launch.unit).state == "running", "word of it")
    assert PROCESS.status(node, launch.unit).restarts == 1
    assert PROCESS.stop(node, launch.unit, 60.0).how == "term"
    assert processes(machine, "sleep 777") == {}
    # The supervisor's last word is told before systemd has seen its end.
    inactive = ("systemctl", "is-active", launch.unit)
    until(lambda: machine.run(*inactive, check=False) == "inactive\n", "systemd's word of the end")
    assert PROCESS.status(node, launch.unit).exit == 143
    PROCESS.start(node, launch)
    machine.run("systemctl", "stop", launch.unit)  # as when the node shuts down
    assert (PROCESS.status(node, launch.unit).state, PROCESS.status(node, launch.unit).exit) == ("exited", 143)
    PROCESS.remove(node, launch.unit)
    assert PROCESS.units(node) == []


def test_images_are_carried_between_engines_and_pulled_by_digest(
    connections: tuple[NodeConnection, NodeConnection], machines: tuple[Machine, Machine], work_image: str
) -> None:
    first, second = connections
    DOCKER.provide(first, work_image)
    assert not DOCKER.present(second, work_image)
    DOCKER.provide(second, work_image, via=first)
    assert DOCKER.present(second, work_image)

    machines[1].put("/etc/docker/registry/config.yml", REGISTRY)
    machines[1].run("systemctl", "restart", "docker-registry")
    until(lambda: machines[1].run("ss", "-Hltn", "sport = :5000"), "the registry's port")
    name = "127.0.0.1:5000/work"
    machines[1].run("docker", "tag", work_image, name)
    machines[1].run("docker", "push", "--quiet", name)
    pushed = machines[1].run("docker", "image", "inspect", "--format", "{{index .RepoDigests 0}}", name).strip()
    machines[1].run("docker", "image", "rm", "--force", work_image)
    assert not DOCKER.present(second, pushed)
    DOCKER.provide(second, pushed)
    assert DOCKER.present(second, pushed)

    machines[0].run("docker", "image", "rm", "--force", work_image)
    with pytest.raises(CommandError, match=r"cannot be had: the registry does not give it .* and the engine of this"):
        DOCKER.provide(first, pushed)
    DOCKER.provide(first, pushed, via=second)
    assert DOCKER.present(first, pushed), "by the digest that only the registry knows"
    assert DOCKER.present(first, work_image)


def test_a_container_is_given_what_its_job_says(node: NodeConnection, machine: Machine, launch: Launch) -> None:
    machine.run("mkdir", "-p", "/srv/models")
    machine.run("sh", "-c", "echo weights >/srv/models/a")
    looks = "pwd; cat conf/a.yml /m/a; id -u; env | grep -c OPEN; touch /m/b 2>/dev/null || echo read-only"
    given = replace(
        launch,
        argv=("sh", "-c", f"trap '' TERM; {looks}; sleep 1000"),
        env={"OPEN": "x y\n$HOME"},
        secrets={"TOKEN": SECRET},
        files={"conf/a.yml": "x: 1\n"},
        mounts={"/srv/models": "/m:ro"},
        shm_gib=0.0625,
        labels={"kind": "command"},
    )
    DOCKER.start(node, given)
    home = f"/srv/drafthouse/jobs/{launch.job}"
    wanted = ["entered: sh", home, "x: 1", "weights", "1234", "1", "read-only"]
    until(lambda: list(DOCKER.logs(node, launch.unit)) == wanted, "all that it says")
    assert list(DOCKER.logs(node, launch.unit, lines=1)) == ["read-only"]
    found = DOCKER.status(node, launch.unit)
    assert (found.state, found.exit, found.runtime, found.image) == ("running", None, "docker", launch.image)
    assert [unit.unit for unit in DOCKER.units(node)] == [launch.unit]
    inspected = machine.run("docker", "inspect", launch.unit)
    labels = json.loads(inspected)[0]["Config"]["Labels"]
    assert labels == {"drafthouse.job": launch.job, "drafthouse.epoch": "1", "drafthouse.kind": "command"}
    # The value is in one file of the node, which nobody but root and the container's user may read.
    said = DOCKER.exec(node, launch.unit, ["sh", "-c", 'echo "$TOKEN"'])
    assert (said.stdout, said.stderr) == (f"{SECRET}\n", "")
    assert "hush-4711" not in inspected + machine.run("ps", "-eo", "args")
    holders = machine.run("grep", "-rl", "hush-4711", "/srv").split()
    assert holders == [f"/srv/drafthouse/units/{launch.unit}/box/secrets"]
    assert machine.run("stat", "-c", "%a %u", *holders) == "600 1234\n"
    # A repeated deploy leaves it alone.
    DOCKER.start(node, replace(given, argv=("false",)))
    assert DOCKER.status(node, launch.unit).pid == found.pid
    with pytest.raises(CommandError, match="still runs"):
        DOCKER.remove(node, launch.unit)
    assert DOCKER.stop(node, launch.unit, 1.0).how == "kill"
    assert machine.run("grep", "-rl", "hush-4711", "/srv", check=False) == ""
    assert DOCKER.stop(node, launch.unit, 1.0).how == "absent"


def test_how_containers_end(node: NodeConnection, machine: Machine, launch: Launch) -> None:
    polite = replace(launch, argv=("sh", "-c", "trap 'echo bye; exit 7' TERM; sleep 778 & wait"))
    DOCKER.start(node, polite)
    # Not the shell that will start it: this one may not know yet what to do at SIGTERM.
    until(lambda: "sleep 778" in processes(machine, "sleep 778").values(), "the shell's child")
    assert DOCKER.stop(node, launch.unit, 60.0).how == "term"
    assert DOCKER.status(node, launch.unit).exit == 7
    assert list(DOCKER.logs(node, launch.unit))[-1] == "bye"
    assert processes(machine, "sleep 778") == {}

    DOCKER.start(node, replace(launch, argv=("sh", "-c", "exit 3"), restart="on-failure", retries=1))
    until(lambda: DOCKER.status(node, launch.unit).restarts == 1, "the second try")
    assert ended(DOCKER, node, launch.unit).exit == 3

    for restart in ("on-failure", "always"):
        moved = replace(launch, argv=("sh", "-c", f"exit {FENCED}"), restart=restart)
        DOCKER.start(node, moved)
        assert ended(DOCKER, node, launch.unit).exit == FENCED
        assert DOCKER.status(node, launch.unit).restarts == 0, "it lives elsewhere now"

    DOCKER.start(node, replace(launch, argv=("true",), restart="always"))
    until(lambda: DOCKER.status(node, launch.unit).restarts >= 1, "the next life")
    assert DOCKER.stop(node, launch.unit, 5.0).unit == launch.unit
    assert DOCKER.status(node, launch.unit).state == "exited"


def test_a_container_that_cannot_start_leaves_nothing_behind(
    node: NodeConnection, machine: Machine, launch: Launch
) -> None:
    launch = replace(launch, secrets={"TOKEN": SECRET})
    for wrong, sentence in (
        (replace(launch, image="sha256:" + "0" * 64), "is not on the node; bring it with `fab pull-image`"),
        (replace(launch, mounts={"/nowhere": "/m"}), "/nowhere"),
        (replace(launch, gpus=1), "could not select device driver"),
        (replace(launch, ports=(22,)), "port 22 is taken by another process"),
        (replace(launch, files={"../x": "y"}), "would lie outside of the job's folder"),
    ):
        with pytest.raises(CommandError, match=sentence):
            DOCKER.start(node, wrong)
        assert DOCKER.status(node, launch.unit).state == "absent"
        assert "hush-4711" not in machine.run("grep", "-rs", "hush", "/srv", check=False)
    with pytest.raises(FleetError, match="cannot be the name of an environment variable"):
        DOCKER.start(node, replace(launch, secrets={"A; touch /x": "y"}))


def test_the_probe_sees_engine_and_systemd(node: NodeConnection) -> None:
    found = probe(node)
    assert found.systemd
    assert found.engine is not None
    assert found.engine.version.startswith("20.10")
    assert not found.engine.nvidia
    assert found.hostname == node.node.name
