"""Units as processes on nodes that have no systemd: a real sshd between us and them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from threading import Thread

import pytest

from drafthouse.errors import FleetError
from drafthouse.fleet import inventory
from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.errors import CommandError
from drafthouse.fleet.runtime.choose import runtime_of, runtimes_of
from drafthouse.fleet.runtime.docker import Docker
from drafthouse.fleet.runtime.on_node import DEFAULT_ROOT
from drafthouse.fleet.runtime.process import Process
from drafthouse.fleet.runtime.protocol import Launch, UnitStatus
from tests.doubles.nodes import Fleet, Node
from tests.doubles.nodes.fleet import SIZES
from tests.fleet.operator import overseers
from tests.patience import until

RUNTIME = Process()
GRACE_S = 60.0
"""For what ends by itself when it is told to."""
SECRET = "hush-4711 $(touch /srv/x) 'quoted'\nsecond line"


@pytest.fixture(scope="module")
def place(fleet: Fleet) -> Node:
    """A node as it was at first: other tests of the session may have left files and processes there."""
    node = fleet.nodes[1]
    node.execute(["sh", "-c", "rm -rf /srv/*"])
    node.restart()
    return node


@pytest.fixture(scope="module")
def connection(fleet: Fleet, place: Node) -> Iterator[NodeConnection]:
    node = inventory.Node(place.name, place.address, place.port, key_file=fleet.key, kind="rented")
    with NodeConnection(node, fleet.inventory / "known_hosts") as opened:
        yield opened


@pytest.fixture
def launch(request: pytest.FixtureRequest, connection: NodeConnection) -> Iterator[Launch]:
    """A unit of the test's own that is gone afterwards."""
    job = request.node.name.split("[")[0].removeprefix("test_").replace("_", "-")[:50]
    made = Launch(job=job, epoch=1, argv=("sleep", "1000"), restart="never", grace_s=5.0)
    yield made
    RUNTIME.stop(connection, made.unit, 0.0)
    RUNTIME.remove(connection, made.unit)


def status(connection: NodeConnection, launch: Launch) -> UnitStatus:
    return RUNTIME.status(connection, launch.unit)


def running(place: Node, words: str) -> list[int]:
    return [pid for pid, line in place.pids().items() if words in line and "supervisor-" not in line]


