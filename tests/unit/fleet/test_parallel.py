"""One call for many nodes."""

from __future__ import annotations

import threading

import pytest

from drafthouse.errors import FleetError, StoreError
from drafthouse.fleet.errors import UnreachableError
from drafthouse.fleet.node import Node
from drafthouse.fleet.parallel import each

NODES = [Node(f"n{number}", "h", port=number + 1) for number in range(12)]


def test_one_failing_node_hides_no_other_and_the_order_is_the_inputs() -> None:
    def call(node: Node) -> str:
        if node.name == "n3":
            raise UnreachableError("gone", where=node.name)
        if node.name == "n5":
            raise StoreError("full", where="s3")
        return node.name.upper()

    answers = each(NODES, call)
    assert list(answers) == [node.name for node in NODES]
    assert isinstance(answers["n3"], UnreachableError)
    assert isinstance(answers["n5"], FleetError)
    assert "full" in str(answers["n5"])
    assert [answers[name] for name in ("n0", "n11")] == ["N0", "N11"]


def test_nodes_are_asked_side_by_side_but_not_without_limit() -> None:
    together = threading.Barrier(8, timeout=10)
    now, most, lock = 0, 0, threading.Lock()

    def call(node: Node) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if node.port <= 8:
            together.wait()
        with lock:
            now -= 1

    each(NODES, call)
    assert most == 8


def test_a_defect_is_raised_when_all_have_had_their_turn() -> None:
    asked = []

    def call(node: Node) -> None:
        asked.append(node.name)
        if node.name == "n0":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        each(NODES, call)
    assert len(asked) == len(NODES)


def test_no_nodes_no_answers() -> None:
    assert each([], lambda node: node) == {}
