"""Deploy, stop, roll back, tidy up: with jobs that only count, so that what is tested is the fleet."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from drafthouse.errors import FleetError, StoreError
from drafthouse.fleet import operations
from drafthouse.fleet.controller import Controller
from drafthouse.fleet.inventory import Inventory
from drafthouse.fleet.survey import Rest, rests, survey, tidy
from tests.doubles.nodes import Fleet
from tests.fleet.operator import Operator
from tests.patience import until

COUNT = """
import itertools, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
word = sys.argv[1]
if word == "broken":
    sys.exit("this build is broken")
for number in itertools.count():
    print(word, number, flush=True)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def inventory(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    """Read once: Ansible needs seconds for it, and only the jobs differ between the tests."""
    fleet.write_inventory(fleet_store=(tmp_path_factory.mktemp("records") / "store").as_uri())
    return Inventory.load(fleet.inventory)


@pytest.fixture
def operator(healthy: Fleet, inventory: Inventory) -> Operator:
    assert inventory.fleet_store is not None
    shutil.rmtree(inventory.fleet_store.removeprefix("file://"), ignore_errors=True)
    return Operator(healthy, inventory.fleet_store)


def open_controller(operator: Operator, inventory: Inventory) -> Controller:
    return Controller(inventory, environment=operator.environment, who="tester@test")


@pytest.fixture
def controller(operator: Operator, inventory: Inventory) -> Iterator[Controller]:
    count(operator, "one")
    with open_controller(operator, inventory) as found:
        yield found
        for state in found.records.lives():
            with contextlib.suppress(FleetError):  # its node may be dead, by intent
                runtime = found.runtime(state.life, state.life.node)
                runtime.stop(found.connect(state.life.node), state.life.unit, 2)
                runtime.remove(found.connect(state.life.node), state.life.unit)


def count(operator: Operator, word: str, **more: Any) -> None:
    """A job that prints `word` and a number, ten times a second."""
    values = {
        "kind": "command",
        "node": "node1",
        "command": [sys.executable, "-c", COUNT, word],
        "secrets": [],
        "stop_grace_s": 30,
        "gate": {"timeout_s": 60, "poll_s": 0.1, "runs_s": 0.5},
        "retries": 0,
        **more,
    }
    operator.write_job("count", **values)


def counting(operator: Operator, node: str) -> list[str]:
    return [line.rsplit(" ", 1)[-1] for line in operator.fleet[node].pids().values() if COUNT.strip()[:20] in line]


def _workers(operator: Operator) -> set[int]:
    return {pid for pid, line in operator.fleet["node1"].pids().items() if COUNT.strip()[:20] in line}


def ours(controller: Controller) -> list[Rest]:
    """What is left over of the job; the nodes may hold units of other fleets."""
    return [rest for rest in rests(survey(controller)) if "-count-" in rest.unit]


def lives(controller: Controller) -> list[tuple[str, str]]:
    return [(state.life.node, state.status) for state in controller.records.lives("count")]


def test_an_unchanged_job_that_runs_is_left_alone(controller: Controller, operator: Operator) -> None:
    assert operations.deploy(controller, "count").outcome == "done"
    before = _workers(operator)
    assert operations.deploy(controller, "count").outcome == "unchanged"
    assert _workers(operator) == before
    assert lives(controller) == [("node1", "live")]


def test_a_dry_run_says_the_plan_and_does_nothing(controller: Controller, operator: Operator) -> None:
    found = operations.deploy(controller, "count", dry_run=True)
    assert found.outcome == "planned"
    assert any("start drafthouse-count-e1" in line for line in found.plan)
    assert lives(controller) == []
    assert counting(operator, "node1") == []


def test_a_change_that_does_not_work_is_taken_back(controller: Controller, operator: Operator) -> None:
    operations.deploy(controller, "count")
    count(operator, "broken")
    with pytest.raises(operations.OperationError) as caught:
        operations.deploy(controller, "count")
    report = caught.value.report
    assert "this build is broken" in (report.error or "")
    assert any("was started again on node1 as life 3" in note for note in report.notes), report.notes
    assert lives(controller) == [("node1", "retired"), ("node1", "failed"), ("node1", "live")]
    assert counting(operator, "node1") == ["one"]


def test_a_rollback_starts_what_worked_before(controller: Controller, operator: Operator) -> None:
    operations.deploy(controller, "count")
    count(operator, "two")
    operations.deploy(controller, "count")
    assert counting(operator, "node1") == ["two"]
    assert operations.rollback(controller, "count").outcome == "done"
    assert counting(operator, "node1") == ["one"]
    assert lives(controller)[-1] == ("node1", "live")


def test_a_job_moves_and_a_stopped_one_stays_stopped(controller: Controller, operator: Operator) -> None:
    operations.deploy(controller, "count")
    with pytest.raises(operations.RefusedError, match="lives on node1"):
        operations.deploy(controller, "count", node="node2")
    [moved] = operations.migrate(controller, "node1", "node2")
    assert (moved.source, moved.to, moved.outcome) == ("node1", "node2", "done")
    assert (counting(operator, "node1"), counting(operator, "node2")) == ([], ["one"])
    assert operations.stop(controller, "count").outcome == "done"
    assert counting(operator, "node2") == []
    assert lives(controller) == [("node1", "retired"), ("node2", "stopped")]
    with pytest.raises(operations.RefusedError, match="lives nowhere"):
        operations.stop(controller, "count")


def test_a_node_that_answers_is_not_recovered_from(controller: Controller) -> None:
    operations.deploy(controller, "count")
    with pytest.raises(operations.RefusedError, match="it is not gone"):
        operations.recover(controller, "node1", "node2")


def test_a_zombie_is_ended_when_its_node_is_back(controller: Controller, operator: Operator) -> None:
    operations.deploy(controller, "count")
    node = operator.fleet["node1"]
    node.cut()
    [found] = operations.recover(controller, "node1", "node2")
    assert found.outcome == "done"
    node.join()
    assert counting(operator, "node1") == ["one"]  # nobody has told it
    until(lambda: survey(controller, "node1").nodes[0].error is None, "an answer of node1")
    plans = ours(controller)
    assert [(rest.do, rest.node, rest.unit) for rest in plans] == [("stop", "node1", "drafthouse-count-e1")]
    assert tidy(controller, plans) == []
    assert (counting(operator, "node1"), counting(operator, "node2")) == ([], ["one"])
    assert ours(controller) == []


def test_a_node_that_died_is_back_without_its_jobs_being_lost(controller: Controller, operator: Operator) -> None:
    operations.deploy(controller, "count")
    operator.fleet["node1"].kill()
    found = survey(controller)
    assert found.nodes[0].error is not None
    assert found.jobs[0].current is not None
    assert found.jobs[0].unit is None
    [report] = operations.migrate(controller, "node1", "node2")
    assert any("cannot be reached" in line for line in report.plan)
    assert counting(operator, "node2") == ["one"]


def test_two_operators_do_not_act_on_one_job(controller: Controller, operator: Operator, inventory: Inventory) -> None:
    with controller.locked("count", "deploy"), open_controller(operator, inventory) as other:
        with pytest.raises(StoreError, match=r"tester@test.*fab unlock --job count"):
            operations.deploy(other, "count")
        assert lives(controller) == []


def test_a_lock_of_somebody_who_is_gone_can_be_broken(
    controller: Controller, operator: Operator, inventory: Inventory
) -> None:
    with open_controller(operator, inventory) as other:
        other._lock("count").acquire("gone@laptop", "deploy")
    holder = controller.break_lock("count", "the laptop died")
    assert holder is not None
    assert holder.who == "gone@laptop"
    assert operations.deploy(controller, "count").outcome == "done"
    assert any(entry["action"] == "unlock" for entry in operations.audit_entries(controller, 10))


def test_a_node_that_does_not_fit_is_refused_before_anything_happens(
    controller: Controller, operator: Operator
) -> None:
    count(operator, "one", gpus=2)
    with pytest.raises(operations.RefusedError, match="GPU"):
        operations.deploy(controller, "count")
    assert lives(controller) == []


def test_a_secret_that_is_not_in_the_environment_is_named(controller: Controller, operator: Operator) -> None:
    count(operator, "one", secrets=["NOT_THERE"])
    with pytest.raises(FleetError, match="NOT_THERE"):
        operations.deploy(controller, "count")
    assert lives(controller) == []


def test_a_secret_is_seen_by_the_job_and_by_nobody_else(controller: Controller, operator: Operator) -> None:
    value = "s3cr3t-$(touch /tmp/pwned)-'\"-value"
    controller.environment = {**controller.environment, "TOKEN": value}
    check = (
        "import hashlib, os, time\n"
        "print(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), flush=True)\n"
        "time.sleep(60)\n"
    )
    count(operator, "one", secrets=["TOKEN"], command=[sys.executable, "-c", check])
    operations.deploy(controller, "count")
    life = operations.life_of(controller, "count", None)
    node = controller.connect("node1")
    runtime = controller.runtime(life, "node1")
    said = until(lambda: "".join(runtime.logs(node, life.unit)), "its line in the log")
    assert hashlib.sha256(value.encode()).hexdigest() in said
    everything = "\n".join(
        [
            said,
            *operator.fleet["node1"].pids().values(),
            str(operations.audit_entries(controller, 100)),
            str([state.life for state in controller.records.lives()]),
            *(controller.records.objects.get(info.key).decode() for info in controller.records.objects.list()),
        ]
    )
    assert "s3cr3t" not in everything
    assert operator.fleet["node1"].execute(["ls", "/tmp"]).returncode == 0
    assert "pwned" not in str(operator.fleet["node1"].execute(["ls", "/tmp"]).stdout)


def test_logs_and_commands_reach_the_unit(controller: Controller) -> None:
    operations.deploy(controller, "count")
    life = operations.life_of(controller, "count", None)
    runtime, node = controller.runtime(life, "node1"), controller.connect("node1")
    lines = until(lambda: list(runtime.logs(node, life.unit, lines=3)), "lines in the log")
    assert lines[-1].startswith("one ")
    answer = runtime.exec(node, life.unit, ["printenv", "DRAFTHOUSE_EPOCH"])
    assert (answer.exit, answer.stdout.strip()) == (0, "1")


def test_following_logs_ends_when_nobody_listens(controller: Controller, operator: Operator) -> None:
    operations.deploy(controller, "count")
    life = operations.life_of(controller, "count", None)
    lines = controller.runtime(life, "node1").logs(controller.connect("node1"), life.unit, lines=1, follow=True)
    # More than there was when it was asked for: somebody follows on the node.
    assert [line.split()[0] for line in itertools.islice(lines, 5)] == ["one"] * 5
    assert _following(operator)
    lines.close()  # type: ignore[attr-defined]
    until(lambda: not _following(operator), "the end of what followed the log")


def _following(operator: Operator) -> list[str]:
    return [line for line in operator.fleet["node1"].pids().values() if " logs " in line and line.endswith(" follow")]