def kill(place: Node, *pids: int) -> None:
    """SIGKILL from outside of the node: these are pids as this machine counts them."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_unit_runs_on_without_a_connection_and_ends_by_its_own_will(
    fleet: Fleet, connection: NodeConnection, place: Node, launch: Launch
) -> None:
    with NodeConnection(connection.node, connection.known_hosts) as other:
        RUNTIME.start(
            other, replace(launch, argv=("sh", "-c", "trap 'echo bye; exit 0' TERM; echo hi; sleep 999 & wait"))
        )
    until(lambda: list(RUNTIME.logs(connection, launch.unit)) == ["hi"], "its first words")
    found = status(connection, launch)
    assert (found.state, found.exit, found.restarts) == ("running", None, 0)
    assert [unit.unit for unit in RUNTIME.units(connection)] == [launch.unit]
    stopped = RUNTIME.stop(connection, launch.unit, GRACE_S)
    assert stopped.how == "term"
    assert status(connection, launch).state == "exited"
    assert status(connection, launch).exit == 0
    assert list(RUNTIME.logs(connection, launch.unit)) == ["hi", "bye"]
    assert running(place, "sleep 999") == []
    assert RUNTIME.stop(connection, launch.unit, 5.0).how == "absent"
    RUNTIME.remove(connection, launch.unit)
    assert status(connection, launch).state == "absent"
    assert RUNTIME.stop(connection, launch.unit, 5.0).how == "absent"


def test_what_is_killed_comes_back_and_never_twice(connection: NodeConnection, place: Node, launch: Launch) -> None:
    # A grandchild that has left the process group and lost its parent, and so cannot be found by either.
    script = "setsid sh -c 'sleep 777 & exec sleep 777' & sleep 777"
    RUNTIME.start(connection, replace(launch, argv=("sh", "-c", script), restart="on-failure", retries=3))

    def complete() -> list[int]:
        """The shell and its three, once each of them is what it becomes."""
        now = running(place, "sleep 777")
        lines = place.pids()
        settled = [pid for pid in now if lines.get(pid) == "sleep 777"]
        return sorted(now) if (len(now), len(settled)) == (4, 3) else []

    def alone_again(before: list[int]) -> bool:
        now = complete()
        return bool(now) and not set(now) & set(before)

    first = until(complete, "the shell and its three")
    [shell] = [pid for pid in first if place.pids()[pid] != "sleep 777"]
    kill(place, shell)
    until(lambda: alone_again(first), "all of it anew")
    until(lambda: status(connection, launch).state == "running", "word of it")
    assert status(connection, launch).restarts == 1

    keeper, supervisor = overseers(place, launch.unit)
    second = complete()
    kill(place, supervisor)
    until(lambda: alone_again(second), "all of it anew, under another supervisor")
    until(lambda: status(connection, launch).state == "running", "word of it")
    assert status(connection, launch).restarts == 2
    assert len(overseers(place, launch.unit)) == 2

    third = complete()
    kill(place, keeper)
    until(lambda: keeper not in overseers(place, launch.unit), "the keeper's end")
    assert status(connection, launch).state == "running"
    assert complete() == third

    kill(place, *overseers(place, launch.unit))
    until(lambda: overseers(place, launch.unit) == [], "the supervisor's end")
    assert status(connection, launch).state == "running", "what the command had started is still there"
    assert RUNTIME.stop(connection, launch.unit, 5.0).how == "kill"
    assert running(place, "sleep 777") == []
    assert (status(connection, launch).state, status(connection, launch).exit) == ("exited", 137)


def test_a_stop_ends_all_of_it_within_the_grace_and_nothing_else(
    connection: NodeConnection, place: Node, launch: Launch
) -> None:
    script = "trap '' TERM; (trap '' TERM; setsid sleep 778 & setsid sleep 778 &); sleep 778; sleep 778"
    RUNTIME.start(connection, replace(launch, argv=("sh", "-c", script)))
    other = replace(launch, job="another", argv=("sleep", "778"))
    RUNTIME.start(connection, other)
    until(lambda: list(place.pids().values()).count("sleep 778") == 4, "the three of the one and the other's")
    stopped = RUNTIME.stop(connection, launch.unit, 1.0)
    assert stopped.how == "kill"
    assert 1.0 <= stopped.seconds < 60
    assert status(connection, launch).exit == 137
    assert len(running(place, "sleep 778")) == 1
    assert status(connection, other).state == "running"
    assert RUNTIME.stop(connection, other.unit, GRACE_S).how == "term"
    RUNTIME.remove(connection, other.unit)


def test_a_supervisor_that_hangs_is_no_obstacle(connection: NodeConnection, place: Node, launch: Launch) -> None:
    RUNTIME.start(connection, replace(launch, argv=("sleep", "779")))
    for pid in overseers(place, launch.unit):
        os.kill(pid, signal.SIGSTOP)
    assert RUNTIME.stop(connection, launch.unit, 0.2).how == "kill"
    assert running(place, "sleep 779") == []
    assert overseers(place, launch.unit) == []
    assert status(connection, launch).state == "exited"


def test_secrets_are_in_the_environment_and_nowhere_else(
    connection: NodeConnection, place: Node, launch: Launch
) -> None:
    seen: list[str] = []
    done = False

    def watch() -> None:
        while not done:
            seen.extend(place.pids().values())
            time.sleep(0.01)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        RUNTIME.start(connection, replace(launch, secrets={"TOKEN": SECRET}, env={"OPEN": "yes"}))
        until(lambda: any("supervisor-" in line for line in seen), "a look at the supervisor")
    finally:
        done = True
        watcher.join()
    assert not any("hush-4711" in line for line in seen)
    assert RUNTIME.exec(connection, launch.unit, ["printenv", "TOKEN"]).stdout == f"{SECRET}\n"
    listed = connection.run(["grep", "-rl", "hush-4711", DEFAULT_ROOT], check=False).stdout.split()
    assert listed == [f"{DEFAULT_ROOT}/units/{launch.unit}/environment.json"]
    assert connection.run(["stat", "-c", "%a", listed[0]]).stdout.strip() == "600"
    assert connection.run(["ls", "/srv"]).stdout.split() == ["drafthouse"]
    assert SECRET not in repr(launch)
    RUNTIME.stop(connection, launch.unit, 5.0)
    assert connection.run(["grep", "-r", "hush-4711", DEFAULT_ROOT], check=False).exit == 1


def test_what_is_wrong_is_told_with_the_nodes_name(connection: NodeConnection, place: Node, launch: Launch) -> None:
    listen = "import socket, time; server = socket.create_server(('', 8123)); time.sleep(1000)"
    RUNTIME.start(connection, replace(launch, argv=("python3", "-c", listen)))
    until(lambda: _answers(place, 8123), "the listener")
    with pytest.raises(CommandError, match=r"^node2: port 8123 is taken by another process$"):
        RUNTIME.start(connection, replace(launch, epoch=2, ports=(8123,)))
    with pytest.raises(CommandError, match=r"^node2: there is no program nonsense in PATH$"):
        RUNTIME.start(connection, replace(launch, epoch=2, argv=("nonsense",)))
    with pytest.raises(CommandError, match=f"^node2: {launch.unit} still runs$"):
        RUNTIME.remove(connection, launch.unit)
    assert [unit.unit for unit in RUNTIME.units(connection)] == [launch.unit]


def _answers(place: Node, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((place.address, port)) == 0


def test_a_full_disk_starts_nothing(connection: NodeConnection, place: Node, launch: Launch) -> None:
    RUNTIME.stop(connection, launch.unit, 0.0)  # the program is there before the disk is full
    place.resize("/srv", "8m")
    connection.run(["sh", "-c", "cat /dev/zero >/srv/filler; true"])
    try:
        with pytest.raises(CommandError, match=r"^node2: No space left on device"):
            RUNTIME.start(connection, replace(launch, files={"conf": "x" * 10_000}))
    finally:
        connection.run(["rm", "/srv/filler"])
        place.resize("/srv", SIZES["/srv"])
    assert status(connection, launch).state == "absent"
    assert running(place, "sleep 1000") == []


def test_a_log_is_followed_until_the_unit_ends(connection: NodeConnection, launch: Launch) -> None:
    RUNTIME.start(connection, replace(launch, argv=("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.3; done")))
    assert list(RUNTIME.logs(connection, launch.unit, follow=True)) == ["1", "2", "3"]
    assert list(RUNTIME.logs(connection, launch.unit, lines=1)) == ["3"]


def test_a_follower_that_leaves_leaves_the_unit_alone(connection: NodeConnection, place: Node, launch: Launch) -> None:
    RUNTIME.start(connection, replace(launch, argv=("sh", "-c", "echo first; exec sleep 780")))
    lines = RUNTIME.logs(connection, launch.unit, follow=True)
    assert next(lines) == "first"
    lines.close()  # type: ignore[attr-defined]
    until(lambda: running(place, f"logs {DEFAULT_ROOT}") == [], "the follower's end")
    assert status(connection, launch).state == "running"


def test_a_node_that_died_remembers_the_unit_as_ended_and_starts_it_anew(
    connection: NodeConnection, place: Node, launch: Launch
) -> None:
    RUNTIME.start(connection, replace(launch, argv=("sh", "-c", "echo life; exec sleep 781")))
    place.kill()
    place.restart()
    found = status(connection, launch)
    assert (found.state, found.exit) == ("exited", 137)
    RUNTIME.start(connection, replace(launch, argv=("sh", "-c", "echo life; exec sleep 781")))
    assert status(connection, launch).state == "running"
    until(lambda: list(RUNTIME.logs(connection, launch.unit)) == ["life", "life"], "the second life's word")


def test_a_node_without_python_says_what_to_do(fleet: Fleet, connection: NodeConnection) -> None:
    node = replace(connection.node, vars={"ansible_python_interpreter": "/opt/none/python3"})
    with (
        NodeConnection(node, connection.known_hosts) as blind,
        pytest.raises(CommandError, match=r"install Python 3\.9 or newer"),
    ):
        RUNTIME.units(blind)


def test_a_node_without_an_engine_has_no_containers_and_says_so(connection: NodeConnection, place: Node) -> None:
    place.write("/root/.bashrc", b"PATH=/srv/none\n")  # bash reads it when sshd starts it
    try:
        assert Docker().units(connection) == []
        with pytest.raises(CommandError, match="install a Docker Engine"):
            Docker().present(connection, f"sha256:{'0' * 64}")
        with pytest.raises(CommandError, match="install a Docker Engine"):
            Docker().status(connection, "drafthouse-a-e1")
    finally:
        place.execute(["rm", "/root/.bashrc"])


def test_the_root_folder_is_the_nodes_own_choice(connection: NodeConnection, launch: Launch) -> None:
    node = replace(connection.node, vars={"job_root": "/var/tmp/a folder"})
    with NodeConnection(node, connection.known_hosts) as other:
        RUNTIME.start(other, replace(launch, argv=("pwd",)))
        until(lambda: RUNTIME.status(other, launch.unit).state == "exited", "its end")
        assert list(RUNTIME.logs(other, launch.unit)) == [f"/var/tmp/a folder/jobs/{launch.job}"]
        assert status(connection, launch).state == "absent"


def test_which_runtime_looks_after_what(connection: NodeConnection, launch: Launch) -> None:
    assert runtime_of(launch, connection.node).name == "process"
    assert [runtime.name for runtime in runtimes_of(connection.node)] == ["process"]
    owned = replace(connection.node, kind="container")
    assert runtime_of(replace(launch, image="sha256:0"), owned).name == "docker"
    with pytest.raises(FleetError, match="use a job with `venv` on a rented node"):
        runtime_of("docker", connection.node)
