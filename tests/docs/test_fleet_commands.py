"""The tasks of `fab` that documents show, on real nodes: one job's life, told in commands.

Moves, deaths and recoveries are asserted in tests/fleet; here every other task is called as a user types it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fabric.main import make_program

from drafthouse.fleet.inventory import Inventory
from tests.docs.parsers import help_kept
from tests.doubles.nodes import Fleet, missing
from tests.fleet.operator import ROOT, Operator, heal
from tests.patience import until

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"nodes need {missing()}")
COUNT = """
import itertools, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
for number in itertools.count():
    print(sys.argv[1], number, flush=True)
    time.sleep(0.2)
"""
Fab = Callable[..., str]


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("documents")
    with Fleet(2, folder / "fleet") as fleet:
        store = (folder / "records").as_uri()
        fleet.write_inventory(fleet_store=store)
        yield Operator(fleet, store)
        heal(fleet)


@pytest.fixture
def fab(operator: Operator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fab:
    """`fab …` in this process; what it printed. Ansible reads the inventory once: nothing of it changes meanwhile."""
    monkeypatch.setattr(Inventory, "load", functools.lru_cache(maxsize=None)(Inventory.load))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        argv = ["fab", "--search-root", str(ROOT), *words, "--inventory", str(operator.inventory)]
        ended = 0
        try:
            with help_kept():
                make_program().run(argv)
        except SystemExit as end:
            ended = int(end.code or 0)
        said = capsys.readouterr()
        assert ended == code, (words, said)
        return said.out

    return call


def _count(operator: Operator, word: str) -> None:
    operator.write_job(
        "count",
        kind="command",
        node="node1",
        command=[sys.executable, "-c", COUNT, word],
        secrets=[],
        stop_grace_s=30,
        gate={"timeout_s": 60, "poll_s": 0.1, "runs_s": 0.5},
    )


def test_a_key_is_shown_and_pinned(operator: Operator, fab: Fab) -> None:
    known = operator.inventory / "known_hosts"
    before = known.read_text(encoding="utf-8")
    known.write_text("", encoding="utf-8")
    try:
        shown = fab("trust", "--node", "node1")
        assert "node1 shows ssh-ed25519 SHA256:" in shown
        fingerprint = shown.split()[-1]
        assert fab("trust", "--node", "node1", "--fingerprint", fingerprint).endswith("is trusted\n")
        assert fab("trust", "--node", "node1", "--fingerprint", fingerprint, "--replace").endswith("is trusted\n")
        assert operator.fleet["node1"].host_key.split()[1] in known.read_text(encoding="utf-8")
    finally:
        known.write_text(before, encoding="utf-8")


def test_one_life_of_a_job(operator: Operator, fab: Fab) -> None:
    _count(operator, "one")
    assert "node1" in fab("probe", "--node", "node1", "--job", "count")
    assert "start drafthouse-count-e1" in fab("plan", "--job", "count")
    assert "count (command) on node1: done" in fab("deploy", "--job", "count", "--node", "node1")
    assert "count" in fab("status")
    assert json.loads(fab("status", "--node", "node1", "--json"))["jobs"]["count"]
    until(lambda: "one " in fab("logs", "--job", "count", "--lines", "3"), "its lines")
    assert Path(fab("exec", "--job", "count", "--command", "pwd").strip()).is_absolute()
    assert "node2" in fab("migrate", "--from", "node1", "--to", "node2", "--dry-run")
    fab("recover", "--from", "node1", "--to", "node2", code=2)  # it answers
    assert "is lost" in fab("recover", "--from", "node1", "--to", "node2", "--force", "--dry-run")
    _count(operator, "two")
    assert "done" in fab("deploy", "--job", "count")
    assert "one " not in fab("logs", "--job", "count")
    assert "record life 3" in fab("rollback", "--job", "count", "--dry-run")
    assert "done" in fab("rollback", "--job", "count")
    until(lambda: "one " in fab("logs", "--job", "count"), "its lines")
    assert "done" in fab("stop", "--job", "count")
    assert "one " in fab("logs", "--job", "count", "--follow")
    said = fab("audit", "--newest", "20")
    assert all(word in said for word in ("deploy", "rollback", "stop"))
    assert "drafthouse-count-e" in fab("gc", "--dry-run", "--keep", "0")
    fab("gc", "--node", "node1")
    assert "nobody held its lock" in fab("unlock", "--job", "count", "--reason", "the laptop died during a deploy")


def test_the_operator_is_the_one_who_is_named(operator: Operator, fab: Fab) -> None:
    _count(operator, "one")
    fab("deploy", "--job", "count")
    fab("stop", "--job", "count")
    who = {entry["who"] for entry in json.loads(fab("audit", "--json"))}
    assert len(who) == 1
    assert os.uname().nodename in who.pop()
